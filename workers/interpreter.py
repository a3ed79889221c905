"""The Python that ranks, and all else that imports torch, are started with. It need not be the one that we run from.

A node whose pool's Python is not fit for Ray runs from another (cluster/interpreters.py), and is told of the pool's by
POLYFLEET_INTERPRETER; so is an agent in an image that has two.
"""

import os
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec

from cluster import interpreters
from cluster.interpreters import Interpreter
from cluster.types import Finding

VARIABLE = "POLYFLEET_INTERPRETER"
MODULES = ("torch", "torch_xla", "torch_tpu", "torch_neuronx", "intel_extension_for_pytorch")
"""What is asked for by `has`."""
DISTRIBUTIONS = (
    *("ray", "torch", "torch-xla", "torch_tpu", "torch-neuronx", "libneuronxla", "intel-extension-for-pytorch"),
    *("triton", "torchao", "numpy", "safetensors"),
)
"""Whose versions an agent tells."""
ANEW_S = 30.0
"""Packages may be installed while an agent runs. It looks at its devices every minute, and twice when it starts."""

_told: dict[str, tuple[Interpreter, float]] = {}


def interpreter(environ: Mapping[str, str] | None = None) -> str:
    return (os.environ if environ is None else environ).get(VARIABLE) or sys.executable


def is_own() -> bool:
    """Whether we run from it."""
    return interpreter() == sys.executable


def has(module: str) -> bool:
    """One of MODULES."""
    return find_spec(module) is not None if is_own() else module in told().modules


def told() -> Interpreter:
    """What the interpreter told of itself when it was last asked."""
    found, _ = _told.get(interpreter()) or _ask()
    return found


def _ask() -> tuple[Interpreter, float]:
    answer = interpreters.look(interpreter(), DISTRIBUTIONS, MODULES), time.monotonic()
    _told[interpreter()] = answer
    return answer


def findings() -> list[Finding]:
    """Why ranks cannot run from it, where it is not ours. Asked anew after ANEW_S."""
    if is_own():
        return []
    if (known := _told.get(interpreter())) and time.monotonic() - known[1] > ANEW_S:
        _ask()
    found = told()
    message = f"the pool's {found.path} {found.refusal}"
    return [Finding("error", "interpreter", message, found.remedy)] if found.refusal else []
