"""Compute the nodes that an autoscaler should provide: those in use, and those that waiting jobs need. Pure.

Each request to Ray's autoscaler contains the demand of the entire cluster and replaces the previous one. Nodes that run
something are part of it; idle ones are not and may be removed. So two plans are made with the same rules (kinds,
memory, gangs, ranges, vendors): one for the existing nodes, and one for the jobs still waiting, with all nodes that may
be started.
"""

from collections.abc import Mapping, Set
from dataclasses import replace

from orchestrator.core.controller.scaling import NEW_NODE_PREFIX, Demand, NodeGroup, Request
from orchestrator.core.model import Devices, Job, Plan, Snapshot, TpuSlice
from orchestrator.core.plan.plan import plan


def demand(
    snapshot: Snapshot,
    next_plan: Plan,
    groups: tuple[NodeGroup, ...],
    unavailable: Mapping[str, float] | None = None,
    closed: Mapping[str, Set[str]] | None = None,
) -> Demand:
    """Return the nodes to request. `next_plan` is the plan of this snapshot.

    `unavailable`: until when (monotonic) a pool's nodes are not requested, because they could not be started; the other
    candidates of its jobs are then tried. `closed`: existing nodes by pool that take no jobs; they do not reduce the
    number of new ones.
    """
    blocked = {pool for pool, until_s in (unavailable or {}).items() if until_s > snapshot.now_s}
    used = in_use(snapshot, next_plan)
    closed_counts = {pool: len(names - used.get(pool, set())) for pool, names in (closed or {}).items()}
    existing = {group.pool: len(used.get(group.pool, ())) + closed_counts.get(group.pool, 0) for group in groups}
    paused = {job for job, until_s in snapshot.paused_until_s.items() if until_s > snapshot.now_s}
    left = tuple(job for job in snapshot.jobs if job.id in next_plan.why_not and job.id not in paused)
    open_groups = tuple(group for group in groups if group.pool not in blocked)
    new = tuple(have for group in open_groups for have in _startable(group, existing[group.pool], left))
    growth = plan(replace(snapshot, devices=new, jobs=left, running=()))
    needed: dict[str, set[str]] = {}
    pools = {have.id: have.pool for have in new}
    jobs = {}
    for start in growth.start:
        jobs[start.job] = pools[start.allocation[0][0]]
        needed.setdefault(jobs[start.job], set()).update(devices_id for devices_id, _ in start.allocation)
    nodes = {}
    for group in groups:
        more, in_use_count = len(needed.get(group.pool, ())), len(used.get(group.pool, ()))
        nodes[group.pool] = _round_to_slices(existing[group.pool] + more if more else in_use_count, group)
    return Demand(nodes, jobs, {job: _reason(groups, blocked) for job in growth.why_not})


def in_use(snapshot: Snapshot, next_plan: Plan) -> dict[str, set[str]]:
    """Return, by pool, the nodes that have allocated devices or will have them after this plan."""
    starting = {devices_id for start in next_plan.start for devices_id, _ in start.allocation}
    by_pool: dict[str, set[str]] = {}
    for have in snapshot.devices:
        if len(have.free) < have.total or have.id in starting:
            by_pool.setdefault(have.pool, set()).add(have.node)
    return by_pool


def requests(demand: Demand, groups: tuple[NodeGroup, ...]) -> list[Request]:
    """Return the demand in the form of `request_cluster_resources` of Ray's autoscaler: one Ray bundle per node."""
    return [
        {"resources": dict(group.resources), "label_selector": {"polyfleet.io/pool": group.pool}}
        for group in groups
        for _ in range(demand.nodes.get(group.pool, 0))
    ]


def _startable(group: NodeGroup, used: int, jobs: tuple[Job, ...]) -> list[Devices]:
    """Return unused nodes of the group, idle or not started yet; at most as many as the jobs could fill."""
    could = sum(max(want.nodes for want in job.candidates) for job in jobs)
    return example_nodes(group, min(group.max_nodes - used, could))


def example_nodes(group: NodeGroup, count: int) -> list[Devices]:
    """Return `count` nodes like those that the group starts."""
    return [
        Devices(
            id=f"{NEW_NODE_PREFIX}{group.pool}-{number:05}/{group.kind}",
            node=f"{NEW_NODE_PREFIX}{group.pool}-{number:05}",
            pool=group.pool,
            environment=group.environment,
            backend=group.backend,
            kind=group.kind,
            free=tuple(range(group.devices)),
            total=group.devices,
            memory_bytes=group.memory_bytes,
            emulated=group.emulated,
            price_per_hour=group.price_per_hour,
            tpu_slice=_new_slice(group, number),
        )
        for number in range(max(0, count))
    ]


def _new_slice(group: NodeGroup, number: int) -> TpuSlice | None:
    position, worker = divmod(number, group.hosts)
    return TpuSlice(f"{NEW_NODE_PREFIX}{group.pool}-{position:05}", group.hosts, worker) if group.hosts > 1 else None


def _round_to_slices(nodes: int, group: NodeGroup) -> int:
    """Round the number of nodes up to complete slices, at most the group's maximum."""
    return min(-(-nodes // group.hosts) * group.hosts, group.max_nodes)


def _reason(groups: tuple[NodeGroup, ...], blocked: set[str]) -> str:
    if not groups:
        return "no pool of this fleet can grow"
    recent = f"; nodes of {', '.join(sorted(blocked))} could not be started recently" if blocked else ""
    return f"no node that an autoscaler may start can run the job: {', '.join(g.pool for g in groups)} can grow{recent}"
