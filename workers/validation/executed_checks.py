"""Checks that run the model, on a copy: XLA's lowering, and where torch's compiler must break the graph."""

import copy
import importlib
import os
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from workers.backends.parts.device_transfer import move_to_device
from workers.optimizers.pass_context import Sample
from workers.optimizers.trial import model_bytes
from workers.torch_logs import silenced
from workers.validation.report import Problem

COMPILER = "openxla"
"""What torch-xla lowers for, as the catalogue calls it."""
# Above this a copy to run is too much to take without being asked.
MOST_BYTES = 4 << 30


class CheckNotRun(Exception):
    """A check that could not be made; the text is the reason."""


def lowering(model: nn.Module, sample: Sample) -> list[Problem]:
    """The model is really lowered and run by XLA; operators it has no lowering for come back to the CPU one by one,
    which torch_xla counts by name. Raises CheckNotRun.
    """
    if find_spec("torch_xla") is None:
        raise CheckNotRun("torch-xla is not in this environment")
    if "PJRT_DEVICE" not in os.environ:
        raise CheckNotRun("no XLA device is set up: PJRT_DEVICE=CPU lowers on the CPU")
    mine = _copied(model)
    xla: Any = importlib.import_module("torch_xla")
    metrics: Any = importlib.import_module("torch_xla.debug.metrics")
    device = xla.device()
    inputs = move_to_device(sample.copy(), device)
    metrics.clear_counters()
    try:
        with torch.no_grad():
            move_to_device(mine, device)(*inputs.args, **inputs.kwargs)
        xla.sync()
    except RuntimeError as e:
        said = str(e).strip().splitlines()[0]
        return [Problem("error", "lowering", "the model itself", f"XLA fails: {said}", "see the operator it names")]
    counted = {n: int(metrics.counter_value(n)) for n in metrics.counter_names() if n.startswith("aten::")}
    return [
        Problem(
            "warning" if name != "aten::_local_scalar_dense" else "info",
            "lowering",
            "the model itself",
            f"XLA has no lowering for {name}: {times} of its calls leave the device, with a synchronisation each",
            "write it with operators that XLA lowers",
        )
        for name, times in sorted(counted.items())
    ]


def graph_breaks(model: nn.Module, sample: Sample) -> list[Problem]:
    """Where torch.compile falls back to Python, and why. Raises CheckNotRun."""
    mine, given = _copied(model), sample.copy()
    explain: Any = torch._dynamo.explain
    with silenced(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            told = explain(mine)(*given.args, **given.kwargs)
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
            "keep Python that reads tensors' values out of forward",
        )
        for reason in told.break_reasons
    ]


def _copied(model: nn.Module) -> nn.Module:
    size = model_bytes(model)
    if any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers())):
        raise CheckNotRun("the model has no values: it is on the meta device")
    if size > MOST_BYTES:
        raise CheckNotRun(f"the model has {size / 2**30:.1f} GiB, and a copy would have to be run")
    try:
        return copy.deepcopy(model).cpu().eval()
    except (TypeError, RuntimeError) as e:
        raise CheckNotRun(f"the model cannot be copied: {e}") from e


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else ""
