"""Activation checkpointing: repeated blocks compute their activations again in backward rather than keep them."""

from collections import Counter
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from cluster.errors import UserError
from workers.optimizers.forward_override import override
from workers.optimizers.pass_context import PassContext, SkipPass

# Of what is free: an allocator's fragments and a kernel's scratch need the rest.
ROOM = 0.9


def activation_checkpointing(model: nn.Module, work: PassContext) -> nn.Module:
    """Applied only where a training step is estimated not to fit. The optimizer's state is taken to be Adam's."""
    if not work.training:
        raise SkipPass("inference keeps no activations")
    blocks = repeated_blocks(model)
    if not blocks:
        raise SkipPass("the model has no repeated blocks")
    needed, have = _needed_bytes(model, work), _room_bytes(work)
    if needed <= have:
        raise SkipPass(f"not needed: a step takes {needed / 2**30:.2f} GiB of {have / 2**30:.2f}")
    for block in blocks:
        override(block, recompute)
    work.details["activation_checkpointing"] = f"{len(blocks)} blocks of {type(blocks[0]).__name__}"
    return model


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Children of one list that are of one class, as the layers of a transformer are: the class with most weights."""
    found: Counter[type[nn.Module]] = Counter()
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    blocks = [b for m in lists for b in m if sum(type(c) is type(b) for c in m) > 1 and any(True for _ in b.children())]
    for block in blocks:
        found[type(block)] += sum(p.numel() for p in block.parameters())
    most = found.most_common(1)
    return [b for b in blocks if type(b) is most[0][0]] if most else []


def recompute(call: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(call, *args, use_reentrant=False, **kwargs)


def _needed_bytes(model: nn.Module, work: PassContext) -> int:
    if work.sample is None:
        raise SkipPass("what a step needs cannot be estimated without a sample input")
    from workers.memory.estimate import estimate_memory

    given = work.sample.kwargs or work.sample.args
    try:
        return estimate_memory(model, mode="training", optimizer="adamw", sample_input=given).total_bytes
    except UserError as e:
        raise SkipPass(f"what a step needs cannot be estimated: {e.message}") from e


def _room_bytes(work: PassContext) -> int:
    if work.memory_bytes is not None:
        return work.memory_bytes
    free = work.backend.get_memory_stats()["free_bytes"]
    if free is None:
        raise SkipPass("this device does not tell its free memory")
    return int(free * ROOM)
