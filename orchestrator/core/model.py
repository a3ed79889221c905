"""Input and output of the core (snapshot and plan) as frozen data without behaviour."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.placement_slots import PlanMemory
from orchestrator.core.states import State
from orchestrator.core.throughput import History, Throughput
from workers.protocol.messages import LEASE_S

EXPLORE_DEVICE_S = 3600.0

HIGHEST = 1000
"""Highest priority that a job can reach by waiting."""

ANY_DEVICES = {"decides_devices": False}
"""Metadata of a candidate's field that is not compared with devices: any of them can satisfy it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One acceptable set of devices and settings for a job. `kinds` are patterns: `nvidia:H100-80GB`, a backend alone
    (`tpu`), or `any`.

    `count` devices on each of `nodes` nodes; `min_count` ≤ count if a range was requested; memory is per device.
    `memory_estimated`: it was computed from the sizes of its model. `exclusive`: all devices of the kind on each node,
    none of them used by another job; the counts then have no meaning.
    `whole_batch`: `batch_size` is the total of all ranks, each of which takes an equal share; else it is per rank.
    `launch` applies to a command: one of LAUNCHES in workers/protocol/messages.py. `max_price` is per device and hour;
    0: any.
    `pools`: any of these, () for all, but none of `not_pools`. `dtypes` must be supported natively, and `features` are
    other requirements (cluster/catalogue/device_features.py).
    Overrides are merged with the job's own values already (orchestrator/spec/job_spec.py); zero and "" mean not set.
    Candidates that differ only in fields of ANY_DEVICES may run on the same devices (plan/options/capacity.py).
    """

    kinds: tuple[str, ...]
    count: int = 1
    min_count: int = 1
    nodes: int = 1
    pool: str = ""
    node: str = ""
    memory_bytes: int = 0
    precision: str = field(default="", metadata=ANY_DEVICES)
    batch_size: int = 0
    environment: dict[str, str] = field(default_factory=dict, metadata=ANY_DEVICES)
    command: tuple[str, ...] = field(default=(), metadata=ANY_DEVICES)
    arguments: dict[str, Any] = field(default_factory=dict, metadata=ANY_DEVICES)
    exclusive: bool = False
    launch: str = field(default="node", metadata=ANY_DEVICES)
    max_price: float = 0.0
    pools: tuple[str, ...] = ()
    not_pools: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    whole_batch: bool = False
    features: tuple[str, ...] = ()
    memory_estimated: bool = False

    @property
    def counts(self) -> tuple[int, ...]:
        """Allowed numbers of devices per node, ascending."""
        return tuple(filter(self.divides, range(self.min_count, self.count + 1)))

    def divides(self, count: int) -> bool:
        """Return True if the batch can be divided equally among `count` devices per node."""
        return not self.whole_batch or self.batch_size % (count * self.nodes) == 0


@dataclass(frozen=True, slots=True)
class Recovery:
    """Retry limits. `max_restarts` counts failures of the job's code, `max_interruptions` those of nodes; -1: no limit.

    An exit code in `retry_exit_codes` counts as an interruption. `on_events` replaces the default action of
    jobs/retry.py for a kind of failure: restart, retry, next, fail, or (for nan) ignore. `on_disconnect`: restart, wait
    or stop. `hang_after_s` 0: the default rule of its task, -1: never.
    """

    max_restarts: int = 0
    max_interruptions: int = -1
    retry_exit_codes: tuple[int, ...] = ()
    backoff_s: float = 1.0
    lease_s: float = LEASE_S
    grace_s: float = 30.0
    on_events: dict[str, str] = field(default_factory=dict)
    cross_vendor: bool = True
    on_disconnect: str = "restart"
    hang_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Data:
    """Input data that a job reads at `mount` in its folder.

    `uri` is an object store URL, POOL:PATH, or a path on the submitting machine. For such a path the server has stored
    the content, named by `sha256`; else `sha256` may be "", which accepts any content.
    """

    uri: str
    mount: str
    sha256: str = ""

    @property
    def key(self) -> str:
        """Key by which nodes list cached content (cluster/host/content_cache.py)."""
        return (self.sha256 or hashlib.sha256(self.uri.encode()).hexdigest())[:16]


@dataclass(frozen=True, slots=True)
class DeclaredWork:
    """Size of a job as declared by its user: steps, or hours on one device of kind `on`. 0: not declared."""

    steps: int = 0
    hours: float = 0.0
    on: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """Request and state of a job: all that an order to a node needs. Built by folding the event log.

    `number` is the position in the order of submission. `workload` is the key of its measurements (see throughput.py).
    `package` is the SHA-256 of the code archive, `content_sha` that of its content without times. `secrets` are
    references, never values. `output_limit_bytes` limits its folder of files on each node; 0: no limit of the job.
    `replicas`: number of copies of its newest checkpoint on other machines (step/checkpoint_replication.py).
    `refusals`: number of launches in a row that did not start any rank.
    `weight` is its value relative to jobs of equal priority, `project` the owner of its quota, `deadline_s` by the wall
    clock, 0 for none; `work` is its size. `preemptible`: it may be stopped for other jobs.
    `first_candidate` is where the search starts: 0, or one past the candidate whose attempt failed (jobs/retry.py).
    `avoid` names the nodes of a failed attempt; other nodes come first. `backend` is that of its newest attempt.
    `floor`: the highest epoch that a node or fence has recorded for it, if above `epoch`; an epoch is never used twice.
    `overtaken`: attempts that are missing from this log have run, and none has started since.
    `checkpoint_in`: storages that hold its newest checkpoint; set for waiting jobs only.
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
    work: DeclaredWork = field(default_factory=DeclaredWork)
    preemptible: bool = True
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
class Policy:
    """Scheduling policy.

    `name`: one of POLICIES in plan/policies/priced_policies.py, or an installed policy. `every_s`: interval of full
    decisions, in which jobs of equal priority may be stopped or moved. `ageing_s`: waiting time that raises a job's
    priority by one; 0: never. `explore_device_s`: device-seconds for which jobs of a workload may use an unmeasured
    kind before measured kinds come first.
    """

    name: str = "finish_time"
    every_s: float = 60.0
    ageing_s: float = 0.0
    explore_device_s: float = EXPLORE_DEVICE_S


