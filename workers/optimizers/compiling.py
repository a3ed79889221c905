"""The compilers: torch's inductor, or what a vendor has in its place. One that fails is a reason, not a later crash."""

import importlib.util
import os
import shutil

import torch
from torch import nn

from workers.optimizers.work import Skip, Work


def compile_model(model: nn.Module, work: Work) -> nn.Module:
    return work.backend._compile(model, work)


def inductor(model: nn.Module, work: Work) -> nn.Module:
    """torch.compile with inductor, made to work now where there is a sample."""
    reason = _no_compiler(work.backend.device.type)
    if reason:
        raise Skip(reason)
    return compiled_with(model, work, "inductor", mode=None if work.compile_mode == "default" else work.compile_mode)


def compiled_with(model: nn.Module, work: Work, compiler: str, mode: str | None = None) -> nn.Module:
    """torch.compile with a compiler of that name; where there is a sample, it is made to compile now."""
    compiled = torch.compile(model, backend=compiler, mode=mode)
    called = f"{compiler}, {mode}" if mode else compiler
    if work.sample is None or work.training:
        work.details["compile"] = f"{called}, at the first call"
        return compiled  # type: ignore[return-value]
    try:
        with torch.no_grad():
            compiled(*work.sample.args, **work.sample.kwargs)
    except RuntimeError as e:  # every error of dynamo and its back ends is one
        raise Skip(f"{compiler} failed: {str(e).strip().splitlines()[0]}") from e
    work.details["compile"] = called
    return compiled  # type: ignore[return-value]


def max_autotune(model: nn.Module, work: Work) -> nn.Module:
    """Only a wish: the compiler, which comes after, heeds it."""
    if work.backend.device.type == "xla":
        raise Skip("XLA has no such mode")
    work.compile_mode = "max-autotune-no-cudagraphs" if work.training else "max-autotune"
    return model


def _no_compiler(device_type: str) -> str:
    if device_type == "cpu":
        names = [os.environ.get("CXX", ""), "g++", "clang++"]
        return (
            ""
            if any(n and shutil.which(n) for n in names)
            else "inductor needs a C++ compiler (g++ or clang++) on this node"
        )
    return "" if importlib.util.find_spec("triton") else "inductor needs the package triton in this environment"
