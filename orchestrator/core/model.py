"""What the core sees and what it decides: frozen data, no methods that do anything."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.placement_slots import Memory
from orchestrator.core.policy import EXPLORE_DEVICE_S, Project
from orchestrator.core.states import State
from orchestrator.core.throughput import History, Throughput


@dataclass(frozen=True, slots=True)
class Candidate:
    """One acceptable way to run a job. `kinds` are patterns: `nvidia:H100-80GB`, a backend alone (`tpu`), or `any`.

    `count` devices on each of `nodes` nodes; `min_count` ≤ count where a range was asked for; memory is per device.
    `memory_estimated`: from the numbers of its model. `exclusive`: all devices of the kind on each node, none of which
    anybody else holds; the counts then say nothing.
    `whole_batch`: `batch_size` is of all ranks together, and each takes an equal share; else it is of one rank.
    `launch` is of a command: one of workers.messages.LAUNCHES. `max_price` is of one device per hour; 0: any.
    `pools`: any of these, () for all, but none of `not_pools`; `dtypes` are those it has to compute with natively, and
    `features` what it needs beside (cluster/catalogue/device_features.py).
    Overrides are merged with the job's own values already (see orchestrator/job_spec.py); zero and "" mean that nothing
    was said.
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
    launch: str = "node"
    max_price: float = 0.0
    pools: tuple[str, ...] = ()
    not_pools: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    whole_batch: bool = False
    features: tuple[str, ...] = ()
    memory_estimated: bool = False

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of devices per node that may be taken, ascending."""
        return tuple(filter(self.divides, range(self.min_count, self.count + 1)))

    def divides(self, count: int) -> bool:
        """So many devices per node share the batch equally."""
        return not self.whole_batch or self.batch_size % (count * self.nodes) == 0


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
class Data:
    """Something to read that a job is shown at `mount` in its folder. `uri` is an object store's place, POOL:PATH, or a
    path of the machine that submitted it; of the latter the server has the content, named by `sha256`. Else that may be
    "": any content will do.
    """

    uri: str
    mount: str
    sha256: str = ""

    @property
    def key(self) -> str:
        """As nodes tell what they have cached of it (cluster/content_cache.py)."""
        return (self.sha256 or hashlib.sha256(self.uri.encode()).hexdigest())[:16]


@dataclass(frozen=True, slots=True)
class Declared:
    """How much work a job is, as its user says: so many steps, or hours on one device of kind `on`. 0: not said."""

    steps: int = 0
    hours: float = 0.0
    on: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked for, and where it stands: all that an order to a node needs. Built by folding the event log.

    `number` is the order of submission. `workload` names what was measured of it (see throughput.py), `package` is the
    SHA-256 of the code archive, `content_sha` of its content without times; `secrets` are references, never values.
    `output_limit_bytes`: of its folder of files on each node, 0 where the job sets none.
    `replicas`: so many copies of its newest checkpoint are kept on other machines (see checkpoint_replication.py).
    `refusals` are launches in a row that did not start any rank.
    `weight` is of its value among equals; `project` is whose quota it counts against; `deadline_s` is by the wall
    clock, 0 for none; `work` is how much it is.
    `first_candidate` is where the search starts: 0, or one past the candidate whose attempt ended badly (see retry.py).
    `avoid` names the nodes of an attempt that ended badly: others come first. `backend` is of its newest attempt.
    `floor`: the highest epoch that a node has seen of it, where that is above `epoch`; no epoch is ever used again.
    `overtaken`: attempts that this log does not know have run, and none has started since.
    `checkpoint_in`: storages that hold its newest checkpoint; told of jobs that wait.
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
    content_sha: str = ""
    secrets: dict[str, str] = field(default_factory=dict)
    keep_checkpoints: int = 3
    resume_from: str = ""
    output_limit_bytes: int = 0
    data: tuple[Data, ...] = ()
    replicas: int = 0
    weight: float = 1.0
    project: str = ""
    deadline_s: float = 0.0
    work: Declared = field(default_factory=Declared)
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
    checkpoint_in: tuple[str, ...] = ()

    @property
    def next_epoch(self) -> int:
        return max(self.epoch, self.floor) + 1


@dataclass(frozen=True, slots=True)
class Devices:
    """The equal devices of one node. `free` holds the numbers nobody leases; memory and price are of one device, `data`
    names what the node has cached (`Data.key`), `storage` the storage in which its checkpoints lie. `host` is the
    machine (NAME/ADDRESS) whose memory they share with all its other devices, "" for memory of their own.
    """

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
    data: tuple[str, ...] = ()
    storage: str = ""
    host: str = ""
    host_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is, as it has reported: `step` of `of` (0 where that is not known) at `at_s`, monotonic. `rates`
    are steps per second by (kind, devices), a mean in which newer reports weigh more; `ran_s` device-seconds in all its
    attempts that ended, `ran_on` the same by kind; `starts_s` is how long the newest attempt took from its placing to
    its first report, 0 where that is not known. While no attempt is live, `step` is where the next one goes on.
    """

    step: int = 0
    of: int = 0
    at_s: float = 0.0
    rates: Mapping[tuple[str, int], float] = field(default_factory=dict)
    ran_s: float = 0.0
    starts_s: float = 0.0
    ran_on: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Since:
    """Monotonic: when this server learned of a job, and since when the job waits, or since when an attempt of it is
    placed. A clock that is set makes no difference to it; what was before this server does not count.
    """

    known_s: float
    state_s: float


