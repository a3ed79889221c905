"""Trace one forward of a model on fake tensors: every operator with the module that called it."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workers.measurement.inputs import Sample
from workers.models.memory.fake_copies import fake_copy, fake_sample
from workers.models.memory.trace_contexts import silence

LIBRARY_PATHS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call of an operator (`aten::nonzero`): dtypes of inputs and outputs, module path and source line."""

    operator: Any
    dtypes: tuple[torch.dtype, ...]
    module: str
    line: str

    @property
    def name(self) -> str:
        return str(self.operator.name())

    @property
    def where(self) -> str:
        return ", ".join(filter(None, (self.module or "the model itself", self.line)))


@dataclass(slots=True)
class OperatorTrace:
    """Operator calls of a forward. `stopped` is the reason why tracing ended early, else ""; `last` is where."""

    calls: list[OperatorCall] = field(default_factory=list)
    stopped: str = ""
    needs_values: bool = False
    last: str = ""


def trace(model: nn.Module, sample: Sample) -> OperatorTrace:
    """Trace a copy of the model with fake tensors: allocates nothing and only reads the caller's model."""
    result = OperatorTrace()
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    with silence(), FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes):
        copied, inputs = fake_copy(model, None).eval(), fake_sample(sample, None, None, None)
        path: list[str] = []
        with _track_modules(copied, path), torch.no_grad(), _Recorder(result, path):
            try:
                copied(*inputs.args, **inputs.kwargs)
            except Exception as e:  # the user's forward may raise anything, because fake tensors have no values
                result.last = ", ".join(filter(None, (path[-1] if path else "", _raised_at(e))))
                result.needs_values = "data-dependent" in str(e).lower() or "DataDependent" in type(e).__name__
                result.stopped = f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"
    return result


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, result: OperatorTrace, path: list[str]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.result, self.path = result, path

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs or {}, out)) if isinstance(t, torch.Tensor)]
        dtypes = tuple(dict.fromkeys(t.dtype for t in tensors))
        self.result.calls.append(OperatorCall(operator, dtypes, self.path[-1] if self.path else "", _called_at()))
        return out


@contextmanager
def _track_modules(model: nn.Module, path: list[str]) -> Iterator[None]:
    """Keep in `path` the names of the modules whose forward is running, the innermost last."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: path.append(name)))
        handles.append(module.register_forward_hook(lambda *_: path.pop() and None))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _called_at() -> str:
    """Find the innermost line outside torch and this package. Walks frames directly: it runs for every operator."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(LIBRARY_PATHS) and not filename.startswith("<"):
            return f"{Path(filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _raised_at(error: Exception) -> str:
    lines = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(LIBRARY_PATHS)]
    return f"{Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else ""
