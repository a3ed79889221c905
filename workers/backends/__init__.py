"""One file per vendor, found by its name, its libraries imported on first use: importing this package imports no torch.

`parts/` holds what several vendors share. A new vendor is one new file here with a class `Backend`, or one outside this
package that an installed distribution names in the entry point group `polyfleet.backends`.
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
    from workers.config import Given

ENTRY_POINTS = "polyfleet.backends"
OWN = tuple(sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in {"__init__", "base"}))


@cache
def _outside() -> dict[str, EntryPoint]:
    """Back ends of other distributions. A name of ours stays ours."""
    return {e.name: e for e in entry_points(group=ENTRY_POINTS) if e.name not in OWN}


def names() -> tuple[str, ...]:
    """Every back end that has a file, here or in another distribution."""
    return (*OWN, *sorted(_outside()))


def canonical(word: str) -> str:
    """The back end for a name or an alias, in any case. Raises UserError naming the nearest."""
    name = str(word).lower()
    if catalogue.is_backend(name):
        return catalogue.backend_name(name)
    if name not in names():
        raise UserError(f"unknown backend {word!r}", nearest(name, [*names(), *catalogue.aliases()]))
    return name


def load(name: str) -> "type[BaseBackend]":
    """The class of a back end, by name or alias. Being importable does not mean that a device is there.

    Raises UserError for an unknown word, BackendUnavailable for a known one whose file or libraries do not load.
    """
    found = canonical(name)
    try:
        cls: type[BaseBackend] = (
            _outside()[found].load() if found in _outside() else import_module(f"workers.backends.{found}").Backend
        )
    except (ImportError, OSError, RuntimeError, AttributeError) as e:
        raise BackendUnavailable(found, f"its file does not load: {type(e).__name__}: {e}") from e
    return cls


def create(name: str, device_id: int = 0, config: "Given" = None) -> "BaseBackend":
    """The back end on one of this process's devices. Raises as `load`, and BackendUnavailable with the reason."""
    return load(name)(config, device_id=device_id)


def available() -> tuple[str, ...]:
    """Backends that can compute in this process. Imports torch and every vendor's library: not for who only looks."""
    return tuple(name for name in names() if not unavailable_reason(name))


def unavailable_reason(name: str) -> str:
    """Why a back end cannot be used in this process, "" when it can."""
    try:
        return load(name).unavailable_reason()
    except BackendUnavailable as e:
        return e.reason
