"""Rank devices: by the caller's priority, then by measured throughput, then by generation."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from cluster import catalogue
from cluster.errors import UserError, nearest


class Ranked(Protocol):
    """Attributes that ranking needs; cluster.types.Device and workers.DeviceInfo both have them."""

    @property
    def backend(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def emulated(self) -> bool: ...
    @property
    def unavailable_reason(self) -> str: ...


AnyDevice = TypeVar("AnyDevice", bound=Ranked)


def tier(kind: str) -> float:
    """Rank of a kind's generation: 0 is best; a kind not in the catalogue comes just before the CPU."""
    order = list(catalogue.tiers())
    name = catalogue.tier(kind)
    return order.index(name) if name else len(order) - 1.5


def usable(devices: Iterable[AnyDevice]) -> list[AnyDevice]:
    """Return the devices that may be chosen automatically: available and not emulated."""
    return [d for d in devices if not d.emulated and not d.unavailable_reason]


def ranked(
    devices: Iterable[AnyDevice], priority: Sequence[str] = (), workload: Mapping[str, float] | None = None
) -> list[AnyDevice]:
    """Return usable devices, best first.

    `priority` lists backends, aliases, models or kinds, which come first, in this order. `workload` is measured
    throughput by kind (higher is better): it orders devices of equal priority; kinds without a measurement come last.
    Raises UserError for an unknown name in `priority`.
    """
    preferred = [resolve_kinds(entry) for entry in priority]
    measured = workload or {}

    def key(device: AnyDevice) -> tuple[float, float, float]:
        matches = (
            n
            for n, kinds in enumerate(preferred)
            if any(catalogue.matches_pattern(kind, device.kind) for kind in kinds)
        )
        position = next(matches, len(preferred))
        return position, -measured.get(device.kind, 0.0), tier(device.kind)

    return sorted(usable(devices), key=key)


def best(
    devices: Iterable[AnyDevice], priority: Sequence[str] = (), workload: Mapping[str, float] | None = None
) -> AnyDevice | None:
    return next(iter(ranked(devices, priority, workload)), None)


def resolve_kinds(text: str) -> tuple[str, ...]:
    """Resolve a backend, or a model's name to its kinds. Raises UserError naming the nearest.

    In BACKEND:MODEL the model need not be in the catalogue: discovery may find devices that the catalogue lacks.
    """
    name, colon, model = str(text).partition(":")
    if not colon and not catalogue.is_backend(name) and (kinds := catalogue.resolve_name(name)):
        return kinds
    if not catalogue.is_backend(name):
        valid = [*catalogue.vendors(), *catalogue.aliases()]
        raise UserError(f"unknown backend {text!r}", nearest(name.lower(), valid))
    backend = catalogue.backend_name(name)
    return (catalogue.resolve_name(model, backend) or (f"{backend}:{model}",)) if colon else (backend,)


def title(kind: str) -> str:
    """Title of a kind's tier."""
    return catalogue.tiers().get(catalogue.tier(kind), "other")
