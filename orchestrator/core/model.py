"""What the core sees and what it decides: frozen data, no methods that do anything."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.states import State
from orchestrator.core.throughput import Throughput


@dataclass(frozen=True, slots=True)
class Candidate:
    """One acceptable way to run a job. `kinds` are patterns: `nvidia:H100-80GB`, a backend alone (`tpu`), or `any`.

    `count` devices on each of `nodes` nodes; `min_count` ≤ count where a range was asked for; memory is per device.
    `exclusive`: all devices of the kind on each node, none of which anybody else holds; the counts then say nothing.
    Overrides are merged with the job's own values already (see orchestrator/spec.py); zero and "" mean "nothing said".
    """

    kinds: tuple[str, ...]
    count: int = 1
    min_count: int = 1
    nodes: int = 1
    pool: str = ""
    node: str = ""
    memory_bytes: int = 0
    precision: str = ""
    batch_size: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class Recovery:
    """What may be tried again. `max_restarts` counts failures of the job's code, `max_interruptions` those of nodes.

    -1: no limit. An exit code of `retry_exit_codes` counts as an interruption. `on_events` replaces what retry.py does
    by default after a failure of that kind: restart, retry, next, fail, or (of nan) ignore. `on_disconnect`: restart,
    wait or stop. `hang_after_s` 0: the default rule of its task, -1: never.
    """

    max_restarts: int = 0
    max_interruptions: int = -1
    retry_exit_codes: tuple[int, ...] = ()
    backoff_s: float = 1.0
    lease_s: float = 10.0
    grace_s: float = 30.0
    on_events: dict[str, str] = field(default_factory=dict)
    cross_vendor: bool = True
    on_disconnect: str = "restart"
    hang_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked for, and where it stands: all that an order to a node needs. Built by folding the event log.

    `number` is the order of submission. `workload` names what was measured of it (see throughput.py), `package` is the
    SHA-256 of the code archive; `secrets` are references, never values.
    `refusals` are launches in a row that did not start any rank.
    `first_candidate` is where the search starts: 0, or one past the candidate whose attempt ended badly (see retry.py).
    `avoid` names the nodes of an attempt that ended badly: others come first. `backend` is of its newest attempt.
    `floor`: the highest epoch that a node has seen of it, where that is above `epoch`; no epoch is ever used again.
    `overtaken`: attempts that this log does not know have run, and none has started since.
    """

    id: str
    name: str
    task: str
    candidates: tuple[Candidate, ...]
    ordered: bool = False
    priority: int = 0
    objective: str = "any"
    workload: str = ""
    submitted_s: float = 0.0
    recovery: Recovery = field(default_factory=Recovery)
    entry: str = ""
    seed: int = 0
    package: str = ""
    secrets: dict[str, str] = field(default_factory=dict)
    keep_checkpoints: int = 3
    resume_from: str = ""
    number: int = 0
    state: State = State.PENDING
    epoch: int = 0
    floor: int = 0
    overtaken: bool = False
    restarts: int = 0
    interruptions: int = 0
    refusals: int = 0
    first_candidate: int = 0
    avoid: tuple[str, ...] = ()
    backend: str = ""

    @property
    def next_epoch(self) -> int:
        return max(self.epoch, self.floor) + 1


@dataclass(frozen=True, slots=True)
class Devices:
    """The equal devices of one node. `free` holds the numbers nobody leases; memory and price are of one device."""

    id: str
    node: str
    pool: str
    environment: str
    backend: str
    kind: str
    free: tuple[int, ...]
    total: int
    memory_bytes: int = 0
    emulated: bool = False
    schedulable: bool = True
    reason: str = ""
    price_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Running:
    """A live attempt, for preemption: which devices it holds and how dear it is. `order`: of submission."""

    job: str
    priority: int
    order: int
    leases: tuple[tuple[str, tuple[int, ...]], ...]
    preemptible: bool = True
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a plan is made from. `now_s` and `paused_until_s` (by job) are monotonic and decide; `wall_s` is only
    told: how old a measurement is.
    """

    now_s: float
    devices: tuple[Devices, ...]
    jobs: tuple[Job, ...]
    running: tuple[Running, ...] = ()
    throughput: Throughput = field(default_factory=Throughput)
    paused_until_s: Mapping[str, float] = field(default_factory=dict)
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Start:
    """Start `job` as its candidate number `candidate` on these leases: (devices id, numbers) per node, by rank."""

    job: str
    candidate: int
    leases: tuple[tuple[str, tuple[int, ...]], ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Preempt:
    """Ask `victim` to save and stop so that `job` can start."""

    victim: str
    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now. `why_not`: job -> (candidate number, devices id or "" for all) -> the refusing sentence."""

    start: tuple[Start, ...] = ()
    preempt: tuple[Preempt, ...] = ()
    why_not: dict[str, dict[tuple[int, str], str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the log, in the past tense. `epoch` is of its attempt; the store gives `seq`, 0 before."""

    job: str
    event: str
    epoch: int
    time_s: float
    data: dict[str, Any] = field(default_factory=dict)
    seq: int = 0
