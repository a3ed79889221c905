"""Passes that change no number by more than rounding: memory layout, and batch norms folded into convolutions."""

import torch
from torch import nn

from workers.backends.parts.precision import name_of
from workers.optimizers import batch_norm_folding
from workers.optimizers.pass_context import PassContext, SkipPass, outputs, require_close

# How far a pass called safe may move an output: relative to the largest output, and at least this much.
SAFE_RELATIVE, SAFE_ABSOLUTE = 1e-3, 1e-5


def channels_last(model: nn.Module, work: PassContext) -> nn.Module:
    if not any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in model.modules()):
        raise SkipPass("the model has no 2-d convolution")
    precision = name_of(work.dtype)
    if precision not in work.backend.traits.channels_last:
        raise SkipPass(f"convolutions of {work.backend.kind} in {precision} are not known to be faster on it")
    if work.sample is None:
        raise SkipPass("it cannot be checked without a sample input: a forward that uses view() fails on this layout")
    want = outputs(model, work.sample)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        require_close(outputs(model, work.sample), want, SAFE_RELATIVE, SAFE_ABSOLUTE)
    except (SkipPass, RuntimeError) as e:
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        raise e if isinstance(e, SkipPass) else SkipPass(f"the model fails on it: {str(e).splitlines()[0]}") from e
    return model


def fold_conv_bn(model: nn.Module, work: PassContext) -> nn.Module:
    if work.learns(model):
        raise SkipPass("batch norm learns during training: call model.eval() first for inference")
    try:
        pairs = batch_norm_folding.pairs(model)
    except batch_norm_folding.NotTraceable as e:
        raise SkipPass(f"the model cannot be traced: {e}") from e
    if not pairs:
        raise SkipPass("no convolution is followed by a batch norm alone")
    want = outputs(model, work.sample) if work.sample is not None else []
    undo = batch_norm_folding.fold(model, pairs)
    try:
        if work.sample is not None:
            require_close(outputs(model, work.sample), want, SAFE_RELATIVE, SAFE_ABSOLUTE)
    except SkipPass:
        undo()
        raise
    work.folded = tuple(pairs)
    work.details["fold_conv_bn"] = f"{len(pairs)} pair{'s' if len(pairs) > 1 else ''}"
    return model
