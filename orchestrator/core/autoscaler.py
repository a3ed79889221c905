"""A cluster's autoscaler: which nodes it is asked for, when a pool's nodes count as not to be had, and which idle nodes
rest so that they may be given back. Pure; which nodes jobs would use is demand.py's.

Ray's autoscaler removes nodes that Ray counts as idle. One with an agent never is: so an agent is ended once nothing
has used its node for a while and more nodes have one than are needed. Such a node rests. It is woken, by a new agent,
before another one is asked for.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.core import membership
from orchestrator.core.commands import AskNodes
from orchestrator.core.demand import Awaited, Demand, NodeGroup, Scaling, Unavailable, demand, nodes_of, requests
from orchestrator.core.draft import Draft
from orchestrator.core.fit import EVER, refusal
from orchestrator.core.messages import NodesAsked, Tick
from orchestrator.core.model import Job, Plan, Snapshot
from orchestrator.core.nodes import Node, useless
from orchestrator.core.placement_options import noted

REPEAT_S = 30.0
"""An autoscaler's head that was started again has forgotten what it was asked for, and does not say so."""

AGAIN_S = 5.0
"""After it could not be asked."""

UNAVAILABLE_S = 600.0
"""So long nodes that did not come are not asked for again: what a cloud has run out of, it has not again at once."""

Notes = dict[str, dict[tuple[int, str], str]]


def told(draft: Draft, tick: Tick) -> None:
    """Which pools may grow."""
    was = draft.control.scaling
    if tick.groups != was.groups:
        startable = tuple(have for group in tick.groups for have in nodes_of(group, group.most))
        _change(draft, groups=tick.groups, startable=startable, awaited={}, unavailable={}, notes={})


def forgotten(draft: Draft) -> None:
    """We are in the cluster again: what its autoscaler knows is not known, and it had no time to start anything."""
    _change(draft, asked=None, asking=None, asking_s=float("-inf"), awaited={})


def slept(draft: Draft, gap_s: float) -> None:
    """Time that was not lived through is no time that nodes took to come."""
    now = _now(draft)
    awaited = {pool: replace(a, since_s=a.since_s + gap_s) for pool, a in now.awaited.items()}
    _change(draft, awaited=awaited, idle_s={})


def asked(draft: Draft, told: NodesAsked) -> None:
    now = _now(draft)
    heard = now.asking if not told.error else None
    if told.error:
        draft.warn(f"Ray's autoscaler could not be asked for nodes: {told.error}; it is asked again")
    _change(draft, asked=heard, asking=None, failed=now.failed if told.error else told.failed)


def look(draft: Draft, seen: Snapshot, decided: Plan, tick: Tick) -> Plan:
    """After a plan: ask for what it lacks, wake and rest nodes. The plan, which says also what jobs wait for there."""
    now, now_s = _now(draft), draft.now.s
    if not (now.groups or now.asked or now.asking):
        return decided  # nobody is asked for anything
    # What waits for a lost node waits for that one, and for no other in its place.
    seen = replace(seen, devices=tuple(have for have in seen.devices if not draft.nodes[have.node].lost))
    unavailable = {pool: known for pool, known in now.unavailable.items() if known.until_s > now_s}
    closed = _useless(draft)
    found = _demand(seen, decided, now.groups, unavailable, closed)
    awaited = _awaited(draft, found, closed)
    if overdue := _overdue(now.groups, awaited, now_s):
        unavailable |= overdue
        for pool, known in overdue.items():
            draft.warn(f"pool {pool}: {known.why}")
        found = _demand(seen, decided, now.groups, unavailable, closed)
        awaited = {pool: since for pool, since in awaited.items() if pool not in overdue}
    notes = _notes(seen.jobs, found, replace(now, awaited=awaited, unavailable=unavailable), now_s)
    idle_s = _idle_s(draft, tick)
    _change(draft, demand=found, awaited=awaited, unavailable=unavailable, notes=notes, idle_s=idle_s)
    for group in now.groups:
        _wake_and_rest(draft, group, found, _named(seen.jobs))
    _ask(draft, tuple(requests(found, now.groups)))
    return replace(decided, why_not=noted(decided.why_not, notes))


def _demand(
    seen: Snapshot,
    decided: Plan,
    groups: tuple[NodeGroup, ...],
    unavailable: Mapping[str, Unavailable],
    closed: Mapping[str, set[str]],
) -> Demand:
    until_s = {pool: known.until_s for pool, known in unavailable.items()}
    return demand(seen, decided, groups, until_s, closed)


def _ask(draft: Draft, wanted: tuple[Any, ...]) -> None:
    """One question at a time: of two under way the older might be heard last."""
    now, since_s = _now(draft), draft.now.s - _now(draft).asking_s
    news = now.asking is None and wanted != now.asked and since_s > (AGAIN_S if now.asked is None else 0.0)
    if news or (since_s > REPEAT_S and (now.groups or now.asked != wanted)):
        _change(draft, asking=wanted, asking_s=draft.now.s)
        draft.command(AskNodes(wanted))


