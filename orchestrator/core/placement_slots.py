"""Where jobs may run, and what one plan leaves for the next."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Island:
    """Devices that may share one collective group: same back end, environment and pool, same kind.

    `per_node`: how many devices each node has, where whole nodes are wanted; else 0.
    """

    pool: str
    kind: str
    backend: str
    environment: str
    per_node: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """One way to run a job: as its candidate number `candidate`, `count` devices on each of `nodes` nodes."""

    candidate: int
    island: Island
    count: int
    nodes: int = 1

    @property
    def devices(self) -> int:
        return self.count * self.nodes


@dataclass(frozen=True, slots=True)
class Reserved:
    """Devices of `place` are kept for a job until `until_s`, monotonic: others stop for it, or it stops to go there."""

    place: Place
    until_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """What the next plan starts from; it may be empty. `work` are prices of the work by island, `devices` those of
    devices by priority and island (see core/planner); `reserved` is by job. `fault`: what an installed
    policy did wrong at the last decision, so that the order of submission decided. `gap` is of the last
    full decision, as Plan.gap. `drains_s`, by priority: how long all devices together would take for
    all that waits, or waited not long ago, and takes at most 1, 2, 4, 8 ... device-seconds; found at `drained_s`,
    monotonic.
    """

    work: Mapping[Island, float] = field(default_factory=dict)
    devices: Mapping[int, Mapping[Island, float]] = field(default_factory=dict)
    reserved: Mapping[str, Reserved] = field(default_factory=dict)
    fault: str = ""
    gap: float = 0.0
    drains_s: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    drained_s: float = 0.0
