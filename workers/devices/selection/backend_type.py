"""Backends as an enumeration, for callers who prefer it to strings."""

from enum import StrEnum

from cluster import catalogue
from cluster.errors import UserError, nearest


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
