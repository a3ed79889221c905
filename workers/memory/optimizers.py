"""Optimizers by name: which of torch's it is, and how many tensors as large as a weight it keeps for each."""

from typing import Any, NamedTuple

from cluster.errors import UserError, nearest


class Known(NamedTuple):
    torch_name: str
    states: int
    temporaries: int
    """Tensors as large as a weight that its step holds beside these, for one weight at a time."""
    options: dict[str, Any] = {}  # noqa: RUF012


# Source: torch.optim, the single-tensor forms that run on a CPU.
OPTIMIZERS: dict[str, Known] = {
    "adamw": Known("AdamW", 2, 2),
    "adam": Known("Adam", 2, 2),
    "nadam": Known("NAdam", 2, 2),
    "radam": Known("RAdam", 2, 2),
    "adamax": Known("Adamax", 2, 2),
    "adadelta": Known("Adadelta", 2, 2),
    "adagrad": Known("Adagrad", 1, 1),
    "rmsprop": Known("RMSprop", 1, 1),
    "sgd": Known("SGD", 0, 0),
    "sgd-momentum": Known("SGD", 1, 0, {"momentum": 0.9}),
}


def known(word: Any) -> Known:
    """Raises UserError for another word, naming the nearest."""
    if not isinstance(word, str):
        raise UserError(f"{word!r} is no optimizer's name", nearest("", list(OPTIMIZERS)))
    name = word.lower()
    if name not in OPTIMIZERS:
        raise UserError(f"unknown optimizer {word!r}", nearest(name, list(OPTIMIZERS)))
    return OPTIMIZERS[name]
