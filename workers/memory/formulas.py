"""Memory of a transformer from its plain numbers. The derivations are at the properties of TransformerShape."""

from typing import Any

from cluster.catalogue.precision import BYTES, SHORT, long_name
from cluster.errors import UserError, nearest
from workers.memory.estimate import MemoryEstimate
from workers.memory.optimizers import OptimizerFacts, find_optimizer
from workers.memory.transformer_shape import TransformerShape

FOUND = "formulas for a transformer with fused attention"


def estimate(
    shape: TransformerShape, batch: int, seq: int | None, dtype: Any, training: bool, optimizer: Any
) -> MemoryEstimate:
    element = shape.bytes_per_element if dtype is None else _bytes_of(dtype)
    tokens = batch * (seq or int(shape.seq))
    weights = int(shape.weights * element)
    if not training:
        live, cached = int(tokens * shape.live_per_token * element), int(tokens * shape.cached_per_token * element)
        return MemoryEstimate(
            weights, activations_bytes=live, kv_cache_bytes=cached, total_bytes=weights + live + cached, found_by=FOUND
        )
    rule = find_optimizer(optimizer) if optimizer is not None else OptimizerFacts("", 0, 0)
    kept = int(tokens * shape.kept_per_token * element)
    return _training(
        weights, rule.states * weights, kept, _backward(shape, tokens, element), _step(shape, rule, element)
    )


def _backward(shape: TransformerShape, tokens: int, element: float) -> int:
    """Backward begins with the gradients of log-softmax and logits; those of one feed-forward are the next largest."""
    return int(tokens * max(2 * shape.vocab, 2 * shape.feed) * element)


def _step(shape: TransformerShape, rule: OptimizerFacts, element: float) -> int:
    return int(rule.temporaries * shape.largest_weight * element)


def _training(weights: int, state: int, kept: int, backward: int, step: int) -> MemoryEstimate:
    """While backward frees activations it makes gradients, both evenly: the most is live at its start, or at the step,
    when all gradients are there.
    """
    at_backward, at_step = kept + backward, weights + step
    in_step = at_step > at_backward
    return MemoryEstimate(
        weights, weights, state, kept,
        workspace_bytes=step if in_step else backward,
        total_bytes=weights + state + max(at_backward, at_step),
        peak="step" if in_step else "backward",
        found_by=FOUND,
    )  # fmt: skip


def _bytes_of(dtype: Any) -> int:
    """Of a word or a torch.dtype."""
    word = long_name(str(dtype).removeprefix("torch."))
    if word not in BYTES:
        raise UserError(f"unknown dtype {word!r}", nearest(word, [*BYTES, *SHORT]))
    return BYTES[word]
