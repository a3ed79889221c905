"""Which device is best where nobody says: by generation; measured numbers of a workload overrule that."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from cluster.accelerators import ALIASES, TABLE
from cluster.errors import UserError, nearest


class Ranked(Protocol):
    """What ranking looks at; cluster.vocabulary.Device and workers.DeviceInfo both have it."""

    @property
    def backend(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def emulated(self) -> bool: ...
    @property
    def unavailable_reason(self) -> str: ...


Found = TypeVar("Found", bound=Ranked)

# Best first. A kind belongs to the first tier one of whose patterns it matches.
TIERS: tuple[tuple[str, str], ...] = (
    ("Hopper and Blackwell", r"nvidia:(GH200|H100|H200|H20|H800|G?B[23]00|RTX-PRO-\d+-Blackwell).*"),
    ("TPU v5p, v6e, v7", r"tpu:v(5p|6e|7x)"),
    ("A100 and MI300 class", r"nvidia:A(100|800).*|amd:MI3\d\d[AX]|intel:Gaudi3|neuron:trn[23].*"),
    ("TPU v4, v5e", r"tpu:v(4|5e)"),
    (
        "other data-centre accelerators",
        r"nvidia:(L40S?|L4|A\d+G?|V100|T4).*|amd:MI.*|intel:(Max|Gaudi|Flex).*|neuron:.*|tpu:.*",
    ),
    ("other GPUs", r"(nvidia|amd|intel|apple):.*"),
    ("CPU", r"cpu.*"),
)


def tier(kind: str) -> float:
    """0 is best; a kind nobody knows comes just before the CPU."""
    matches = (n for n, (_, pattern) in enumerate(TIERS) if re.fullmatch(pattern, kind))
    return next(matches, len(TIERS) - 1.5)


def usable(devices: Iterable[Found]) -> list[Found]:
    """Those that a job may be given without asking for them by name: not emulated, nothing in the way."""
    return [d for d in devices if not d.emulated and not d.unavailable_reason]


def ranked(
    devices: Iterable[Found], priority: Sequence[str] = (), workload: Mapping[str, float] | None = None
) -> list[Found]:
    """Usable devices, best first.

    `priority` holds back ends, aliases or kinds; what it names comes first, in its order. `workload` is measured
    throughput by kind (higher is better) and orders what priority leaves equal; an unmeasured kind comes after.
    Raises UserError for a word of `priority` that is neither.
    """
    wanted = [checked(word) for word in priority]
    measured = workload or {}

    def key(device: Found) -> tuple[float, float, float]:
        place = next((n for n, word in enumerate(wanted) if word in (device.backend, device.kind)), len(wanted))
        return place, -measured.get(device.kind, 0.0), tier(device.kind)

    return sorted(usable(devices), key=key)


def best(
    devices: Iterable[Found], priority: Sequence[str] = (), workload: Mapping[str, float] | None = None
) -> Found | None:
    return next(iter(ranked(devices, priority, workload)), None)


def checked(word: str) -> str:
    """A back end or kind as devices spell it. Raises UserError naming the nearest back end."""
    name, colon, model = str(word).partition(":")
    backend = ALIASES.get(name.lower(), name.lower())
    if backend not in TABLE:
        raise UserError(f"unknown back end {word!r}", nearest(name.lower(), [*TABLE, *ALIASES]))
    return f"{backend}{colon}{model}"


def title(kind: str) -> str:
    """The name of a kind's tier."""
    return next((name for name, pattern in TIERS if re.fullmatch(pattern, kind)), "other")