def _useless(draft: Draft) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for node in _here(draft):
        if useless(node, draft.drained.now, draft.now.s):
            found.setdefault(node.pool, set()).add(node.name)
    return found


def _here(draft: Draft, pool: str = "") -> list[Node]:
    return [node for node in draft.nodes.values() if not node.lost and pool in ("", node.pool)]


def _awaited(draft: Draft, found: Demand, closed: Mapping[str, set[str]]) -> dict[str, Awaited]:
    """Pools of which fewer nodes are ready than are needed. Each that comes shows that more may come."""
    was, awaited = _now(draft).awaited, {}
    for pool, count in found.nodes.items():
        told = {node.name for node in _here(draft, pool) if node.ready and node.listed_s is not None}
        ready = len(told | closed.get(pool, set()))
        if ready < count:
            before = was.get(pool)
            awaited[pool] = before if before and ready <= before.ready else Awaited(draft.now.s, ready)
    return awaited


def _overdue(groups: Iterable[NodeGroup], awaited: Mapping[str, Awaited], now_s: float) -> dict[str, Unavailable]:
    late = {}
    for group in groups:
        since = awaited.get(group.pool)
        if since and now_s - since.since_s > group.start_timeout_s:
            why = f"no node came within {_duration(group.start_timeout_s)}"
            late[group.pool] = Unavailable(now_s + UNAVAILABLE_S, why)
    return late


def _notes(jobs: Iterable[Job], found: Demand, now: Scaling, now_s: float) -> Notes:
    pools = [(group, nodes_of(group, 1)[0]) for group in now.groups]
    notes: Notes = {}
    for job in jobs:
        if job.id not in found.jobs and job.id not in found.why_not:
            continue
        known: dict[tuple[int, str], str] = {}
        for group, have in pools:
            index = next((i for i, want in enumerate(job.candidates) if not refusal(want, have, EVER)), None)
            if index is not None and (text := _note(group, job.id, found, now, now_s)):
                known[index, ""] = "; ".join(filter(None, (known.get((index, "")), text)))
        notes[job.id] = known or {(0, ""): found.why_not.get(job.id, "")}
    return notes


def _note(group: NodeGroup, job: str, found: Demand, now: Scaling, now_s: float) -> str:
    pool = group.pool
    if found.jobs.get(job) == pool:
        since_s = now_s - now.awaited[pool].since_s if pool in now.awaited else 0.0
        failed = f"; {now.failed[pool]}" if pool in now.failed else ""
        return f"a node of kind {group.kind} is being started in pool {pool} ({_duration(since_s)} so far){failed}"
    if gone := now.unavailable.get(pool):
        why = f"{gone.why} ({now.failed[pool]})" if pool in now.failed else gone.why
        return f"pool {pool} is unavailable: {why}; it is asked again in {_duration(gone.until_s - now_s)}"
    full = job in found.why_not and found.nodes[pool] >= group.most
    return f"pool {pool} has all {group.most} nodes that it may have" if full else ""


def _named(jobs: Iterable[Job]) -> set[str]:
    return {want.node for job in jobs for want in job.candidates if want.node}


def _idle_s(draft: Draft, tick: Tick) -> dict[str, float]:
    """Since when nothing has used each node of a pool that grows, and nobody has asked its agent for anything. What has
    ended there is forgotten once its logs are kept (runtime/kept_logs.py), which the node is needed for.
    """
    now, pools = _now(draft), {group.pool for group in _now(draft).groups}
    found = {}
    for node in _here(draft):
        there = node.strangers.values()
        running = draft.on_node(node.name) or any(s.known or s.phase != "ended" for s in there)
        if node.pool in pools and not running and (node.listed_s is not None or node.broken):
            since_s = now.idle_s.get(node.name, draft.now.s)
            found[node.name] = max(since_s, tick.called.get(node.name, since_s))
    return found


def _wake_and_rest(draft: Draft, group: NodeGroup, found: Demand, named: set[str]) -> None:
    """Agents on as many nodes as are needed, or as the autoscaler keeps in any case."""
    here, idle_s = _here(draft, group.pool), _now(draft).idle_s
    resting = sorted((n.name for n in here if n.resting and not n.notice), key=lambda name: (name not in named, name))
    spare = len(here) - len(resting) - max(group.least, found.nodes.get(group.pool, 0))
    for number, name in enumerate(resting):
        if number < -spare or name in named:
            membership.wake(draft, name)
    idle = sorted((idle_s[n.name], n.name) for n in here if n.name in idle_s and not n.resting and n.name not in named)
    for since_s, name in idle[: max(0, spare)]:
        if draft.now.s - since_s >= group.keep_idle_s:
            membership.rest(draft, name)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    told = ((hours, "h"), (minutes, "m"), (rest, "s"))
    return " ".join(f"{count} {unit}" for count, unit in told if count) or "0 s"


def _now(draft: Draft) -> Scaling:
    """As this step has it so far."""
    now: Scaling = draft.changes.get("scaling", draft.control.scaling)
    return now


def _change(draft: Draft, **fields: Any) -> None:
    draft.change(scaling=replace(_now(draft), **fields))
