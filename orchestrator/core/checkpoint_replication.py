"""Which checkpoint is copied to another machine, to which one, and when: so that a machine that never comes back costs
the steps since the last copy. Pure.

One copy of a job is on its way at a time, of its newest checkpoint then; copying takes at most half of the time. The
last checkpoint of a job that has ended is copied too, within an hour.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from cluster.types import NodeFacts
from orchestrator.core import nodes
from orchestrator.core.commands import Replicate
from orchestrator.core.draft import Copying, Draft
from orchestrator.core.fold import Record
from orchestrator.core.messages import Replicated
from orchestrator.core.nodes import Node
from orchestrator.core.timing import NODE_SILENT_S

MOST = 4
"""Copies under way at once, of all jobs."""

SPARE_BYTES = 1 << 30
"""What a copy leaves free on a disk."""

AGAIN_S = 10.0
LONGEST_S = 300.0
"""Between tries that failed: from the first to the second, doubled each time."""

ENDED_S = 3600.0
MOST_ENDED = 1000
"""For so long, and of so many jobs, the last checkpoint is still copied after the job has ended."""


def look(draft: Draft) -> None:
    """Once per tick: the job that has waited longest comes first."""
    _give_up(draft)
    under_way = sum(bool(copying.target) for copying in draft.copies.values())
    records = [*(draft.records[job] for job in draft.lives), *(ended.record for ended in draft.uncopied.values())]
    waiting = sorted((_of(draft, r.job.id).due_s, r.job.id) for r in records if _is_due(draft, r))
    for _, job in waiting[: max(MOST - under_way, 0)]:
        if record := draft.known(job):
            _begin(draft, record)


def _give_up(draft: Draft) -> None:
    """The oldest first. A copy on its way is waited for."""
    ended = sorted((ended.since_s, job) for job, ended in draft.uncopied.items())
    for number, (since_s, job) in enumerate(ended):
        late = draft.now.s - since_s > ENDED_S or number < len(ended) - MOST_ENDED
        if late and not _of(draft, job).target:
            record = draft.uncopied[job].record
            point: Any = record.checkpoint
            away = f"step {point['step']} was on node {point['node']}, which could not be reached"
            _tell(draft, record, f"no copy was made after the job ended: {record.unreplicated or away}")
            draft.forget_copies(job)


def replicated(draft: Draft, told: Replicated) -> None:
    copying, record = draft.copies.get(told.job), draft.known(told.job)
    if copying is None or record is None or (copying.target, copying.step) != (told.node, told.step):
        return
    now_s = draft.now.s
    if told.error:
        pause_s = min(AGAIN_S * 2**copying.failures, LONGEST_S)
        failed = Copying(due_s=now_s + pause_s, failures=copying.failures + 1, failed=told.node)
        draft.copies[told.job] = failed
        _tell(draft, record, f"step {told.step} could not be copied to {told.node}: {told.error}")
        return
    draft.copies[told.job] = Copying(due_s=now_s + (now_s - copying.since_s))
    facts = draft.nodes[told.node].facts if told.node in draft.nodes else None
    pool = facts.pool if facts else ""
    draft.event(told.job, "replicated", record.job.epoch, pool=pool, path=told.path, step=told.step, node=told.node)


def _of(draft: Draft, job: str) -> Copying:
    return draft.copies.get(job) or Copying()


def _is_due(draft: Draft, record: Record) -> bool:
    copying = _of(draft, record.job.id)
    return record.lacks_copies and not copying.target and draft.now.s >= copying.due_s


def _begin(draft: Draft, record: Record) -> None:
    point, copying = record.checkpoint or {}, _of(draft, record.job.id)
    source = draft.nodes.get(point["node"])
    if source is None or not source.ready or source.silent_s(draft.now.s) > NODE_SILENT_S:
        return  # nobody can read it now; its job goes on elsewhere, or its node comes back
    open_ = [n for n in draft.nodes.values() if not nodes.closed(n, draft.drained.now, draft.now.s)]
    target, why = choose(record, source, draft.nodes.values(), open_, copying.failed)
    if why:
        draft.copies[record.job.id] = replace(copying, due_s=draft.now.s + AGAIN_S)
        _tell(draft, record, why)
        return
    draft.copies[record.job.id] = replace(copying, target=target, step=point["step"], since_s=draft.now.s)
    what = record.job.id, point["step"], source.name, point["pool"], point["path"]
    draft.command(Replicate(*what, target, record.job.keep_checkpoints))


def choose(
    record: Record, source: Node, all_: Iterable[Node], open_: Iterable[Node], failed: str = ""
) -> tuple[str, str]:
    """(the node that takes a copy of the job's newest checkpoint, which `source` has; ""), or ("", why there is none).

    Only another machine helps. Nodes of the same pool come first, then those that have copies already, then those with
    most room; one where the last try `failed` comes last.
    """
    point, own = record.checkpoint or {}, source.facts
    if own is None or not own.storage_id:
        return "", f"node {source.name} cannot tell which storage its checkpoints lie in"
    far = [n for n in all_ if n.facts and _is_elsewhere(n.facts, own)]
    if shared := sorted(n.name for n in far if n.facts and n.facts.storage_id == own.storage_id):
        return "", f"no copy is made: {', '.join(shared)} and {source.name} share the storage that it lies in"
    had = {replica["node"]: replica["step"] for replica in record.replicas}
    taken = {n.facts.storage_id for n in far if n.facts and had.get(n.name) == point["step"]}
    able = {n.name: n.facts for n in open_ if n.facts and _is_elsewhere(n.facts, own)}
    able = {name: facts for name, facts in able.items() if facts.storage_id and facts.storage_id not in taken}
    if not able:
        return "", "no other machine with a storage of its own is up to take a copy"
    needed_bytes = int(point.get("bytes", 0)) + SPARE_BYTES
    fits = {name: facts for name, facts in able.items() if facts.disk_free_bytes >= needed_bytes}
    if not fits:
        return "", _too_full(able, needed_bytes)
    return min(
        fits, key=lambda n: (n == failed, fits[n].pool != own.pool, n not in had, -fits[n].disk_free_bytes, n)
    ), ""


def _is_elsewhere(one: NodeFacts, other: NodeFacts) -> bool:
    return (one.host, one.address) != (other.host, other.address)


def _too_full(able: Mapping[str, NodeFacts], needed_bytes: int) -> str:
    most = max(able, key=lambda name: (able[name].disk_free_bytes, name))
    free_gib, needed_gib = able[most].disk_free_bytes / 2**30, needed_bytes / 2**30
    return f"no other machine has room for a copy: it needs {needed_gib:.1f} GiB, node {most} has {free_gib:.0f} free"


def _tell(draft: Draft, record: Record, why: str) -> None:
    """Once, until there is something else to tell."""
    if record.unreplicated != why:
        step: Any = record.checkpoint and record.checkpoint["step"]
        draft.event(record.job.id, "unreplicated", record.job.epoch, step=step, reason=why)
        draft.warn(f"checkpoint of {record.job.id}: {why}")
