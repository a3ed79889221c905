"""Optimisation levels as lists of passes. A pass returns the changed model, or says why not.

O0 placement only. O1 numerically safe: layout, folding, and the precision that was asked for. O2 adds the compiler.
"""

import copy
import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from cluster.errors import UserError
from workers.backends.parts.compare import difference, first_tensor
from workers.backends.parts.placing import map_tensors
from workers.backends.parts.precision import name_of
from workers.optimizers import folding

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend

# How far a pass called safe may move an output: relative to the largest output, and at least this much.
SAFE_RELATIVE, SAFE_ABSOLUTE = 1e-3, 1e-5


class Prepared(NamedTuple):
    """A model ready to use, what was done to it (`name` or `name: detail`), and what was not (name -> reason)."""

    model: nn.Module
    applied: list[str]
    skipped: dict[str, str]


class Skip(Exception):
    """Raised by a pass that does not apply; its text is the reason the user reads."""


@dataclass(slots=True)
class Work:
    """What a pass may look at. `sample` is positional arguments for the model on the device, or None."""

    backend: "BaseBackend"
    dtype: torch.dtype
    training: bool
    sample: "Sample | None" = None
    details: dict[str, str] = field(default_factory=dict)


class Sample(NamedTuple):
    """One call's inputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def as_sample(value: Any) -> Sample | None:
    """What a sample factory returned: a tuple or list is positional arguments, a dict with string keys keyword ones,
    else one argument.
    """
    if value is None or isinstance(value, Sample):
        return value
    if isinstance(value, dict):
        return Sample((), value)
    return Sample(tuple(value), {}) if isinstance(value, tuple | list) else Sample((value,), {})


Pass = Callable[[nn.Module, Work], nn.Module]


def channels_last(model: nn.Module, work: Work) -> nn.Module:
    if not any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in model.modules()):
        raise Skip("the model has no 2-d convolution")
    reason = work.backend._channels_last_refusal(work.dtype)
    if reason:
        raise Skip(reason)
    if work.sample is None:
        raise Skip("it cannot be checked without a sample input: a forward that uses view() fails on this layout")
    want = _first_output(model, work.sample)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        _require_same(_first_output(model, work.sample), want)
    except (Skip, RuntimeError) as e:
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        raise e if isinstance(e, Skip) else Skip(f"the model fails on it: {str(e).splitlines()[0]}") from e
    return model


def fold_conv_bn(model: nn.Module, work: Work) -> nn.Module:
    if work.training:
        raise Skip("batch norm learns during training")
    try:
        folded, pairs = folding.fold(model)
    except folding.NotTraceable as e:
        raise Skip(f"the model cannot be traced: {e}") from e
    if not pairs:
        raise Skip("no convolution is followed by a batch norm alone")
    if work.sample is not None:
        _require_same(_first_output(folded, work.sample), _first_output(model, work.sample))
    work.details["fold_conv_bn"] = f"{pairs} pair{'s' if pairs > 1 else ''}"
    return folded


def _first_output(model: nn.Module, sample: Sample) -> torch.Tensor:
    """In eval mode and without gradients, so that looking changes nothing."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return first_tensor(model(*sample.args, **sample.kwargs))
    finally:
        model.train(training)


def _require_same(have: torch.Tensor, want: torch.Tensor) -> None:
    """Raises Skip when a pass that should change nothing moved the output too far."""
    moved = difference(have, want)
    limit = max(SAFE_ABSOLUTE, SAFE_RELATIVE * moved.largest)
    if not moved.max_abs <= limit:
        raise Skip(f"rolled back: the output moved by {moved.max_abs:.2g}, more than {limit:.2g}")


