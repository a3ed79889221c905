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
    def from_string(cls, word: str) -> "BackendType":
        """Parse a name or an alias (`cuda`, `rocm`, `xla`, `xpu`, `mps`) in any case.

        Raises UserError naming the nearest.
        """
        name = str(word).lower()
        if name == cls.AUTO:
            return cls.AUTO
        if not catalogue.is_backend(name):
            valid = ["auto", *catalogue.vendors(), *catalogue.aliases()]
            raise UserError(f"unknown backend {word!r}", nearest(name, valid))
        return cls(catalogue.backend_name(name))
