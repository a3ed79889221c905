"""Compute a transformer's memory from its dimensions. The properties of TransformerShape derive the formulas."""

from typing import Any, NamedTuple

from cluster.catalogue.precision import BYTES, SHORT, long_name
from cluster.errors import UserError, nearest
from workers.models.memory.estimate import MemoryEstimate
from workers.models.memory.transformer_shape import TransformerShape


class OptimizerFacts(NamedTuple):
    torch_name: str
    states: int
    temporaries: int
    """Further tensors as large as a weight that its step allocates, for one weight at a time."""
    options: dict[str, Any] = {}  # noqa: RUF012


# Source: torch.optim, the single-tensor forms that run on a CPU.
OPTIMIZERS: dict[str, OptimizerFacts] = {
    "adamw": OptimizerFacts("AdamW", 2, 2),
    "adam": OptimizerFacts("Adam", 2, 2),
    "nadam": OptimizerFacts("NAdam", 2, 2),
    "radam": OptimizerFacts("RAdam", 2, 2),
    "adamax": OptimizerFacts("Adamax", 2, 2),
    "adadelta": OptimizerFacts("Adadelta", 2, 2),
    "adagrad": OptimizerFacts("Adagrad", 1, 1),
    "rmsprop": OptimizerFacts("RMSprop", 1, 1),
    "sgd": OptimizerFacts("SGD", 0, 0),
    "sgd-momentum": OptimizerFacts("SGD", 1, 0, {"momentum": 0.9}),
}


def find_optimizer(optimizer: Any) -> OptimizerFacts:
    """Look up an optimizer by name. Raises UserError, which names the nearest, if there is none."""
    if not isinstance(optimizer, str):
        raise UserError(f"{optimizer!r} is not the name of an optimizer", nearest("", list(OPTIMIZERS)))
    name = optimizer.lower()
    if name not in OPTIMIZERS:
        raise UserError(f"unknown optimizer {optimizer!r}", nearest(name, list(OPTIMIZERS)))
    return OPTIMIZERS[name]


METHOD = "formulas for a transformer with fused attention"


def estimate(
    shape: TransformerShape, batch: int, seq: int | None, dtype: Any, training: bool, optimizer: Any
) -> MemoryEstimate:
    element = shape.bytes_per_element if dtype is None else _dtype_bytes(dtype)
    tokens = batch * (seq or int(shape.seq))
    weights = int(shape.weights * element)
    if not training:
        live, cached = int(tokens * shape.live_per_token * element), int(tokens * shape.cached_per_token * element)
        return MemoryEstimate(
            weights, activations_bytes=live, kv_cache_bytes=cached, total_bytes=weights + live + cached, method=METHOD
        )
    rule = find_optimizer(optimizer) if optimizer is not None else OptimizerFacts("", 0, 0)
    saved = int(tokens * shape.saved_per_token * element)
    return _training(
        weights, rule.states * weights, saved, _backward(shape, tokens, element), _step(shape, rule, element)
    )


def _backward(shape: TransformerShape, tokens: int, element: float) -> int:
    """Workspace of backward: gradients of log-softmax and logits, or those of one feed-forward layer if larger."""
    return int(tokens * max(2 * shape.vocab, 2 * shape.feed_forward_width) * element)


def _step(shape: TransformerShape, rule: OptimizerFacts, element: float) -> int:
    return int(rule.temporaries * shape.largest_weight * element)


def _training(weights: int, state: int, saved: int, backward: int, step: int) -> MemoryEstimate:
    """Combine the parts of a training step.

    Backward frees activations as evenly as it allocates gradients, so the peak is at its start or at the optimizer's
    step, when all gradients exist.
    """
    at_backward, at_step = saved + backward, weights + step
    in_step = at_step > at_backward
    return MemoryEstimate(
        weights, weights, state, saved,
        workspace_bytes=step if in_step else backward,
        total_bytes=weights + state + max(at_backward, at_step),
        peak="step" if in_step else "backward",
        method=METHOD,
    )  # fmt: skip


def _dtype_bytes(dtype: Any) -> int:
    """Bytes per element of a dtype: a name or a torch.dtype."""
    name = long_name(str(dtype).removeprefix("torch."))
    if name not in BYTES:
        raise UserError(f"unknown dtype {name!r}", nearest(name, [*BYTES, *SHORT]))
    return BYTES[name]
