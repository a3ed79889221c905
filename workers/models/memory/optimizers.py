"""Optimizers by name: torch's class, and how many tensors as large as a weight it holds for each weight."""

from typing import Any, NamedTuple

from cluster.errors import UserError, nearest


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
