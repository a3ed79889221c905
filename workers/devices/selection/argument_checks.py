"""Check arguments by which callers choose a backend: names, measured rates, arguments of its class.

BackendType is for callers who prefer an enumeration to strings.
"""

import inspect
import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from cluster import catalogue
from cluster.errors import UserError, nearest
from workers.devices import backends
from workers.options import device_preference
from workers.options.config_values import short_repr, split_names


class BackendType(StrEnum):
    """One member per vendor of the catalogue, and AUTO: the best backend available."""

    _ignore_ = ["backend"]  # noqa: RUF012
    AUTO = "auto"
    for backend in catalogue.vendors():
        vars()[backend.upper()] = backend

    @classmethod
    def from_string(cls, name: str) -> "BackendType":
        """Parse a name or an alias (`cuda`, `rocm`, `xla`, `xpu`, `mps`) in any case.

        Raises UserError naming the nearest.
        """
        lowered = str(name).lower()
        if lowered == cls.AUTO:
            return cls.AUTO
        if not catalogue.is_backend(lowered):
            valid = ["auto", *catalogue.vendors(), *catalogue.aliases()]
            raise UserError(f"unknown backend {name!r}", nearest(lowered, valid))
        return cls(catalogue.backend_name(lowered))


AUTO = "auto"


def check_names(what: str, value: Any) -> tuple[str, ...]:
    """Return names in order, from a comma-separated string or an iterable. Raises UserError for other values."""
    if isinstance(value, str):
        return split_names(value)
    if isinstance(value, Iterable) and not isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise UserError(f"{what} is {short_repr(value)}", "give names in order, such as ['nvidia', 'cpu']")


def check_backend_names(what: str, value: Any) -> tuple[str, ...]:
    """Resolve backend names, aliases and `auto` to canonical names. Raises UserError naming the nearest."""
    return tuple(AUTO if name.lower() == AUTO else backends.canonical(name) for name in check_names(what, value))


def rates(workload: "Mapping[str, float] | None") -> dict[str, float]:
    """Check and resolve measured throughput by kind. Raises UserError for an unknown kind or an invalid rate."""
    if workload is None:
        return {}
    if not isinstance(workload, Mapping):
        remedy = "give measured throughput by kind, such as {'nvidia:H100-80GB': 900.0, 'cpu': 12.0}"
        raise UserError(f"workload is {short_repr(workload)}", remedy)
    for kind, rate in workload.items():
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not math.isfinite(rate) or rate < 0:
            raise UserError(
                f"workload[{short_repr(kind)}] is {short_repr(rate)}", "give items per second, measured on that kind"
            )
    return {
        resolved: float(rate) for kind, rate in workload.items() for resolved in device_preference.resolve_kinds(kind)
    }


def check_keywords(cls: type, arguments: Mapping[str, Any]) -> None:
    """Raise UserError for a keyword that the backend's class does not accept, naming the nearest."""
    accepted = {
        name
        for base in cls.__mro__
        if "__init__" in vars(base)
        for name, parameter in inspect.signature(vars(base)["__init__"]).parameters.items()
        if parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    } - {"self", "config"}
    if unknown := sorted(set(arguments) - accepted):
        raise UserError(f"a backend has no argument {unknown[0]!r}", nearest(unknown[0], sorted(accepted)))
