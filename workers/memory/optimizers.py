"""Optimizers by name: which of torch's it is, and how many tensors as large as a weight it keeps for each."""

from typing import Any, NamedTuple

from cluster.errors import UserError, nearest


class OptimizerFacts(NamedTuple):
    torch_name: str
    states: int
    temporaries: int
    """Tensors as large as a weight that its step holds beside these, for one weight at a time."""
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


def find_optimizer(word: Any) -> OptimizerFacts:
    """Raises UserError for another word, naming the nearest."""
    if not isinstance(word, str):
        raise UserError(f"{word!r} is no optimizer's name", nearest("", list(OPTIMIZERS)))
    name = word.lower()
    if name not in OPTIMIZERS:
        raise UserError(f"unknown optimizer {word!r}", nearest(name, list(OPTIMIZERS)))
    return OPTIMIZERS[name]
