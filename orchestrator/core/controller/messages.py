"""Messages to the controller: from users, agents, the executor of its commands, and the clock.

A message may arrive twice, late or out of order, so the core relies on no order. Only Submitted arrives exactly once,
since the controller does not keep ended jobs and would not recognise a repetition. `replies_to`: number of the command
that a message replies to, 0 if unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.types import NodeFacts
from orchestrator.core.controller.scaling import NodeGroup
from orchestrator.core.jobs.fold import Record
from orchestrator.core.model import Policy, Project
from orchestrator.core.throughput import History, Throughput
from workers.protocol.messages import AttemptStatus


@dataclass(frozen=True, slots=True)
class Now:
    """Present time. Decisions use `s` (monotonic); `wall_s` (seconds since 1970) is written into events for people."""

    s: float
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Submitted:
    """New jobs that the store has committed."""

    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Request to cancel a job. It has no effect on a job that has ended."""

    job: str
    reason: str = "cancelled by the user"


@dataclass(frozen=True, slots=True)
class MigrateRequested:
    """Request to move `job` to devices of `kinds` (patterns) in `pool` ("": any). Rejected while none is free there."""

    job: str
    kinds: tuple[str, ...] = ()
    pool: str = ""


@dataclass(frozen=True, slots=True)
class RenameRequested:
    """Request to give an open job another name. Rejected once it has ended."""

    job: str
    name: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Request that `node` takes no new jobs. `now`: its attempts also save and move."""

    node: str
    reason: str = ""
    now: bool = False


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """Request that `node` takes jobs again, also if it is quarantined."""

    node: str


@dataclass(frozen=True, slots=True)
class RemoveRequested:
    """Request to remove `node`, which is lost and will not return."""

    node: str


@dataclass(frozen=True, slots=True)
class ClusterJoined:
    """The controller has joined the fleet's Ray cluster."""


@dataclass(frozen=True, slots=True)
class ClusterLeft:
    """The controller has left its cluster. Attempts keep running under their fences. `has_ended`: the cluster has
    ended.
    """

    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class ListedNode:
    """Live node as listed by Ray.

    `draining_s`: seconds left of a termination notice that Ray received, or None. `cpus`: number of CPUs that Ray
    allocates there, 0 if unknown. `pool`: value of its label, "" without one.
    """

    ray_id: str
    name: str
    draining_s: float | None = None
    cpus: float = 0.0
    pool: str = ""


@dataclass(frozen=True, slots=True)
class NodesListed:
    nodes: tuple[ListedNode, ...]


