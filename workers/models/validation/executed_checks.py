"""Checks that run a copy of the model: XLA's lowering, and graph breaks of torch.compile."""

import copy
import importlib
import os
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from workers.devices.backends.device_transfer import move_to_device
from workers.measurement.inputs import Sample
from workers.models.memory.trace_contexts import silence
from workers.models.optimizers.trial import model_bytes
from workers.models.validation.report import Problem

COMPILER = "openxla"
"""Compiler name in the catalogue of the backends that torch-xla lowers for."""
# A copy of a larger model could exhaust the host's memory, so it is not made.
MAX_MODEL_BYTES = 4 << 30


class CheckNotRun(Exception):
    """A check could not be run; the message is the reason."""


def lowering(model: nn.Module, sample: Sample) -> list[Problem]:
    """Lower and run the model with XLA, and report operators without a lowering.

    XLA runs each of these on the CPU, and torch_xla counts them by name. Raises CheckNotRun.
    """
    if find_spec("torch_xla") is None:
        raise CheckNotRun("torch-xla is not installed in this environment")
    if "PJRT_DEVICE" not in os.environ:
        raise CheckNotRun("no XLA device is configured: set PJRT_DEVICE=CPU to lower on the CPU")
    copied = _copy_to_cpu(model)
    xla: Any = importlib.import_module("torch_xla")
    metrics: Any = importlib.import_module("torch_xla.debug.metrics")
    device = xla.device()
    inputs = move_to_device(sample.copy(), device)
    metrics.clear_counters()
    try:
        with torch.no_grad():
            move_to_device(copied, device)(*inputs.args, **inputs.kwargs)
        xla.sync()
    except RuntimeError as e:
        reason = str(e).strip().splitlines()[0]
        return [Problem("error", "lowering", "the model itself", f"XLA fails: {reason}", "replace that operator")]
    counts = {n: int(metrics.counter_value(n)) for n in metrics.counter_names() if n.startswith("aten::")}
    return [
        Problem(
            "warning" if name != "aten::_local_scalar_dense" else "info",
            "lowering",
            "the model itself",
            f"XLA has no lowering for {name}: {times} calls leave the device, each with a synchronization",
            "write it with operators that XLA lowers",
        )
        for name, times in sorted(counts.items())
    ]


def graph_breaks(model: nn.Module, sample: Sample) -> list[Problem]:
    """Report where torch.compile falls back to Python, and why. Raises CheckNotRun."""
    copied, arguments = _copy_to_cpu(model), sample.copy()
    explain: Any = torch._dynamo.explain
    with silence(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            explanation = explain(copied)(*arguments.args, **arguments.kwargs)
        except Exception as e:  # the user's forward runs inside
            raise CheckNotRun(f"the compiler could not follow the model: {type(e).__name__}: {_first_line(e)}") from e
        finally:
            torch._dynamo.reset()
    return [
        Problem(
            "warning",
            "graph breaks",
            f"{os.path.basename(reason.user_stack[-1].filename)}:{reason.user_stack[-1].lineno}"  # noqa: PTH119
            if reason.user_stack
            else "the model itself",
            f"the graph breaks: {str(reason.reason).strip().splitlines()[0]}",
            "do not read tensors' values in Python inside forward",
        )
        for reason in explanation.break_reasons
    ]


def _copy_to_cpu(model: nn.Module) -> nn.Module:
    size = model_bytes(model)
    if any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers())):
        raise CheckNotRun("the model has no values: it is on the meta device")
    if size > MAX_MODEL_BYTES:
        raise CheckNotRun(
            f"this check runs a copy of the model, and its {size / 2**30:.1f} GiB exceed {MAX_MODEL_BYTES >> 30} GiB"
        )
    try:
        return copy.deepcopy(model).cpu().eval()
    except (TypeError, RuntimeError) as e:
        raise CheckNotRun(f"the model cannot be copied: {e}") from e


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else ""
