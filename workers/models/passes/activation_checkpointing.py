"""Activation checkpointing: repeated blocks recompute their activations in backward instead of storing them."""

from collections import Counter
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from cluster.errors import UserError
from workers.models.passes.pass_context import PassContext, SkipPass, override_forward

# Share of the free memory. Allocator fragmentation and scratch memory of kernels need the rest.
USABLE_SHARE = 0.9


def activation_checkpointing(model: nn.Module, context: PassContext) -> nn.Module:
    """Apply checkpointing if a training step is estimated not to fit, assuming the optimizer state of AdamW."""
    if not context.training:
        raise SkipPass("inference stores no activations")
    blocks = repeated_blocks(model)
    if not blocks:
        raise SkipPass("the model has no repeated blocks")
    needed, available = _needed_bytes(model, context), _usable_bytes(context)
    if needed <= available:
        raise SkipPass(f"not needed: a step takes {needed / 2**30:.2f} GiB of {available / 2**30:.2f} GiB")
    for block in blocks:
        override_forward(block, recompute)
    context.details["activation_checkpointing"] = f"{len(blocks)} blocks of {type(blocks[0]).__name__}"
    return model


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the class with most weights among those repeated in one list, e.g. transformer layers."""
    weight_counts: Counter[type[nn.Module]] = Counter()
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    blocks = [b for m in lists for b in m if sum(type(c) is type(b) for c in m) > 1 and any(True for _ in b.children())]
    for block in blocks:
        weight_counts[type(block)] += sum(p.numel() for p in block.parameters())
    most = weight_counts.most_common(1)
    return [b for b in blocks if type(b) is most[0][0]] if most else []


def recompute(call: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(call, *args, use_reentrant=False, **kwargs)


def _needed_bytes(model: nn.Module, context: PassContext) -> int:
    if context.sample is None:
        raise SkipPass("the memory of a step cannot be estimated without a sample input")
    from workers.models.memory.estimate import estimate_memory

    sample_input = context.sample.kwargs or context.sample.args
    try:
        return estimate_memory(model, mode="training", optimizer="adamw", sample_input=sample_input).total_bytes
    except UserError as e:
        raise SkipPass(f"the memory of a step cannot be estimated: {e.message}") from e


def _usable_bytes(context: PassContext) -> int:
    if context.memory_bytes is not None:
        return context.memory_bytes
    free = context.backend.get_memory_stats()["free_bytes"]
    if free is None:
        raise SkipPass("this device does not expose its free memory")
    return int(free * USABLE_SHARE)
