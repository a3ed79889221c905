"""What the controller is told: by users, by agents, by those who carry out its commands, by the clock.

Any message may come twice, late, or after another that was sent later: no order is relied on. Submitted alone comes
once, since a job that has ended is not kept here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.types import NodeFacts
from orchestrator.core.demand import NodeGroup
from orchestrator.core.fold import Record
from orchestrator.core.policy import Policy, Project
from orchestrator.core.throughput import History, Throughput
from workers.messages import AttemptStatus


@dataclass(frozen=True, slots=True)
class Now:
    """`s`, monotonic, decides. `wall_s`, of the epoch, is written into events for people."""

    s: float
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Submitted:
    """Jobs that the store holds now."""

    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """A job that has ended stays as it is."""

    job: str
    reason: str = "cancelled by the user"


@dataclass(frozen=True, slots=True)
class MigrateAsked:
    """Move `job` to devices of `kinds` (patterns), of `pool` or any for "". Refused while none is free there."""

    job: str
    kinds: tuple[str, ...] = ()
    pool: str = ""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Let `node` take no new work; `now`: its attempts save and move as well."""

    node: str
    reason: str = ""
    now: bool = False


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """Let `node` take work again, also one that is quarantined."""

    node: str


@dataclass(frozen=True, slots=True)
class RemoveAsked:
    """Forget `node`, which is lost and will not come back."""

    node: str


@dataclass(frozen=True, slots=True)
class Joined:
    """We are in the fleet's cluster."""


@dataclass(frozen=True, slots=True)
class Parted:
    """We are in no cluster: what runs goes on by its fence. `over`: that cluster will not come back."""

    over: bool = False


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """A living node as Ray lists it. `draining_s`: seconds left of a notice that Ray was given, or None. `cpus`: how
    many Ray gives out there, 0 where it is not told. `pool`: as its label says, "" without one.
    """

    ray_id: str
    name: str
    draining_s: float | None = None
    cpus: float = 0.0
    pool: str = ""


@dataclass(frozen=True, slots=True)
class NodesSeen:
    nodes: tuple[NodeSeen, ...]


@dataclass(frozen=True, slots=True)
class AgentMade:
    """`error` is "" or why there is none."""

    node: str
    ray_id: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class AgentDied:
    """Its process ended: Ray starts it again, unless it is `gone` for good. `why`: it never began, for this reason."""

    node: str
    ray_id: str
    gone: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class AgentFailed:
    """It answers with an error that is none of its attempts': it may be of another version."""

    node: str
    ray_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """An answer of an agent. `asked_s` (monotonic) is when it was asked: what it tells was true at that time or later.

    `facts` are None where they have not changed; `attempts` (keys of all it knows) where it was not asked for them.
    `epochs`: the highest of each job that the node has seen. `known`: those of the jobs it tells of that the store has.
    """

    node: str
    ray_id: str
    asked_s: float
    facts: NodeFacts | None = None
    reports: tuple[AttemptStatus, ...] = ()
    attempts: frozenset[str] | None = None
    epochs: Mapping[str, int] = field(default_factory=dict)
    known: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Spoiled:
    """What an agent told of one part of an attempt cannot be used."""

    job: str
    epoch: int
    node_rank: int
    why: str
    cursor: int | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Launched:
    """Every part was started. `step`: of the checkpoint it goes on from, or None, `source` its POOL:PATH. `missed` says
    which newer one could not be reached, `missed_files` which files of the job, `script` what became of a checkpoint of
    its script's own.
    """

    job: str
    epoch: int
    step: int | None = None
    missed: str = ""
    script: str = ""
    missed_files: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """`kind` is `user` (the job ends) or `launch`. Ranks may have been started on `nodes`; on no other. `failed` are
    those that gave no answer, or not the one they should.
    `seen`: the newest epoch that the fence or a node knows, where ours may have run already; else 0.
    `short`: nodes of which Ray does not report as free what was asked for; `unheld`: those of them where nobody whom
    Ray knows holds it.
    """

    job: str
    epoch: int
    kind: str
    message: str
    nodes: tuple[str, ...] = ()
    seen: int = 0
    failed: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    unheld: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stopped:
    """A node was asked to stop an attempt; `error` is "" when it has heard. It runs until it reports its end. `asked_s`
    is of the command that it answers.
    """

    node: str
    job: str
    epoch: int
    how: str
    error: str = ""
    asked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fenced:
    """The fence of `job` was to stand at `epoch` at least, and stands at `stands`; or `error` says why not.

    `asked_s` is of the command that it answers.
    """

    job: str
    epoch: int
    stands: int = 0
    error: str = ""
    asked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Released:
    """The reservation of a place went back, or `error` says why not. `asked_s` is of the command that it answers."""

    place: str
    error: str = ""
    asked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reserved:
    """The places that are reserved in Ray in our name now."""

    places: frozenset[str]


@dataclass(frozen=True, slots=True)
class Replicated:
    """A verified copy of the checkpoint of that step lies in the storage of `node`, at `path`; or `error`
    says why not.
    """

    job: str
    step: int
    node: str
    path: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class NotRestarted:
    """A node that was to be started again stays as it is: nothing is withheld there now, or it was too often."""

    node: str
    ray_id: str


@dataclass(frozen=True, slots=True)
class NodesAsked:
    """The autoscaler was told what nodes are needed, or `error` says why not. `failed`: pool -> why its newest launch
    failed, as the autoscaler tells.
    """

    error: str = ""
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. `trouble` is "" or why nothing can be placed now; `prices` of a device per hour, by pool.
    `recorded` are the nodes of the fleet's record, `expected` those of them that live as far as is known there: one
    that has not told yet is not absent. `repairs`: this server starts them again when they end. `groups` are what this
    cluster's autoscaler may start, `called`: when an agent was last asked for something beside jobs, by node.
    `history` is what jobs of each workload took, `policy` and `projects` are the fleet file's.
    """

    throughput: Throughput = field(default_factory=Throughput)
    trouble: str = ""
    prices: Mapping[str, float] = field(default_factory=dict)
    expected: frozenset[str] = frozenset()
    recorded: frozenset[str] = frozenset()
    repairs: bool = False
    groups: tuple[NodeGroup, ...] = ()
    called: Mapping[str, float] = field(default_factory=dict)
    history: History = field(default_factory=History)
    policy: Policy = field(default_factory=Policy)
    projects: Mapping[str, Project] = field(default_factory=dict)


Message = (
    Submitted
    | CancelAsked
    | MigrateAsked
    | DrainAsked
    | ResumeAsked
    | RemoveAsked
    | Joined
    | Parted
    | NodesSeen
    | AgentMade
    | AgentDied
    | AgentFailed
    | Heartbeat
    | Spoiled
    | Launched
    | LaunchFailed
    | Stopped
    | Fenced
    | Released
    | Reserved
    | Replicated
    | NotRestarted
    | NodesAsked
    | Tick
)
