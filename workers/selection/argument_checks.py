"""What callers give to choose a back end by, checked: names in order, measured rates, arguments of a back end."""

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

from cluster.errors import UserError, nearest
from workers import backends
from workers.config_values import short_repr, split
from workers.selection import device_preference

AUTO = "auto"


def check_names(what: str, given: Any) -> tuple[str, ...]:
    """Names in order; one string holds one, or several with commas between. Raises UserError for what holds none."""
    if isinstance(given, str):
        return split(given)
    if isinstance(given, Iterable) and not isinstance(given, Mapping) and all(isinstance(word, str) for word in given):
        return tuple(given)
    raise UserError(f"{what} is {short_repr(given)}", "give names in order, as in ['nvidia', 'cpu']")


def check_backend_names(what: str, given: Any) -> tuple[str, ...]:
    """Of names, aliases and `auto`, each as it is called here. Raises UserError naming the nearest."""
    return tuple(AUTO if word.lower() == AUTO else backends.canonical(word) for word in check_names(what, given))


def rates(given: "Mapping[str, float] | None") -> dict[str, float]:
    """Measured throughput by kind. Raises UserError for what is no mapping, an unknown kind, and what is no rate."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        remedy = "give measured throughput by kind, as in {'nvidia:H100-80GB': 900.0, 'cpu': 12.0}"
        raise UserError(f"workload is {short_repr(given)}", remedy)
    for kind, rate in given.items():
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not math.isfinite(rate) or rate < 0:
            raise UserError(
                f"workload[{short_repr(kind)}] is {short_repr(rate)}", "give items per second, measured on that kind"
            )
    return {found: float(rate) for kind, rate in given.items() for found in device_preference.checked(kind)}


def check_known(cls: type, given: Mapping[str, Any]) -> None:
    """Raises UserError for a keyword that the back end's class does not take, naming the nearest."""
    taken = {
        name
        for base in cls.__mro__
        if "__init__" in vars(base)
        for name, one in inspect.signature(vars(base)["__init__"]).parameters.items()
        if one.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    } - {"self", "config"}
    if unknown := sorted(set(given) - taken):
        raise UserError(f"a back end takes no argument {unknown[0]!r}", nearest(unknown[0], sorted(taken)))
