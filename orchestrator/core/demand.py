"""Which nodes an autoscaler should have: those in use, and those that waiting jobs would use if they were there. Pure.

Ray's autoscaler is told a whole cluster's demand, which replaces what it was told before: nodes that run something are
part of it, idle ones are not and may be given back. So the plan is made twice: of what is there, and, for the jobs that
it leaves waiting, of all nodes that may yet be started. Both by the same rules: kinds, memory, gangs, ranges, vendors.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from orchestrator.core.model import Devices, Job, Plan, Snapshot
from orchestrator.core.plan import plan

Request = dict[str, dict[str, object]]

NEW = "+"
"""Names of nodes that do not exist yet begin so: no job can ask for one by name."""


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes that an autoscaler starts and gives back, all alike: `least` to `most`, `hosts` at a time (a slice).

    `resources` are those of one node, as Ray counts; the other fields are as in `Devices`. Nodes that have not come
    within `start_timeout_s` are not waited for; an idle one keeps its agent for `keep_idle_s` (see core/autoscaler.py).
    """

    pool: str
    environment: str
    backend: str
    kind: str
    devices: int
    resources: Mapping[str, float]
    most: int
    hosts: int = 1
    memory_bytes: int = 0
    price_per_hour: float = 0.0
    emulated: bool = False
    least: int = 0
    start_timeout_s: float = 600.0
    keep_idle_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Demand:
    """`nodes` by pool, for all groups; `jobs` are those that new nodes are for, with pool; `why_not` of the others."""

    nodes: dict[str, int] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)
    why_not: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Awaited:
    """Nodes of a pool that have not come: since when (monotonic), and how many were ready then."""

    since_s: float
    ready: int


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Nodes of a pool that could not be had: until when they are not asked for again (monotonic), and why."""

    until_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Scaling:
    """Where this cluster's autoscaler stands, as core/autoscaler.py decides; it may start nodes of `groups`,
    `startable` are all of them. `demand` is the newest. `asked` is what the autoscaler has heard, None where that is
    not known; `asking` what it was told at `asking_s` without an answer yet. `failed` is what it tells itself of
    launches that failed, `awaited` and `unavailable` what we see, by pool. `idle_s`: since when nothing uses a node.
    `notes` are for `explain`: job -> (candidate number, "") -> sentence. Monotonic seconds.
    """

    groups: tuple[NodeGroup, ...] = ()
    startable: tuple[Devices, ...] = ()
    demand: Demand = field(default_factory=Demand)
    asked: tuple[Request, ...] | None = None
    asking: tuple[Request, ...] | None = None
    asking_s: float = float("-inf")
    failed: Mapping[str, str] = field(default_factory=dict)
    awaited: Mapping[str, Awaited] = field(default_factory=dict)
    unavailable: Mapping[str, Unavailable] = field(default_factory=dict)
    idle_s: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Mapping[tuple[int, str], str]] = field(default_factory=dict)


def demand(
    snapshot: Snapshot,
    decided: Plan,
    groups: tuple[NodeGroup, ...],
    unavailable: Mapping[str, float] | None = None,
    closed: Mapping[str, Set[str]] | None = None,
) -> Demand:
    """What to ask for. `decided` is the plan of this snapshot; `unavailable` says until when (monotonic) a pool's nodes
    are not asked for, since they could not be had: its jobs' other candidates are then tried. `closed` are nodes by
    pool that are there and take no work: where new ones are needed, those do not count.
    """
    blocked = {pool for pool, until_s in (unavailable or {}).items() if until_s > snapshot.now_s}
    used = in_use(snapshot, decided)
    useless = {pool: len(names - used.get(pool, set())) for pool, names in (closed or {}).items()}
    there = {group.pool: len(used.get(group.pool, ())) + useless.get(group.pool, 0) for group in groups}
    paused = {job for job, until_s in snapshot.paused_until_s.items() if until_s > snapshot.now_s}
    left = tuple(job for job in snapshot.jobs if job.id in decided.why_not and job.id not in paused)
    open_groups = tuple(group for group in groups if group.pool not in blocked)
    new = tuple(have for group in open_groups for have in _startable(group, there[group.pool], left))
    then = plan(replace(snapshot, devices=new, jobs=left, running=()))
    wanted: dict[str, set[str]] = {}
    pools = {have.id: have.pool for have in new}
    jobs = {}
    for start in then.start:
        jobs[start.job] = pools[start.leases[0][0]]
        wanted.setdefault(jobs[start.job], set()).update(devices_id for devices_id, _ in start.leases)
    nodes = {}
    for group in groups:
        more, held = len(wanted.get(group.pool, ())), len(used.get(group.pool, ()))
        nodes[group.pool] = _whole(there[group.pool] + more if more else held, group)
    return Demand(nodes, jobs, {job: _why(groups, blocked) for job in then.why_not})


def in_use(snapshot: Snapshot, decided: Plan) -> dict[str, set[str]]:
    """By pool, nodes that hold something, or are about to."""
    starting = {devices_id for start in decided.start for devices_id, _ in start.leases}
    found: dict[str, set[str]] = {}
    for have in snapshot.devices:
        if len(have.free) < have.total or have.id in starting:
            found.setdefault(have.pool, set()).add(have.node)
    return found


def requests(demand: Demand, groups: tuple[NodeGroup, ...]) -> list[Request]:
    """The demand as `request_cluster_resources` of Ray's autoscaler takes it: one bundle, a whole node, for each."""
    return [
        {"resources": dict(group.resources), "label_selector": {"polyfleet.io/pool": group.pool}}
        for group in groups
        for _ in range(demand.nodes.get(group.pool, 0))
    ]


def _startable(group: NodeGroup, used: int, jobs: tuple[Job, ...]) -> list[Devices]:
    """Nodes of the group that are not in use: idle ones, and those that do not exist; no more than jobs could fill."""
    could = sum(max(want.nodes for want in job.candidates) for job in jobs)
    return nodes_of(group, min(group.most - used, could))


def nodes_of(group: NodeGroup, count: int) -> list[Devices]:
    """So many nodes as the group starts them."""
    return [
        Devices(
            id=f"{NEW}{group.pool}-{number:05}/{group.kind}",
            node=f"{NEW}{group.pool}-{number:05}",
            pool=group.pool,
            environment=group.environment,
            backend=group.backend,
            kind=group.kind,
            free=tuple(range(group.devices)),
            total=group.devices,
            memory_bytes=group.memory_bytes,
            emulated=group.emulated,
            price_per_hour=group.price_per_hour,
        )
        for number in range(max(0, count))
    ]


def _whole(nodes: int, group: NodeGroup) -> int:
    """In whole slices, and never more than there may be."""
    return min(-(-nodes // group.hosts) * group.hosts, group.most)


def _why(groups: tuple[NodeGroup, ...], blocked: set[str]) -> str:
    if not groups:
        return "no pool of this fleet can grow"
    waits = f"; {', '.join(sorted(blocked))} could not be had lately" if blocked else ""
    return f"no node that may be started would run it: {', '.join(g.pool for g in groups)} can grow{waits}"
