"""The compilers: torch's inductor, or what a device has in its place. One that fails is a reason, not a later crash.

A model is compiled in place, as `Module.compile` does: it stays what it is, with its names. Nothing is wrapped twice,
and a copy is not compiled.
"""

import importlib
import importlib.util
import itertools
import os
import shutil
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from workers.optimizers.forward_override import RUN, override, restore
from workers.optimizers.low_precision import Lowered
from workers.optimizers.model_state import unchanged
from workers.optimizers.pass_context import PassContext, SkipPass, deep_copy

IPEX = "intel_extension_for_pytorch"
_NUMBERS = itertools.count()


def compile_model(model: nn.Module, work: PassContext) -> nn.Module:
    """By the compiler that the device's traits name. Raises Skip; leaves its name in work.details["compile"]."""
    traits = work.backend.traits
    if not traits.compiler:
        raise SkipPass(f"{work.backend.kind} has no compiler")
    if work.compiled or model._compiled_call_impl is not None:
        raise SkipPass("the model is compiled already")
    if traits.graph_captures and (work.sample is None or work.learns(model)):
        work.details["compile"] = "XLA's own, inherent: each new graph is compiled when it first runs"
        return model
    if traits.compiler == "ipex":
        return _ipex(model, work)
    if traits.compiler == "inductor" and (reason := _no_compiler(work.backend.device.type)):
        raise SkipPass(reason)
    mode = None if work.compile_mode == "default" or not traits.autotunes else work.compile_mode
    return compiled_with(model, work, traits.compiler, mode)


def compiled_with(model: nn.Module, work: PassContext, compiler: str, mode: str | None = None) -> nn.Module:
    """With a compiler of torch.compile; where there is a sample and the model is in eval mode, it compiles now."""
    called = f"{compiler}, {mode}" if mode else compiler
    model._compiled_call_impl = torch.compile(_own_frame(model), backend=compiler, mode=mode)
    if work.sample is None or work.learns(model):
        work.details["compile"] = f"{called}, at the first call"
        return model
    given = work.sample.copy()
    try:
        with torch.no_grad(), unchanged(model):
            model(*given.args, **given.kwargs)
    except RuntimeError as e:  # every error of dynamo and its back ends is one
        model._compiled_call_impl = None
        raise SkipPass(f"{compiler} failed: {str(e).strip().splitlines()[0]}") from e
    work.details["compile"] = called
    return model


def _own_frame(model: nn.Module) -> Callable[..., Any]:
    """The call of `model` as a function with a code object of its own, for the compiler to begin at.

    `Module.compile` begins at torch's own code, and compiles nothing of a model made of torch's modules alone
    (nn.Sequential). And torch counts compilations per code object: of models that share one, the ninth runs uncompiled.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    code = call.__code__.replace(co_name=f"call_{next(_NUMBERS)}")
    return FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


def max_autotune(model: nn.Module, work: PassContext) -> nn.Module:
    """Only a wish: the compiler, which comes after, heeds it."""
    if not work.backend.traits.autotunes:
        raise SkipPass(f"the compiler {work.backend.traits.compiler} has no such mode")
    work.compile_mode = "max-autotune-no-cudagraphs" if work.training else "max-autotune"
    return model


class _Packed:
    """Calls of a model, computed by IPEX's operators on packed weights of their own while gradients are off.

    The model stays what it is: its parameters, names and checkpoints. Packed weights are made anew when a parameter has
    changed since, and a call that needs gradients computes with the model itself.
    """

    def __init__(self, model: nn.Module):
        self._model, self._seen, self._packed = model, self._state(model), _optimised(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        if model.training or torch.is_grad_enabled():
            return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if (now := self._state(model)) != self._seen:
            self._seen, self._packed = now, _optimised(model)
        return self._packed(*args, **kwargs)

    @staticmethod
    def _state(model: nn.Module) -> list[tuple[int, int]]:
        return [(t.data_ptr(), t._version) for t in (*model.parameters(), *model.buffers()) if not t.is_inference()]


def _optimised(model: nn.Module) -> nn.Module:
    """A copy with IPEX's operators. It converts the weights of a lower precision itself, so that one is told to it."""
    ipex: Any = importlib.import_module(IPEX)
    mine = deep_copy(model)
    lowered = mine.__dict__.get(RUN)
    restore(mine)
    given = {"dtype": lowered.dtype} if isinstance(lowered, Lowered) else {}
    packed: nn.Module = ipex.optimize(mine, inplace=True, **given)
    if lowered is not None:
        override(packed, lowered)
    return packed


def _ipex(model: nn.Module, work: PassContext) -> nn.Module:
    if work.learns(model):
        raise SkipPass("IPEX repacks weights for training in a layout that checkpoints cannot carry")
    try:
        model._compiled_call_impl = _Packed(model)
    except (AssertionError, RuntimeError, NotImplementedError) as e:
        raise SkipPass(f"IPEX failed: {(str(e).strip().splitlines() or [type(e).__name__])[0]}") from e
    work.details["compile"] = "IPEX operators"
    return model


def _no_compiler(device_type: str) -> str:
    if device_type == "cpu":
        names = [os.environ.get("CXX", ""), "g++", "clang++"]
        found = any(n and shutil.which(n) for n in names)
        return "" if found else "inductor needs a C++ compiler (g++ or clang++) on this node"
    return "" if importlib.util.find_spec("triton") else "inductor needs the package triton in this environment"