@dataclass(frozen=True, slots=True)
class Running:
    """A live attempt: which devices it holds and how dear it is to stop. `priority` is its job's, and what it had aged
    when it was placed; `order` is of submission. `asked` is its job and `candidate` the one it runs as. `saves`: it has
    a checkpoint, so that it loses little when it is stopped.
    """

    job: str
    priority: int
    order: int
    leases: tuple[tuple[str, tuple[int, ...]], ...]
    preemptible: bool = True
    stopping: bool = False
    asked: Job | None = None
    candidate: int = 0
    saves: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a plan is made from. `now_s` and `paused_until_s` (by job) are monotonic and decide; `wall_s` is only
    told: how old a measurement is. `startable` are devices of nodes that an autoscaler may start, `notes` what is told
    of that by job, as in Plan.why_not. `progress` is by job, of those that have run or reported; `since` of all.
    `policy` is one of planner.policies.POLICIES, `memory` what the plan before this one left for it, `ageing_s` and
    `explore_device_s` as in policy.Policy.
    """

    now_s: float
    devices: tuple[Devices, ...]
    jobs: tuple[Job, ...]
    running: tuple[Running, ...] = ()
    throughput: Throughput = field(default_factory=Throughput)
    paused_until_s: Mapping[str, float] = field(default_factory=dict)
    wall_s: float = 0.0
    startable: tuple[Devices, ...] = ()
    notes: Mapping[str, Mapping[tuple[int, str], str]] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)
    history: History = field(default_factory=History)
    since: Mapping[str, Since] = field(default_factory=dict)
    policy: str = "priority"
    memory: Memory = field(default_factory=Memory)
    ageing_s: float = 0.0
    projects: Mapping[str, Project] = field(default_factory=dict)
    explore_device_s: float = EXPLORE_DEVICE_S

    @property
    def possible(self) -> tuple[Devices, ...]:
        """What there is, and what there may be."""
        return (*self.devices, *self.startable)


@dataclass(frozen=True, slots=True)
class Start:
    """Start `job` as its candidate number `candidate` on these leases: (devices id, numbers) per node, by rank. `aged`:
    it has waited so long that it counts as of so much more priority.
    """

    job: str
    candidate: int
    leases: tuple[tuple[str, tuple[int, ...]], ...]
    reason: str = ""
    aged: int = 0


@dataclass(frozen=True, slots=True)
class Preempt:
    """Ask `victim` to save and stop so that `job` can start. The same job: so that it can go on at a better place."""

    victim: str
    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now. `why_not`: job -> (candidate number, devices id or "" for all) -> the refusing sentence.
    `memory` is for the next plan. `value` and `bound` certify the decision, in units of the policy: no other could be
    worth more than `bound`; both are 0 where it goes by order alone.
    """

    start: tuple[Start, ...] = ()
    preempt: tuple[Preempt, ...] = ()
    why_not: dict[str, dict[tuple[int, str], str]] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    value: float = 0.0
    bound: float = 0.0

    @property
    def gap(self) -> float:
        """Of the bound; 0 to 1: what any other decision could gain at most."""
        return max(0.0, 1.0 - self.value / self.bound) if self.bound else 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the log, in the past tense. `epoch` is of its attempt; the store gives `seq`, 0 before."""

    job: str
    event: str
    epoch: int
    time_s: float
    data: dict[str, Any] = field(default_factory=dict)
    seq: int = 0
