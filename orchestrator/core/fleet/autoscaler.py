"""Use a cluster's autoscaler: request nodes, mark pools as unavailable, and let idle nodes be removed. Pure.

demand.py computes which nodes jobs need. Ray's autoscaler removes nodes that Ray counts as idle. A node with an agent
is never idle, so an agent is ended once nothing has used its node for a while and more nodes have agents than are
needed. Such a node is resting. It is woken, by a new agent, before another node is requested.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.core.controller.commands import RequestNodes
from orchestrator.core.controller.draft import Draft
from orchestrator.core.controller.messages import NodeRequestAnswered, Tick
from orchestrator.core.controller.nodes import Node, is_unusable
from orchestrator.core.controller.scaling import Demand, NodeGroup, PendingNodes, Scaling, Unavailable
from orchestrator.core.fleet import membership
from orchestrator.core.fleet.demand import demand, example_nodes, requests
from orchestrator.core.model import Job, Plan, Snapshot
from orchestrator.core.plan.options.fit import PERMANENT_RULES, refusal_reason
from orchestrator.core.plan.options.placement_options import with_notes

REPEAT_S = 30.0
"""Seconds after which a request is repeated, because a restarted head has lost it without notice."""

RETRY_S = 5.0
"""Seconds before a failed request is repeated."""

UNAVAILABLE_S = 600.0
"""Seconds that nodes which did not start are not requested again: a cloud stays out of capacity for a while."""

Notes = dict[str, dict[tuple[int, str], str]]


def update_groups(draft: Draft, tick: Tick) -> None:
    """Update the pools that may grow."""
    previous = draft.control.scaling
    if tick.groups != previous.groups:
        startable = tuple(have for group in tick.groups for have in example_nodes(group, group.max_nodes))
        _change(draft, groups=tick.groups, startable=startable, pending={}, unavailable={}, notes={})


def reset_after_join(draft: Draft) -> None:
    """Reset the state after joining a cluster, whose autoscaler may have lost our request."""
    _change(draft, confirmed_request=None, pending_request=None, requested_s=float("-inf"), pending={})


def exclude_gap(draft: Draft, gap_s: float) -> None:
    """Exclude a gap in which this process was stopped from the time that nodes had to start."""
    scaling = _scaling(draft)
    awaited = {pool: replace(a, since_s=a.since_s + gap_s) for pool, a in scaling.pending.items()}
    _change(draft, pending=awaited, idle_since_s={})


def request_answered(draft: Draft, message: NodeRequestAnswered) -> None:
    scaling = _scaling(draft)
    confirmed = scaling.pending_request if not message.error else None
    if message.error:
        draft.warn(f"the request for nodes to Ray's autoscaler failed: {message.error}; the server repeats it")
    _change(
        draft,
        confirmed_request=confirmed,
        pending_request=None,
        failed=scaling.failed if message.error else message.failed,
    )


def review(draft: Draft, snapshot: Snapshot, next_plan: Plan, tick: Tick) -> Plan:
    """Request the nodes that a plan lacks, wake and rest nodes. Return the plan with notes for waiting jobs."""
    scaling, now_s = _scaling(draft), draft.now.s
    if not (scaling.groups or scaling.confirmed_request or scaling.pending_request):
        return next_plan  # there is no autoscaler
    # A job that waits for a lost node waits for that node itself, not for a replacement.
    snapshot = replace(
        snapshot, devices=tuple(have for have in snapshot.devices if not draft.nodes[have.node].lost_reason)
    )
    unavailable = {pool: entry for pool, entry in scaling.unavailable.items() if entry.until_s > now_s}
    closed = _closed_nodes(draft)
    demanded = _demand(snapshot, next_plan, scaling.groups, unavailable, closed)
    awaited = _pending_pools(draft, demanded, closed)
    if overdue := _overdue(scaling.groups, awaited, now_s):
        unavailable |= overdue
        for pool, entry in overdue.items():
            draft.warn(f"pool {pool}: {entry.why}")
        demanded = _demand(snapshot, next_plan, scaling.groups, unavailable, closed)
        awaited = {pool: since for pool, since in awaited.items() if pool not in overdue}
    notes = _notes(snapshot.jobs, demanded, replace(scaling, pending=awaited, unavailable=unavailable), now_s)
    idle_s = _idle_since_s(draft, tick)
    _change(draft, demand=demanded, pending=awaited, unavailable=unavailable, notes=notes, idle_since_s=idle_s)
    for group in scaling.groups:
        _wake_and_rest(draft, group, demanded, _requested_nodes(snapshot.jobs))
    _request_nodes(draft, tuple(requests(demanded, scaling.groups)))
    return replace(next_plan, why_not=with_notes(next_plan.why_not, notes))


def _demand(
    snapshot: Snapshot,
    next_plan: Plan,
    groups: tuple[NodeGroup, ...],
    unavailable: Mapping[str, Unavailable],
    closed: Mapping[str, set[str]],
) -> Demand:
    until_s = {pool: entry.until_s for pool, entry in unavailable.items()}
    return demand(snapshot, next_plan, groups, until_s, closed)


def _request_nodes(draft: Draft, node_requests: tuple[Any, ...]) -> None:
    """Send the request for nodes, unless one has no reply yet: of two, the older could arrive last."""
    scaling, since_s = _scaling(draft), draft.now.s - _scaling(draft).requested_s
    is_new = (
        scaling.pending_request is None
        and node_requests != scaling.confirmed_request
        and since_s > (RETRY_S if scaling.confirmed_request is None else 0.0)
    )
    if is_new or (since_s > REPEAT_S and (scaling.groups or scaling.confirmed_request != node_requests)):
        _change(draft, pending_request=node_requests, requested_s=draft.now.s)
        draft.command(RequestNodes(node_requests))


def _closed_nodes(draft: Draft) -> dict[str, set[str]]:
    by_pool: dict[str, set[str]] = {}
    for node in _present_nodes(draft):
        if is_unusable(node, draft.drained.current, draft.now.s):
            by_pool.setdefault(node.pool, set()).add(node.name)
    return by_pool


def _present_nodes(draft: Draft, pool: str = "") -> list[Node]:
    return [node for node in draft.nodes.values() if not node.lost_reason and pool in ("", node.pool)]


def _pending_pools(draft: Draft, demanded: Demand, closed: Mapping[str, set[str]]) -> dict[str, PendingNodes]:
    """Return pools with fewer ready nodes than needed. The wait starts again with each node that becomes ready."""
    previous, awaited = _scaling(draft).pending, {}
    for pool, count in demanded.nodes.items():
        ready_names = {
            node.name for node in _present_nodes(draft, pool) if node.ready and node.list_requested_s is not None
        }
        ready = len(ready_names | closed.get(pool, set()))
        if ready < count:
            before = previous.get(pool)
            awaited[pool] = before if before and ready <= before.ready else PendingNodes(draft.now.s, ready)
    return awaited


def _overdue(groups: Iterable[NodeGroup], awaited: Mapping[str, PendingNodes], now_s: float) -> dict[str, Unavailable]:
    overdue = {}
    for group in groups:
        since = awaited.get(group.pool)
        if since and now_s - since.since_s > group.start_timeout_s:
            why = f"no node came within {_duration(group.start_timeout_s)}"
            overdue[group.pool] = Unavailable(now_s + UNAVAILABLE_S, why)
    return overdue


def _notes(jobs: Iterable[Job], demanded: Demand, scaling: Scaling, now_s: float) -> Notes:
    pools = [(group, example_nodes(group, 1)[0]) for group in scaling.groups]
    notes: Notes = {}
    for job in jobs:
        if job.id not in demanded.jobs and job.id not in demanded.why_not:
            continue
        texts: dict[tuple[int, str], str] = {}
        for group, have in pools:
            index = next(
                (i for i, want in enumerate(job.candidates) if not refusal_reason(want, have, PERMANENT_RULES)), None
            )
            if index is not None and (text := _note(group, job.id, demanded, scaling, now_s)):
                texts[index, ""] = "; ".join(filter(None, (texts.get((index, "")), text)))
        notes[job.id] = texts or {(0, ""): demanded.why_not.get(job.id, "")}
    return notes


def _note(group: NodeGroup, job: str, demanded: Demand, scaling: Scaling, now_s: float) -> str:
    pool = group.pool
    if demanded.jobs.get(job) == pool:
        since_s = now_s - scaling.pending[pool].since_s if pool in scaling.pending else 0.0
        failed = f"; {scaling.failed[pool]}" if pool in scaling.failed else ""
        return f"a node of kind {group.kind} is being started in pool {pool} ({_duration(since_s)} so far){failed}"
    if unavailable := scaling.unavailable.get(pool):
        why = f"{unavailable.why} ({scaling.failed[pool]})" if pool in scaling.failed else unavailable.why
        return f"pool {pool} is unavailable: {why}; the next try is in {_duration(unavailable.until_s - now_s)}"
    full = job in demanded.why_not and demanded.nodes[pool] >= group.max_nodes
    return f"pool {pool} has its maximum of {group.max_nodes} nodes" if full else ""


def _requested_nodes(jobs: Iterable[Job]) -> set[str]:
    return {want.node for job in jobs for want in job.candidates if want.node}


def _idle_since_s(draft: Draft, tick: Tick) -> dict[str, float]:
    """Return since when each node of a growing pool is unused by attempts and requests to its agent.

    A node with ended attempts that it has not removed is in use: their logs are copied first
    (runtime/jobs/log_copies.py). So is one with checkpoints that are not in the pool's object store yet.
    """
    scaling, pools = _scaling(draft), {group.pool for group in _scaling(draft).groups}
    idle = {}
    for node in _present_nodes(draft):
        untracked = node.untracked.values()
        running = draft.on_node(node.name) or any(s.is_in_log or s.phase != "ended" for s in untracked)
        uploading = node.facts is not None and node.facts.pending_uploads > 0
        if (
            node.pool in pools
            and not running
            and not uploading
            and (node.list_requested_s is not None or node.agent_error)
        ):
            since_s = scaling.idle_since_s.get(node.name, draft.now.s)
            idle[node.name] = max(since_s, tick.agent_called_s.get(node.name, since_s))
    return idle


def _wake_and_rest(draft: Draft, group: NodeGroup, demanded: Demand, named: set[str]) -> None:
    """Keep agents on as many nodes as are needed, at least the group's minimum, which the autoscaler keeps anyway."""
    present, idle_s = _present_nodes(draft, group.pool), _scaling(draft).idle_since_s
    resting = sorted(
        (n.name for n in present if n.resting and not n.notice), key=lambda name: (name not in named, name)
    )
    excess = len(present) - len(resting) - max(group.min_nodes, demanded.nodes.get(group.pool, 0))
    for number, name in enumerate(resting):
        if number < -excess or name in named:
            membership.wake(draft, name)
    idle = sorted(
        (idle_s[n.name], n.name) for n in present if n.name in idle_s and not n.resting and n.name not in named
    )
    for since_s, name in idle[: max(0, excess)]:
        if draft.now.s - since_s >= group.keep_idle_s:
            membership.end_agent(draft, name)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "m"), (rest, "s"))
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"


def _scaling(draft: Draft) -> Scaling:
    """Return the autoscaler's state as changed by this step so far."""
    now: Scaling = draft.changes.get("scaling", draft.control.scaling)
    return now


def _change(draft: Draft, **fields: Any) -> None:
    draft.change(scaling=replace(_scaling(draft), **fields))
