"""Places where jobs may run, and the state that one plan passes to the next."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Island:
    """Devices that may share one collective group: same back end, environment and pool, same kind.

    `per_node`: number of devices of each node for exclusive candidates, else 0. `tpu_slice`: its name for candidates on
    several hosts of one TPU slice, else "".
    """

    pool: str
    kind: str
    backend: str
    environment: str
    per_node: int = 0
    tpu_slice: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Possible placement of a job: candidate number `candidate` on `count` devices of each of `nodes` nodes."""

    candidate: int
    island: Island
    count: int
    nodes: int = 1

    @property
    def devices(self) -> int:
        return self.count * self.nodes


@dataclass(frozen=True, slots=True)
class PlaceReservation:
    """Reservation of `place` for a job until `until_s` (monotonic), while others stop for it or it moves there."""

    place: Place
    until_s: float


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """State passed from one plan to the next; it may be empty.

    `work` are prices of the work by island, `devices` those of devices by priority and island (core/plan/arrays).
    `reserved` is by job, and so is `waits_on`: the devices ids that a blocked job waits for. They stay the
    same while no other nodes are better. `fault`: error of an installed policy in the last decision, for which the
    order of submission was used instead. `gap` is that of the last full decision, as Plan.gap. `drains_s`, by priority:
    how long all devices together would take for all jobs that wait, or waited recently, and need at most 1, 2, 4, 8 …
    device-seconds; computed at `drained_s`, monotonic.
    """

    work: Mapping[Island, float] = field(default_factory=dict)
    devices: Mapping[int, Mapping[Island, float]] = field(default_factory=dict)
    reserved: Mapping[str, PlaceReservation] = field(default_factory=dict)
    waits_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fault: str = ""
    gap: float = 0.0
    drains_s: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    drained_s: float = 0.0
