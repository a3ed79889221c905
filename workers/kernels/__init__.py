"""The same operations, each written well for several kinds of devices: one file per implementation, found by its name.

Importing this package imports neither torch nor a driver's library. An implementation is one new file here with a class
`Kernels`, or one outside this package that an installed distribution names in the entry point group
`polyfleet.kernels`.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import UserError, nearest
from workers.errors import KernelsUnavailable

if TYPE_CHECKING:
    from workers.kernels.base import KernelBackend

ENTRY_POINTS = "polyfleet.kernels"
NO_IMPLEMENTATION = {"__init__", "__main__", "base", "kernel_choice", "operators", "resources", "tuner"}
OWN = tuple(sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in NO_IMPLEMENTATION))
LOADING_FAILS = (ImportError, OSError, RuntimeError, AttributeError, SyntaxError, TypeError, ValueError)
"""What the file of another distribution may raise where it is broken."""


@cache
def _outside() -> dict[str, EntryPoint]:
    """Implementations of other distributions. A name of ours stays ours."""
    return {e.name: e for e in entry_points(group=ENTRY_POINTS) if e.name not in OWN}


def names() -> tuple[str, ...]:
    """Every implementation that has a file, here or in another distribution."""
    return (*OWN, *sorted(_outside()))


def canonical(word: str) -> str:
    """The implementation for a name in any case. Raises UserError naming the nearest."""
    name = str(word).lower()
    if name not in names():
        raise UserError(f"unknown kernels {word!r}", nearest(name, names()))
    return name


def load(name: str) -> "type[KernelBackend]":
    """The class of an implementation. Being importable does not mean that its driver is there.

    Raises UserError for an unknown word, KernelsUnavailable for a known one whose file or libraries do not load.
    """
    found = canonical(name)
    try:
        cls: type[KernelBackend] = (
            _outside()[found].load() if found in _outside() else import_module(f"workers.kernels.{found}").Kernels
        )
    except LOADING_FAILS as e:
        raise KernelsUnavailable(found, f"its file does not load: {type(e).__name__}: {e}") from e
    return cls


def create(name: str, device: Any = None, **options: Any) -> "KernelBackend":
    """The implementation on a device: a torch.device, its name, or None for the one it computes on by itself. Raises as
    `load`, KernelsUnavailable with the reason, and UserError for an option it does not have.
    """
    cls = load(name)
    if reason := cls.unavailable_reason():
        raise KernelsUnavailable(canonical(name), reason)
    return cls(device, **options)


def available() -> tuple[str, ...]:
    """Implementations that can compute in this process. Imports torch and every driver's library."""
    return tuple(name for name in names() if not unavailable_reason(name))


def unavailable_reason(name: str) -> str:
    """Why an implementation cannot be used in this process, "" when it can. Raises UserError for an unknown word."""
    try:
        return load(name).unavailable_reason()
    except KernelsUnavailable as e:
        return e.reason
