"""Passes that change results only by rounding: memory layout, and batch norms folded into convolutions."""

import torch
from torch import nn

from workers.devices.backends.device_facts import kind
from workers.devices.backends.precision import name_of
from workers.models.passes import batch_norm_folding
from workers.models.passes.pass_context import PassContext, SkipPass, outputs, require_close

# Maximum change of an output by a safe pass: relative to the largest output, or absolute if that is larger.
SAFE_RELATIVE, SAFE_ABSOLUTE = 1e-3, 1e-5


def channels_last(model: nn.Module, context: PassContext) -> nn.Module:
    if not any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in model.modules()):
        raise SkipPass("the model has no 2-d convolution")
    precision = name_of(context.dtype)
    if precision not in context.backend.traits.channels_last:
        raise SkipPass(
            f"convolutions of {kind(context.backend)} in {precision} have not been measured to be faster in this layout"
        )
    if context.sample is None:
        raise SkipPass("cannot be checked without a sample input: a forward that uses view() fails in this layout")
    expected = outputs(model, context.sample)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        require_close(outputs(model, context.sample), expected, SAFE_RELATIVE, SAFE_ABSOLUTE)
    except (SkipPass, RuntimeError) as e:
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        raise (
            e if isinstance(e, SkipPass) else SkipPass(f"the model fails in this layout: {str(e).splitlines()[0]}")
        ) from e
    return model


def fold_conv_bn(model: nn.Module, context: PassContext) -> nn.Module:
    if context.is_training(model):
        raise SkipPass("batch norm learns during training: call model.eval() first for inference")
    try:
        pairs = batch_norm_folding.foldable_pairs(model)
    except batch_norm_folding.NotTraceable as e:
        raise SkipPass(f"the model cannot be traced: {e}") from e
    if not pairs:
        raise SkipPass("no convolution feeds only a batch norm")
    expected = outputs(model, context.sample) if context.sample is not None else []
    undo = batch_norm_folding.fold(model, pairs)
    try:
        if context.sample is not None:
            require_close(outputs(model, context.sample), expected, SAFE_RELATIVE, SAFE_ABSOLUTE)
    except SkipPass:
        undo()
        raise
    context.folded = tuple(pairs)
    context.details["fold_conv_bn"] = f"{len(pairs)} pair{'s' if len(pairs) > 1 else ''}"
    return model
