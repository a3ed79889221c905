"""Backends: one file per vendor, loaded by name. Importing this package imports no torch and no vendor library.

`parts/` contains code that several vendors share. To add a vendor, add a file with a class `Backend` here, or declare
one in the entry point group `polyfleet.backends` of another installed distribution.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import catalogue
from cluster.errors import UserError, nearest
from workers.errors import BackendUnavailable

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend
    from workers.config import ConfigLike

ENTRY_POINTS = "polyfleet.backends"
BUILTIN = tuple(sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in {"__init__", "base"}))


@cache
def _plugins() -> dict[str, EntryPoint]:
    """Entry points of backends in other distributions. They cannot replace a backend of this package."""
    return {e.name: e for e in entry_points(group=ENTRY_POINTS) if e.name not in BUILTIN}


def names() -> tuple[str, ...]:
    """Names of all backends, in this package and in other distributions."""
    return (*BUILTIN, *sorted(_plugins()))


def canonical(requested: str) -> str:
    """Resolve a backend's name or alias, in any case. Raises UserError naming the nearest valid name."""
    name = str(requested).lower()
    if catalogue.is_backend(name):
        return catalogue.backend_name(name)
    if name not in names():
        raise UserError(f"unknown backend {requested!r}", nearest(name, [*names(), *catalogue.aliases()]))
    return name


def load(name: str) -> "type[BaseBackend]":
    """Import a backend's class, by name or alias. Does not check that a device is present.

    Raises UserError for an unknown name, BackendUnavailable for a backend whose file or libraries do not load.
    """
    resolved = canonical(name)
    try:
        cls: type[BaseBackend] = (
            _plugins()[resolved].load()
            if resolved in _plugins()
            else import_module(f"workers.backends.{resolved}").Backend
        )
    except (ImportError, OSError, RuntimeError, AttributeError) as e:
        raise BackendUnavailable(resolved, f"its file does not load: {type(e).__name__}: {e}") from e
    return cls


def create(name: str, device_id: int = 0, config: "ConfigLike" = None) -> "BaseBackend":
    """Create the backend on one device of this process. Raises as `load`, or BackendUnavailable if it is unusable."""
    return load(name)(config, device_id=device_id)


def available() -> tuple[str, ...]:
    """Names of backends that can compute in this process. Slow: imports torch and every vendor's library."""
    return tuple(name for name in names() if not unavailable_reason(name))


def unavailable_reason(name: str) -> str:
    """Return the reason why a backend cannot be used in this process, "" if it can."""
    try:
        return load(name).unavailable_reason()
    except BackendUnavailable as e:
        return e.reason
