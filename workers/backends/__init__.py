"""One file per vendor, found by its name, its libraries imported on first use: importing this package imports no torch.

`parts/` holds what several vendors share. A new vendor is one new file here with a class `Backend`.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.accelerators import ALIASES, TABLE
from cluster.errors import UserError, nearest
from workers.errors import BackendUnavailable

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend

NAMES = tuple(sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in {"__init__", "base"}))


def load(name: str) -> "type[BaseBackend]":
    """The class in workers/backends/<name>.py, by name or alias in any case. Being importable does not mean that a
    device is there.

    Raises UserError for an unknown word, BackendUnavailable for a known one whose file or libraries are not here.
    """
    found = ALIASES.get(name.lower(), name.lower())
    if found not in NAMES:
        if found in TABLE:
            raise BackendUnavailable(found, "this version of Polyfleet cannot compute on it", NAMES)
        raise UserError(f"unknown backend {name!r}", nearest(name.lower(), [*NAMES, *ALIASES]))
    try:
        cls: type[BaseBackend] = import_module(f"workers.backends.{found}").Backend
    except ModuleNotFoundError as e:
        reason = f"it needs the package {e.name!r}; install the {found!r} extra in that pool's environment"
        raise BackendUnavailable(found, reason) from e
    return cls


def create(name: str, index: int = 0) -> "BaseBackend":
    """The backend on its device number `index` (as this process sees them). Raises as `load`, and BackendUnavailable
    with the reason.
    """
    cls = load(name)
    reason = cls.unavailable_reason()
    if reason:
        raise BackendUnavailable(cls.BACKEND_NAME, reason, available())
    return cls(index)


def available() -> tuple[str, ...]:
    """Backends that can compute in this process. Imports torch and every vendor's library: not for who only looks."""
    return tuple(name for name in NAMES if not _reason(name))


def _reason(name: str) -> str:
    try:
        return load(name).unavailable_reason()
    except BackendUnavailable as e:
        return e.message