class Autocast(nn.Module):
    """Runs `inner` in a lower precision where torch deems that safe; parameters and outputs stay float32."""

    def __init__(self, inner: nn.Module, backend: "BaseBackend", dtype: torch.dtype):
        super().__init__()
        self.inner = inner
        self._call = _lowered(inner, backend, dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def _lowered(call: Callable[..., Any], backend: "BaseBackend", dtype: torch.dtype) -> Callable[..., Any]:
    @functools.wraps(call)
    def run_lowered(*args: Any, **kwargs: Any) -> Any:
        with backend.autocast(dtype):
            output = call(*args, **kwargs)
        return map_tensors(output, lambda tensor: tensor.float() if tensor.dtype == dtype else tensor)

    return run_lowered


def autocast(model: nn.Module, work: Work) -> nn.Module:
    """For training the model's own forward is replaced: its type, its names and its checkpoints stay what they are."""
    if work.dtype == torch.float32:
        raise Skip("the precision asked for is float32")
    if not work.backend.supports_dtype(work.dtype):
        raise UserError(
            f"{work.backend.device} has no native {name_of(work.dtype)}", "ask for bfloat16 or float32 here"
        )
    work.details["autocast"] = name_of(work.dtype)
    if not work.training:
        return Autocast(model, work.backend, work.dtype)
    if work.dtype == torch.float16:
        remedy = "ask for bfloat16, or for float32 and use torch.autocast with a GradScaler in your loop"
        raise UserError("training in float16 needs loss scaling, which a plain loop lacks", remedy)
    model.forward = _lowered(model.forward, work.backend, work.dtype)
    return model


def compile_model(model: nn.Module, work: Work) -> nn.Module:
    return work.backend._compile(model, work)


def inductor(model: nn.Module, work: Work) -> nn.Module:
    """torch.compile, made to work now where there is a sample: a compiler that fails is a reason, not a later crash."""
    reason = _no_compiler(work.backend.device.type)
    if reason:
        raise Skip(reason)
    compiled = torch.compile(model)
    if work.sample is None or work.training:
        work.details["compile"] = "inductor, at the first call"
        return compiled  # type: ignore[return-value]
    try:
        with torch.no_grad():
            compiled(*work.sample.args, **work.sample.kwargs)
    except RuntimeError as e:  # every error of dynamo and inductor is one
        raise Skip(f"inductor failed: {str(e).strip().splitlines()[0]}") from e
    work.details["compile"] = "inductor"
    return compiled  # type: ignore[return-value]


def _no_compiler(device_type: str) -> str:
    if device_type == "cpu":
        names = [os.environ.get("CXX", ""), "g++", "clang++"]
        return (
            ""
            if any(n and shutil.which(n) for n in names)
            else "inductor needs a C++ compiler (g++ or clang++) on this node"
        )
    return "" if importlib.util.find_spec("triton") else "inductor needs the package triton in this environment"


PASSES: dict[str, tuple[tuple[str, Pass], ...]] = {
    "O0": (),
    "O1": (("channels_last", channels_last), ("fold_conv_bn", fold_conv_bn), ("autocast", autocast)),
}
PASSES["O2"] = (*PASSES["O1"], ("compile", compile_model))
PASSES["O3"] = PASSES["O2"]


def run(model: nn.Module, level: str, work: Work) -> Prepared:
    """All passes of `level` over `model`, which must be ours to change and on its device."""
    applied, skipped = ["placement"], {}
    for name, change in PASSES[level]:
        try:
            model = change(model, work)
            applied.append(f"{name}: {work.details[name]}" if name in work.details else name)
        except Skip as e:
            skipped[name] = str(e)
    return Prepared(model, applied, skipped)


def own_copy(model: nn.Module) -> nn.Module:
    """A deep copy in eval mode. Raises UserError where the model cannot be copied."""
    try:
        return copy.deepcopy(model).eval()
    except (TypeError, RuntimeError) as e:
        raise UserError(
            f"the model cannot be copied: {e}", "keep tensors that need gradients out of its attributes"
        ) from e


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside compile, autocast and data-parallel wrappers."""
    while True:
        if isinstance(model, Autocast):
            model = model.inner
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model