@dataclass(frozen=True, slots=True)
class AgentStarted:
    """Reply to StartAgent. `error` is "" or the reason why there is no agent."""

    node: str
    ray_id: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class AgentDied:
    """An agent's process ended. Ray restarts it unless the end `is_permanent`. `why`: the reason if it could not even
    start.
    """

    node: str
    ray_id: str
    is_permanent: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class AgentFailed:
    """An agent replies with an error that is not about its attempts; it may have another version."""

    node: str
    ray_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Reply of an agent to a poll sent at `requested_s` (monotonic): its contents were true at that time or later.

    `facts` is None if unchanged. `attempts` contains the keys of all attempts on the node, None if not requested.
    `epochs`: the highest epoch of each job that the node has accepted. `stored_jobs`: those of the listed jobs that are
    in the store.
    """

    node: str
    ray_id: str
    requested_s: float
    facts: NodeFacts | None = None
    reports: tuple[AttemptStatus, ...] = ()
    attempts: frozenset[str] | None = None
    epochs: Mapping[str, int] = field(default_factory=dict)
    stored_jobs: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PartUnreadable:
    """The messages of an agent about one part of an attempt cannot be read."""

    job: str
    epoch: int
    node_rank: int
    why: str
    cursor: int | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Launched:
    """Every part was started.

    `step` is that of the checkpoint from which it resumes, or None, `source` its POOL:PATH. `missed` names a newer
    checkpoint that could not be reached, `missed_files` files of the job that could not be reached. `script` describes
    what was done with a checkpoint of the job's own script.
    """

    job: str
    epoch: int
    step: int | None = None
    missed: str = ""
    script: str = ""
    missed_files: str = ""
    source: str = ""
    replies_to: int = 0


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """A launch failed. `kind` is `user` (the job ends) or `launch`.

    Ranks may have been started on `maybe_started` only. `unanswered` are the nodes without a reply or with a wrong one.
    `newest_epoch`: the newest epoch stored in the fence or on a node, if this epoch may have run already; else 0.
    `lacking`: nodes where the requested resources are not free according to Ray; `stuck`: those of them where no user
    of Ray holds these resources.
    """

    job: str
    epoch: int
    kind: str
    message: str
    maybe_started: tuple[str, ...] = ()
    newest_epoch: int = 0
    unanswered: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    replies_to: int = 0


@dataclass(frozen=True, slots=True)
class StopAnswered:
    """Reply to a Stop sent at `requested_s`. `error` is "" if the node received it; the attempt has not ended by
    that.
    """

    node: str
    job: str
    epoch: int
    how: str
    error: str = ""
    requested_s: float = 0.0
    replies_to: int = 0


@dataclass(frozen=True, slots=True)
class FenceAnswered:
    """Reply to a Fence sent at `requested_s` for `epoch` or above: the fence is at `current_epoch`, or `error` says why
    not.
    """

    job: str
    epoch: int
    current_epoch: int = 0
    error: str = ""
    requested_s: float = 0.0
    replies_to: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseAnswered:
    """Reply to a Release sent at `requested_s`: the reservation was removed, or `error` says why not."""

    reservation_name: str
    error: str = ""
    requested_s: float = 0.0
    replies_to: int = 0


@dataclass(frozen=True, slots=True)
class ReservationsListed:
    """Names of the reservations that we hold in Ray now."""

    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Replicated:
    """Reply to Replicate: a verified copy is in the storage of `node` at `path`, or `error` says why not."""

    job: str
    step: int
    node: str
    path: str = ""
    error: str = ""
    replies_to: int = 0


@dataclass(frozen=True, slots=True)
class NodeNotRestarted:
    """Reply to RestartNode if the node is not restarted: no reservation is stuck now, or it was restarted too often."""

    node: str
    ray_id: str


@dataclass(frozen=True, slots=True)
class NodeRequestAnswered:
    """Reply to RequestNodes: the autoscaler has received the request, or `error` says why not.

    `failed`: pool -> reason for the failure of its newest launch, as reported by the autoscaler.
    """

    error: str = ""
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent at regular intervals with facts that the core needs.

    `problem` is "" or the reason why nothing can be placed now. `prices` are per device and hour, by pool. `recorded`
    are the nodes of the fleet's record, `expected` those of them that are alive according to it, even if they have not
    reported yet. `restarts_nodes`: this server restarts these nodes when they end. `groups` are the nodes that this
    cluster's autoscaler may start. `agent_called_s`: time of the last request to an agent other than for jobs, by node.
    `history` has the durations of ended jobs by workload; `policy` and `projects` are from the fleet file.
    """

    throughput: Throughput = field(default_factory=Throughput)
    problem: str = ""
    prices: Mapping[str, float] = field(default_factory=dict)
    expected: frozenset[str] = frozenset()
    recorded: frozenset[str] = frozenset()
    restarts_nodes: bool = False
    groups: tuple[NodeGroup, ...] = ()
    agent_called_s: Mapping[str, float] = field(default_factory=dict)
    history: History = field(default_factory=History)
    policy: Policy = field(default_factory=Policy)
    projects: Mapping[str, Project] = field(default_factory=dict)


Message = (
    Submitted
    | CancelRequested
    | MigrateRequested
    | RenameRequested
    | DrainRequested
    | ResumeRequested
    | RemoveRequested
    | ClusterJoined
    | ClusterLeft
    | NodesListed
    | AgentStarted
    | AgentDied
    | AgentFailed
    | Heartbeat
    | PartUnreadable
    | Launched
    | LaunchFailed
    | StopAnswered
    | FenceAnswered
    | ReleaseAnswered
    | ReservationsListed
    | Replicated
    | NodeNotRestarted
    | NodeRequestAnswered
    | Tick
)
