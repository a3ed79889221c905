"""Which device is best where nobody says: by generation; measured numbers of a workload overrule that."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from cluster import catalogue
from cluster.errors import UserError, nearest


class Ranked(Protocol):
    """What ranking looks at; cluster.types.Device and workers.DeviceInfo both have it."""

    @property
    def backend(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def emulated(self) -> bool: ...
    @property
    def unavailable_reason(self) -> str: ...


Found = TypeVar("Found", bound=Ranked)


def tier(kind: str) -> float:
    """0 is best; a kind nobody knows comes just before the CPU."""
    order = list(catalogue.tiers())
    word = catalogue.tier(kind)
    return order.index(word) if word else len(order) - 1.5


def usable(devices: Iterable[Found]) -> list[Found]:
    """Those that a job may be given without asking for them by name: not emulated, nothing in the way."""
    return [d for d in devices if not d.emulated and not d.unavailable_reason]


def ranked(
    devices: Iterable[Found], priority: Sequence[str] = (), workload: Mapping[str, float] | None = None
) -> list[Found]:
    """Usable devices, best first.

    `priority` holds back ends, aliases, models or kinds; what it names comes first, in its order. `workload` is
    measured throughput by kind (higher is better) and orders what priority leaves equal; an unmeasured kind comes
    after. Raises UserError for a word of `priority` that is neither.
    """
    wanted = [checked(word) for word in priority]
    measured = workload or {}

    def key(device: Found) -> tuple[float, float, float]:
        named = (
            n for n, kinds in enumerate(wanted) if any(catalogue.matches_pattern(kind, device.kind) for kind in kinds)
        )
        place = next(named, len(wanted))
        return place, -measured.get(device.kind, 0.0), tier(device.kind)

    return sorted(usable(devices), key=key)


def best(
    devices: Iterable[Found], priority: Sequence[str] = (), workload: Mapping[str, float] | None = None
) -> Found | None:
    return next(iter(ranked(devices, priority, workload)), None)


def checked(word: str) -> tuple[str, ...]:
    """A back end, or the kinds that a model's name means, as devices spell them. Raises UserError naming the nearest.

    A model after its back end need not be listed: discovery may find cards that nobody wrote down.
    """
    name, colon, model = str(word).partition(":")
    if not colon and not catalogue.is_backend(name) and (found := catalogue.resolve_name(name)):
        return found
    if not catalogue.is_backend(name):
        valid = [*catalogue.vendors(), *catalogue.aliases()]
        raise UserError(f"unknown back end {word!r}", nearest(name.lower(), valid))
    backend = catalogue.backend_name(name)
    return (catalogue.resolve_name(model, backend) or (f"{backend}:{model}",)) if colon else (backend,)


def title(kind: str) -> str:
    """The name of a kind's tier."""
    return catalogue.tiers().get(catalogue.tier(kind), "other")
