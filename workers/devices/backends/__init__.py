"""Backends: one file per vendor, loaded by name. Importing this package imports no torch and no vendor library.

Each file in `vendors/` contains a class `Backend`; this folder contains their base class and what several of them
share. To add a vendor, add a file to `vendors/`, or declare a class in the entry point group `polyfleet.backends` of
another installed distribution.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import catalogue
from cluster.errors import UserError, nearest

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend
    from workers.options.config import ConfigLike

ENTRY_POINTS = "polyfleet.backends"
VENDORS = Path(__file__).parent / "vendors"
# Extensions built for another torch raise these: missing symbols, missing shared objects, failed registrations.
LOAD_ERRORS = (ImportError, OSError, RuntimeError, AttributeError)
BUILTIN = tuple(sorted(path.stem for path in VENDORS.glob("*.py") if path.stem != "__init__"))


class BackendUnavailable(UserError):
    """A requested backend that this environment or node does not have.

    `enabled`: back ends that the configuration enables; None for all. The alternatives are looked up when the error is
    printed or sent to another process, not when it is raised, as that imports every vendor's library.
    """

    _remedy: str

    def __init__(self, backend: str, reason: str, enabled: tuple[str, ...] | None = None):
        super().__init__(f"backend {backend!r} is not available here: {reason}")
        self.args = (backend, reason, enabled)
        self.backend, self.reason, self.enabled = backend, reason, enabled

    @property
    def available(self) -> tuple[str, ...]:
        """Back ends that can compute in this process, and that the configuration enables."""
        return _usable(self.enabled)[0]

    @property
    def remedy(self) -> str:
        if not self._remedy:
            usable, disabled = _usable(self.enabled)
            off = f"; disabled by the configuration: {', '.join(disabled)}" if disabled else ""
            self._remedy = f"available here: {', '.join(usable) or 'none'}{off}"
        return self._remedy

    @remedy.setter
    def remedy(self, text: str) -> None:
        self._remedy = text

    def __reduce__(self) -> tuple[type, tuple[object, ...], dict[str, object]]:
        """Pickle the remedy, too: another process has other back ends and could not compute it."""
        return type(self), self.args, vars(self) | {"_remedy": self.remedy}


def _usable(enabled: tuple[str, ...] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the back ends that can compute in this process: (enabled, disabled by the configuration)."""
    usable = available()
    disabled = tuple(name for name in usable if enabled is not None and name in BUILTIN and name not in enabled)
    return tuple(name for name in usable if name not in disabled), disabled


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
            else import_module(f"workers.devices.backends.vendors.{resolved}").Backend
        )
    except LOAD_ERRORS as e:
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


def import_error(library: str) -> str:
    """Return the reason why a library does not load with this torch, "" if it loads."""
    import torch

    try:
        import_module(library)
    except ModuleNotFoundError as e:
        if e.name == library:
            return f"{library} is not installed in this environment"
        return f"{library} needs {e.name}, which is not installed in this environment"
    except LOAD_ERRORS as e:
        return f"{library} does not load with torch {torch.__version__}: {e}"
    return ""
