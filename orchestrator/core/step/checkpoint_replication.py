"""Copy checkpoints to other machines, so that a lost machine costs only the steps since the last copy. Pure.

Each job has at most one copy running, of its newest checkpoint; copying takes at most half of the time. The last
checkpoint of an ended job is copied, too, within an hour.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from cluster.types import NodeFacts
from orchestrator.core.controller import nodes
from orchestrator.core.controller.commands import Replicate
from orchestrator.core.controller.draft import CopyState, Draft
from orchestrator.core.controller.messages import Replicated
from orchestrator.core.controller.nodes import Node
from orchestrator.core.jobs.fold import Record
from orchestrator.core.timing import NODE_SILENT_S

MAX_CONCURRENT_COPIES = 4
"""Maximum number of copies that run at the same time, for all jobs."""

MIN_FREE_BYTES = 1 << 30
"""Bytes that a copy leaves free on a disk."""

RETRY_S = 10.0
MAX_BACKOFF_S = 300.0
"""First and longest pause between failed tries in seconds; it doubles each time."""

AFTER_END_S = 3600.0
MAX_ENDED_JOBS = 1000
"""How long, and for how many jobs, the last checkpoint is still copied after the job has ended."""


def start_copies(draft: Draft) -> None:
    """Start copies that are due, the longest waiting job first. Called once per tick."""
    _drop_expired(draft)
    running = sum(bool(copying.target) for copying in draft.copies.values())
    records = [*(draft.records[job] for job in draft.attempts), *(ended.record for ended in draft.uncopied.values())]
    waiting = sorted((_copy_state(draft, r.job.id).due_s, r.job.id) for r in records if _is_due(draft, r))
    for _, job in waiting[: max(MAX_CONCURRENT_COPIES - running, 0)]:
        if record := draft.find_record(job):
            _start_copy(draft, record)


def _drop_expired(draft: Draft) -> None:
    """Stop copying for jobs that ended long ago, or are too many, oldest first. Running copies are waited for."""
    ended = sorted((uncopied.since_s, job) for job, uncopied in draft.uncopied.items())
    for number, (since_s, job) in enumerate(ended):
        expired = draft.now.s - since_s > AFTER_END_S or number < len(ended) - MAX_ENDED_JOBS
        if expired and not _copy_state(draft, job).target:
            record = draft.uncopied[job].record
            point: Any = record.checkpoint
            unreachable = f"step {point['step']} was on node {point['node']}, which could not be reached"
            _record_reason(draft, record, f"no copy was made after the job ended: {record.unreplicated or unreachable}")
            draft.drop_copies(job)


def replicated(draft: Draft, message: Replicated) -> None:
    copying, record = draft.copies.get(message.job), draft.find_record(message.job)
    if copying is None or record is None or (copying.target, copying.step) != (message.node, message.step):
        return
    now_s = draft.now.s
    if message.error:
        pause_s = min(RETRY_S * 2**copying.failures, MAX_BACKOFF_S)
        failed = CopyState(due_s=now_s + pause_s, failures=copying.failures + 1, failed=message.node)
        draft.copies[message.job] = failed
        _record_reason(draft, record, f"step {message.step} could not be copied to {message.node}: {message.error}")
        return
    draft.copies[message.job] = CopyState(due_s=now_s + (now_s - copying.since_s))
    facts = draft.nodes[message.node].facts if message.node in draft.nodes else None
    pool = facts.pool if facts else ""
    draft.event(
        message.job, "replicated", record.job.epoch, pool=pool, path=message.path, step=message.step, node=message.node
    )


def _copy_state(draft: Draft, job: str) -> CopyState:
    return draft.copies.get(job) or CopyState()


def _is_due(draft: Draft, record: Record) -> bool:
    copying = _copy_state(draft, record.job.id)
    return record.needs_copies and not copying.target and draft.now.s >= copying.due_s


def _start_copy(draft: Draft, record: Record) -> None:
    point, copying = record.checkpoint or {}, _copy_state(draft, record.job.id)
    source = draft.nodes.get(point["node"])
    if source is None or not source.ready or source.silent_s(draft.now.s) > NODE_SILENT_S:
        return  # no node can read it now, until the job runs elsewhere or its node returns
    open_ = [n for n in draft.nodes.values() if not nodes.closed_reason(n, draft.drained.current, draft.now.s)]
    target, why = choose_node(record, source, draft.nodes.values(), open_, copying.failed)
    if why:
        draft.copies[record.job.id] = replace(copying, due_s=draft.now.s + RETRY_S)
        _record_reason(draft, record, why)
        return
    draft.copies[record.job.id] = replace(copying, target=target, step=point["step"], since_s=draft.now.s)
    what = record.job.id, point["step"], source.name, point["pool"], point["path"]
    draft.command(Replicate(*what, target, record.job.keep_checkpoints))


def choose_node(
    record: Record, source: Node, all_: Iterable[Node], open_: Iterable[Node], failed: str = ""
) -> tuple[str, str]:
    """Choose the node for a copy of the job's newest checkpoint, which `source` has.

    Returns (node, "") or ("", reason). The node must be on another machine. Nodes of the same pool come first, then
    those that have copies already, then those with most free disk space; the node where the last try `failed` is last.
    """
    point, own = record.checkpoint or {}, source.facts
    if own is None or not own.storage_id:
        return "", f"node {source.name} does not report the storage of its checkpoints"
    elsewhere = [n for n in all_ if n.facts and _is_elsewhere(n.facts, own)]
    if shared := sorted(n.name for n in elsewhere if n.facts and n.facts.storage_id == own.storage_id):
        return "", f"no copy is made: {', '.join(shared)} and {source.name} share the checkpoint's storage"
    copied_steps = {replica["node"]: replica["step"] for replica in record.replicas}
    used_storages = {n.facts.storage_id for n in elsewhere if n.facts and copied_steps.get(n.name) == point["step"]}
    candidates = {n.name: n.facts for n in open_ if n.facts and _is_elsewhere(n.facts, own)}
    candidates = {
        name: facts for name, facts in candidates.items() if facts.storage_id and facts.storage_id not in used_storages
    }
    if not candidates:
        return "", "no other machine with its own storage is available for a copy"
    needed_bytes = int(point.get("bytes", 0)) + MIN_FREE_BYTES
    fits = {name: facts for name, facts in candidates.items() if facts.disk_free_bytes >= needed_bytes}
    if not fits:
        return "", _too_full(candidates, needed_bytes)
    return min(
        fits, key=lambda n: (n == failed, fits[n].pool != own.pool, n not in copied_steps, -fits[n].disk_free_bytes, n)
    ), ""


def _is_elsewhere(one: NodeFacts, other: NodeFacts) -> bool:
    return (one.host, one.address) != (other.host, other.address)


def _too_full(candidates: Mapping[str, NodeFacts], needed_bytes: int) -> str:
    roomiest = max(candidates, key=lambda name: (candidates[name].disk_free_bytes, name))
    free_gib, needed_gib = candidates[roomiest].disk_free_bytes / 2**30, needed_bytes / 2**30
    return (
        f"no other machine has enough disk space for a copy: it needs {needed_gib:.1f} GiB, "
        f"node {roomiest} has {free_gib:.0f} GiB free"
    )


def _record_reason(draft: Draft, record: Record, why: str) -> None:
    """Record why there is no copy, unless that reason is recorded already."""
    if record.unreplicated != why:
        step: Any = record.checkpoint and record.checkpoint["step"]
        draft.event(record.job.id, "unreplicated", record.job.epoch, step=step, reason=why)
        draft.warn(f"checkpoint of {record.job.id}: {why}")