@dataclass(frozen=True, slots=True)
class Project:
    """`quota`: number of devices by pattern of kinds. `borrow`: it may also use devices that no other job needs."""

    quota: Mapping[str, int] = field(default_factory=dict)
    borrow: bool = False


@dataclass(frozen=True, slots=True)
class TpuSlice:
    """TPU slice of several hosts, and the position `worker` of one of them. `name`: "" if unknown."""

    name: str
    hosts: int
    worker: int = 0


@dataclass(frozen=True, slots=True)
class Devices:
    """Equal devices of one node.

    `free` are the numbers of unallocated devices; memory and price are per device. `data` lists content that the node
    has cached (`Data.key`), `storage` is where its checkpoints are stored. `host` is the machine (NAME/ADDRESS) whose
    memory the devices share with all its other devices, "" if they have memory of their own. `tpu_slice`: the slice of
    several hosts to which the node belongs.
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
    tpu_slice: TpuSlice | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress that a job has reported: `step` of `of` (0 if unknown) at `at_s`, monotonic.

    `rates` are steps per second by (kind, devices), a mean in which newer reports weigh more. `ran_s` are the
    device-seconds of all ended attempts, `ran_on` the same by kind. `starts_s` is the time of the newest attempt from
    placement to its first report, 0 if unknown. `stops_s` is the time of the newest stop from the request to save to
    the end, plus the progress lost since the checkpoint; 0 if none was stopped. While no attempt is live, `step` is
    where the next one resumes.
    """

    step: int = 0
    of: int = 0
    at_s: float = 0.0
    rates: Mapping[tuple[str, int], float] = field(default_factory=dict)
    ran_s: float = 0.0
    starts_s: float = 0.0
    ran_on: Mapping[str, float] = field(default_factory=dict)
    stops_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Since:
    """Monotonic times of a job: `added_s` when this server first saw it, `state_s` since when it waits or is placed.

    Changes of the wall clock do not affect them; time before this server started does not count.
    """

    added_s: float
    state_s: float


