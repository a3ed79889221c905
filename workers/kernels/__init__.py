"""Kernels: the same operations, optimised for several kinds of devices, with one file per implementation.

Importing this package imports neither torch nor a driver's library. An implementation is a file in `implementations/`
with a class `Kernels`, or a class in another distribution that is registered in the entry point group
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
IMPLEMENTATIONS = Path(__file__).parent / "implementations"
BUILTIN = tuple(sorted(path.stem for path in IMPLEMENTATIONS.glob("*.py") if path.stem != "__init__"))
VARIANTS = {"torch": ("flash", "efficient", "cudnn", "math")}
"""Variants of implementations, as in `torch:flash`: attention prefers that kernel of torch's. A device has some."""
LOAD_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, SyntaxError, TypeError, ValueError)
"""Exceptions that a broken file of another distribution may raise."""


@cache
def _plugins() -> dict[str, EntryPoint]:
    """Implementations of other distributions. They cannot replace a built-in one of the same name."""
    return {e.name: e for e in entry_points(group=ENTRY_POINTS) if e.name not in BUILTIN}


def names() -> tuple[str, ...]:
    """Return the names of all implementations, here or in other distributions, whether usable or not."""
    return (*BUILTIN, *sorted(_plugins()))


def resolve_name(name: str, others: tuple[str, ...] = ()) -> str:
    """Return the canonical form of a name in any case, with its variant. Raises UserError, which names the nearest of
    these and of `others`.
    """
    canonical_name = str(name).lower()
    base, colon, variant = canonical_name.partition(":")
    if base not in names() or (colon and variant not in VARIANTS.get(base, ())):
        with_variant = (f"{one}:{part}" for one, parts in VARIANTS.items() for part in parts)
        raise UserError(f"unknown kernels {name!r}", nearest(canonical_name, (*others, *names(), *with_variant)))
    return canonical_name


def load(name: str) -> "type[KernelBackend]":
    """Import the class of an implementation. Its driver may still be missing.

    Raises UserError for an unknown name, KernelsUnavailable if the implementation's file or libraries do not load.
    """
    canonical_name = resolve_name(name).partition(":")[0]
    try:
        cls: type[KernelBackend] = (
            _plugins()[canonical_name].load()
            if canonical_name in _plugins()
            else import_module(f"workers.kernels.implementations.{canonical_name}").Kernels
        )
    except LOAD_ERRORS as e:
        raise KernelsUnavailable(canonical_name, f"its file does not load: {type(e).__name__}: {e}") from e
    return cls


def create(name: str, device: Any = None, **options: Any) -> "KernelBackend":
    """Create an implementation for a device: a torch.device, its name, or None for the implementation's default.

    Raises as `load`, KernelsUnavailable with the reason, and UserError for an unknown option.
    """
    cls = load(name)
    canonical_name = resolve_name(name)
    if reason := cls.unavailable_reason():
        raise KernelsUnavailable(canonical_name, reason)
    if variant := canonical_name.partition(":")[2]:
        options["variant"] = variant
    return cls(device, **options)


def available() -> tuple[str, ...]:
    """Return the implementations that can compute in this process. Imports torch and every driver's library."""
    return tuple(name for name in names() if not unavailable_reason(name))


def unavailable_reason(name: str) -> str:
    """Return why an implementation cannot be used in this process, or "". Raises UserError for an unknown name."""
    try:
        return load(name).unavailable_reason()
    except KernelsUnavailable as e:
        return e.reason
