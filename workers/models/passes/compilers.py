"""Compile a model with torch's inductor or the device's own compiler. A failure becomes the reason to skip the pass.

A model is compiled in place, as by `Module.compile`: its class and names do not change. A model is never wrapped twice,
and a copy of it is not compiled.
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

from workers.devices.backends.device_facts import kind
from workers.measurement.model_state import preserve_state
from workers.models.passes.low_precision import Lowered
from workers.models.passes.pass_context import RUN, PassContext, SkipPass, deep_copy, override_forward, restore_forward

IPEX = "intel_extension_for_pytorch"
_call_numbers = itertools.count()


def compile_model(model: nn.Module, context: PassContext) -> nn.Module:
    """Compile with the compiler of the device's traits. Raises SkipPass. Sets context.details["compile"]."""
    traits = context.backend.traits
    if not traits.compiler:
        raise SkipPass(f"{kind(context.backend)} has no compiler")
    if context.is_compiled or model._compiled_call_impl is not None:
        raise SkipPass("the model is already compiled")
    if traits.graph_captures and (context.sample is None or context.is_training(model)):
        context.details["compile"] = "XLA's own, inherent: each new graph is compiled when it first runs"
        return model
    if traits.compiler == "ipex":
        return _ipex(model, context)
    if traits.compiler == "inductor" and (reason := _missing_compiler_reason(context.backend.device.type)):
        raise SkipPass(reason)
    mode = None if context.compile_mode == "default" or not traits.autotunes else context.compile_mode
    return compile_with(model, context, traits.compiler, mode)


def compile_with(model: nn.Module, context: PassContext, compiler: str, mode: str | None = None) -> nn.Module:
    """Compile with a backend of torch.compile: now if there is a sample for inference, else at the first call."""
    description = f"{compiler}, {mode}" if mode else compiler
    model._compiled_call_impl = torch.compile(_unique_entry_point(model), backend=compiler, mode=mode)
    if context.sample is None or context.is_training(model):
        context.details["compile"] = f"{description}, at the first call"
        return model
    sample = context.sample.copy()
    try:
        with torch.no_grad(), preserve_state(model):
            model(*sample.args, **sample.kwargs)
    except RuntimeError as e:  # every error of dynamo and its back ends is a RuntimeError
        model._compiled_call_impl = None
        raise SkipPass(f"{compiler} failed: {str(e).strip().splitlines()[0]}") from e
    context.details["compile"] = description
    return model


def _unique_entry_point(model: nn.Module) -> Callable[..., Any]:
    """Return a function that calls `model`, with its own code object, as the entry point for the compiler.

    `Module.compile` starts at torch's own code and compiles nothing of a model that consists only of torch's modules
    (nn.Sequential). Also, torch counts compilations per code object: the ninth model that shares one runs uncompiled.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    code = call.__code__.replace(co_name=f"call_{next(_call_numbers)}")
    return FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


def max_autotune(model: nn.Module, context: PassContext) -> nn.Module:
    """Set the compile mode; the `compile` pass, which runs later, uses it."""
    if not context.backend.traits.autotunes:
        raise SkipPass(f"the compiler {context.backend.traits.compiler} has no such mode")
    context.compile_mode = "max-autotune-no-cudagraphs" if context.training else "max-autotune"
    return model


class _Packed:
    """Compute a model's calls with IPEX's operators on separately packed weights while gradients are off.

    The model's parameters, names and checkpoints do not change. Weights are packed again after a parameter has changed,
    and a call that needs gradients uses the model itself.
    """

    def __init__(self, model: nn.Module):
        self._model, self._packed_state, self._packed = model, self._state(model), _optimize_with_ipex(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        if model.training or torch.is_grad_enabled():
            return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if (now := self._state(model)) != self._packed_state:
            self._packed_state, self._packed = now, _optimize_with_ipex(model)
        return self._packed(*args, **kwargs)

    @staticmethod
    def _state(model: nn.Module) -> list[tuple[int, int]]:
        return [(t.data_ptr(), t._version) for t in (*model.parameters(), *model.buffers()) if not t.is_inference()]


def _optimize_with_ipex(model: nn.Module) -> nn.Module:
    """Return a copy that uses IPEX's operators. IPEX converts the weights to a lower precision itself."""
    ipex: Any = importlib.import_module(IPEX)
    model_copy = deep_copy(model)
    lowered = model_copy.__dict__.get(RUN)
    restore_forward(model_copy)
    options = {"dtype": lowered.dtype} if isinstance(lowered, Lowered) else {}
    packed: nn.Module = ipex.optimize(model_copy, inplace=True, **options)
    if lowered is not None:
        override_forward(packed, lowered)
    return packed


def _ipex(model: nn.Module, context: PassContext) -> nn.Module:
    if context.is_training(model):
        raise SkipPass("IPEX repacks weights for training in a layout that checkpoints cannot store")
    try:
        model._compiled_call_impl = _Packed(model)
    except (AssertionError, RuntimeError, NotImplementedError) as e:
        raise SkipPass(f"IPEX failed: {(str(e).strip().splitlines() or [type(e).__name__])[0]}") from e
    context.details["compile"] = "IPEX operators"
    return model


def _missing_compiler_reason(device_type: str) -> str:
    if device_type == "cpu":
        names = [os.environ.get("CXX", ""), "g++", "clang++"]
        has_compiler = any(n and shutil.which(n) for n in names)
        return "" if has_compiler else "inductor needs a C++ compiler (g++ or clang++) on this node"
    return "" if importlib.util.find_spec("triton") else "inductor needs triton in this environment"
