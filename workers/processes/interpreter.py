"""Python interpreter of ranks and of everything else that imports torch. It may differ from our own.

A node whose pool's Python cannot run Ray uses another one (cluster/environments/interpreters.py) and gets the path of
the pool's in POLYFLEET_INTERPRETER; so does an agent in an image that has two.
"""

import os
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec

from cluster.environments import interpreters
from cluster.environments.interpreters import Interpreter
from cluster.types import Finding

VARIABLE = "POLYFLEET_INTERPRETER"
MODULES = ("torch", "torch_xla", "torch_tpu", "torch_neuronx", "intel_extension_for_pytorch")
"""Modules that `has` can look up."""
DISTRIBUTIONS = (
    *("ray", "torch", "torch-xla", "torch_tpu", "torch-neuronx", "libneuronxla", "intel-extension-for-pytorch"),
    *("triton", "torchao", "numpy", "safetensors"),
)
"""Distributions whose versions an agent reports."""
REFRESH_S = 30.0
"""Age at which a description is renewed, as packages may be installed while an agent runs. Devices are checked every
minute, and twice when an agent starts."""

_descriptions: dict[str, tuple[Interpreter, float]] = {}


def interpreter(environ: Mapping[str, str] | None = None) -> str:
    """Return the path of the interpreter."""
    return (os.environ if environ is None else environ).get(VARIABLE) or sys.executable


def is_own() -> bool:
    """Return whether it is the interpreter of this process."""
    return interpreter() == sys.executable


def has(module: str) -> bool:
    """Return whether the interpreter has a module, one of MODULES."""
    return find_spec(module) is not None if is_own() else module in describe().modules


def describe() -> Interpreter:
    """Return the last description of the interpreter: versions, modules, and whether it can be used."""
    description, _ = _descriptions.get(interpreter()) or _inspect()
    return description


def _inspect() -> tuple[Interpreter, float]:
    entry = interpreters.inspect_interpreter(interpreter(), DISTRIBUTIONS, MODULES), time.monotonic()
    _descriptions[interpreter()] = entry
    return entry


def findings() -> list[Finding]:
    """Return why ranks cannot use the interpreter, if it is not ours. Renews its description after REFRESH_S."""
    if is_own():
        return []
    if (entry := _descriptions.get(interpreter())) and time.monotonic() - entry[1] > REFRESH_S:
        _inspect()
    description = describe()
    message = f"the pool's {description.path} {description.unusable_reason}"
    return [Finding("error", "interpreter", message, description.remedy)] if description.unusable_reason else []