@dataclass(frozen=True, slots=True)
class Running:
    """Live attempt: the devices it holds, and facts about the cost of stopping it.

    `priority` is that of its job plus the ageing when it was placed; `order` is the job's position in the order of
    submission. `spec` is its job, `candidate` the position of the candidate that it runs, `former_candidate` that
    candidate if a migration has replaced the job's since. `saves`: it has a checkpoint, so it loses little when it is
    stopped.
    """

    job: str
    priority: int
    order: int
    allocation: tuple[tuple[str, tuple[int, ...]], ...]
    preemptible: bool = True
    stopping: bool = False
    spec: Job | None = None
    candidate: int = 0
    former_candidate: Candidate | None = None
    saves: bool = False

    @property
    def want(self) -> Candidate | None:
        """Return the candidate that it runs, None if its job is unknown."""
        return self.former_candidate or (self.spec.candidates[self.candidate] if self.spec else None)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Input of a plan.

    `now_s` and `paused_until_s` (by job) are monotonic and affect decisions; `wall_s` is only used in messages, for the
    age of measurements. `startable` are devices of nodes that an autoscaler may start, `notes` sentences about them by
    job, as in Plan.why_not. `progress` has the jobs that have run or reported, `since` all jobs. `policy` is one of
    POLICIES in plan/policies/priced_policies.py. `memory` was returned by the previous plan; `ageing_s` and
    `explore_device_s` are as in policy.Policy.
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
    memory: PlanMemory = field(default_factory=PlanMemory)
    ageing_s: float = 0.0
    projects: Mapping[str, Project] = field(default_factory=dict)
    explore_device_s: float = EXPLORE_DEVICE_S

    @property
    def possible(self) -> tuple[Devices, ...]:
        """Existing devices and those that an autoscaler may start."""
        return (*self.devices, *self.startable)


@dataclass(frozen=True, slots=True)
class Start:
    """Start `job` as candidate number `candidate` on these devices: (devices id, numbers) per node, by rank.

    `aged`: priority that the job has gained by waiting.
    """

    job: str
    candidate: int
    allocation: tuple[tuple[str, tuple[int, ...]], ...]
    reason: str = ""
    aged: int = 0


@dataclass(frozen=True, slots=True)
class Preempt:
    """Let `victim` save and stop so that `job` can start. If they are one job, it moves to a better place."""

    victim: str
    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Output of a plan: what to do now.

    `why_not`: job -> (candidate number, devices id or "" for all) -> reason for the refusal. `memory` is input of the
    next plan. `value` and `bound` are in units of the policy: no other decision can be worth more than `bound`; both
    are 0 if the policy uses only the order of jobs.
    """

    start: tuple[Start, ...] = ()
    preempt: tuple[Preempt, ...] = ()
    why_not: dict[str, dict[tuple[int, str], str]] = field(default_factory=dict)
    memory: PlanMemory = field(default_factory=PlanMemory)
    value: float = 0.0
    bound: float = 0.0

    @property
    def gap(self) -> float:
        """Fraction of the bound (0 to 1) that any other decision could gain at most."""
        return max(0.0, 1.0 - self.value / self.bound) if self.bound else 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """Entry of the event log; `event` is in the past tense. `epoch`: that of its attempt; `seq`: 0 until stored."""

    job: str
    event: str
    epoch: int
    time_s: float
    data: dict[str, Any] = field(default_factory=dict)
    seq: int = 0
