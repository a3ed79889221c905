"""Jobs and nodes as JSON for the API: what `polyfleet show`, `jobs` and `inventory` print."""

from datetime import UTC, datetime
from typing import Any, TypedDict

from cluster.serialization import to_plain
from orchestrator.core import nodes
from orchestrator.core.attempts import node_of
from orchestrator.core.draft import Control
from orchestrator.core.fold import Attempt, Record
from orchestrator.core.model import Job
from orchestrator.core.nodes import Leased, Node
from orchestrator.core.placement import devices_of
from orchestrator.core.progress import devices_of as devices_of_attempt
from orchestrator.core.remaining_time import Known, Source, remaining
from orchestrator.core.states import TERMINAL, State
from orchestrator.core.timing import NODE_SILENT_S
from workers.messages import ScriptCheckpoint

TAKEN_SHOWN_S = 180.0
"""A job is tried again within a minute and some seconds, and then it is seen again."""


def iso(seconds: float | None) -> str | None:
    """UTC to the millisecond, or None for a time that has not come."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds") if seconds else None


class ProgressView(TypedDict):
    """Of an open job that was placed. `of` and `steps_per_s` are None where they are not known; how long is left is on
    the devices it runs on, or ran on last, `left_from` a word of core/remaining_time.py and `left` the same as a
    sentence.
    """

    step: int
    of: int | None
    steps_per_s: float | None
    left_s: float
    left_from: Source
    left: str


def progress_view(record: Record, known: Known) -> ProgressView | None:
    if record.job.state in TERMINAL or not record.attempts:
        return None
    last, told = record.attempts[-1], known.progress
    devices = devices_of_attempt(last)
    left = remaining(record.job, last.kind, devices, known)
    rate = told.rates.get((last.kind, devices)) if record.live else None
    return {
        "step": told.step,
        "of": told.of or record.job.work.steps or None,
        "steps_per_s": rate,
        "left_s": left.seconds,
        "left_from": left.source,
        "left": left.sentence,
    }


def job_view(
    record: Record,
    metrics: dict[str, Any],
    why_waiting: str = "",
    progress: ProgressView | None = None,
    known_until_s: float | None = None,
) -> dict[str, Any]:
    """`known_until_s`: of one that is not heard of now (seconds since the epoch)."""
    job, last = record.job, record.attempts[-1] if record.attempts else None
    return {
        "id": job.id,
        "name": job.name,
        "task": job.task,
        "state": str(job.state),
        "reason": why_waiting or record.reason,
        "priority": job.priority,
        "kind": last.kind if last else "",
        "pool": last.pool if last else "",
        "nodes": [node_of(devices_id) for devices_id, _ in last.leases] if last else [],
        "epoch": job.epoch,
        "candidate": last.candidate if last else None,
        "submitted_at": iso(job.submitted_s),
        "started_at": iso(record.started_s),
        "ended_at": iso(record.ended_s),
        "known_until": iso(known_until_s),
        "restarts": job.restarts,
        "interruptions": job.interruptions,
        "resumed_step": record.resumed_step,
        "resumed_from": record.source,
        "continues": continues(record),
        "missed_checkpoint": record.missed,
        "script_checkpoint": record.script,
        "missed_files": record.missed_files,
        "checkpoint": record.checkpoint,
        "replicas": list(record.replicas),
        "unreplicated": record.unreplicated,
        "progress": progress,
        "metrics": metrics,
        "result": record.result,
        "failure": record.failure if job.state in TERMINAL | {State.RECOVERING} else None,
        "attempts": [attempt_view(attempt) for attempt in record.attempts],
    }


def continues(record: Record) -> str:
    """From what its next attempt would go on, as far as that is known now; "" for one that never began or has
    ended.
    """
    job, point = record.job, record.checkpoint
    if job.state in TERMINAL or not record.attempts:
        return ""
    if point:
        newer = ", or from what it saves before it stops" if record.live else ""
        return f"continues from {point['pool']}:{point['path']} (step {point['step']}){newer}"
    if script := ScriptCheckpoint.of(job.task, job.candidates[0].arguments):
        return f"continues from {script.path} among its files, if its script has saved there"
    if job.resume_from:
        return f"starts again from {job.resume_from}: it has saved no checkpoint of its own yet"
    if job.task == "run":
        return f"starts anew, with its files: no checkpoint of it is known; {NAME_IT}"
    return "starts anew, unless it saves a checkpoint before it stops: none is known yet"


def acknowledged(job: Job, note: str) -> dict[str, Any]:
    """What is kept of a submission's answer: enough to give the same answer again."""
    return {
        "id": job.id,
        "name": job.name,
        "task": job.task,
        "priority": job.priority,
        "submitted_at": iso(job.submitted_s),
        "reason": note or "submitted",
    }


def accepted_view(kept: dict[str, Any]) -> dict[str, Any]:
    """The view of a job as it was when it was accepted; `kept` is what `acknowledged` gave."""
    return _ACCEPTED | kept


def attempt_view(attempt: Attempt) -> dict[str, Any]:
    return {
        "epoch": attempt.epoch,
        "candidate": attempt.candidate,
        "kind": attempt.kind,
        "pool": attempt.pool,
        "leases": [[devices_id, list(numbers)] for devices_id, numbers in attempt.leases],
        "placed_at": iso(attempt.placed_s),
        "started_at": iso(attempt.started_s),
        "ended_at": iso(attempt.ended_s),
        "outcome": attempt.outcome,
        "reason": attempt.reason,
        "peak_memory_bytes": attempt.peak_memory_bytes or None,
    }


def node_view(node: Node, control: Control, now_s: float, leased: Leased) -> dict[str, Any]:
    """`closed` says why it takes no new work, "" when it does. `note`: who beside us uses its devices, as far as that
    was seen lately.
    """
    closed, taken_s = nodes.closed(node, control.drained, now_s), now_s - node.taken_s
    used = f"another program of this Ray cluster used devices of this node {taken_s:.0f} s ago"
    view: dict[str, Any] = {"node": node.name, "state": _state(node, control, now_s), "closed": closed,
                            "note": used if taken_s < TAKEN_SHOWN_S else "", "devices": []}  # fmt: skip
    if node.facts is None:
        return view
    view = to_plain(node.facts) | {k: v for k, v in view.items() if k != "devices"}
    for device in view["devices"]:
        device["leased_by"] = leased.get(f"{node.name}/{device['kind']}", {}).get(device["index"])
    return view


def _state(node: Node, control: Control, now_s: float) -> str:
    """One word, and a reason where it is not ready."""
    if why := node.lost or node.refused or node.broken:
        return f"lost: {why}"
    if node.resting:
        return "resting"
    if node.facts is None or node.listed_s is None:
        return "starting"
    if node.name in control.drained:
        return "drained"
    if node.quarantined_until_s > now_s:
        return "quarantined"
    silent_s = node.silent_s(now_s)
    return f"silent for {silent_s:.0f} s" if silent_s > NODE_SILENT_S else "ready"


def pool_view(pool: str, spec: dict[str, Any], control: Control, now_s: float, leased: Leased) -> dict[str, Any]:
    """One line of `polyfleet status`: `spec` is the declared PoolSpec as plain data, {} for an attached cluster."""
    found = [node for node in control.nodes.values() if node.facts and node.facts.pool == pool]
    devices = [d for node in found if not node.lost for d in devices_of(node, control, now_s, leased)]
    facts = found[0].facts if found else None
    return {
        "pool": pool,
        "backend": spec.get("backend") or (facts.backend if facts else ""),
        "environment": facts.environment if facts else "",
        "kinds": sorted({d.kind for d in devices}),
        "nodes": sum(not node.lost for node in found),
        "nodes_declared": len(spec.get("hosts") or ()) or spec.get("max_nodes") or spec.get("nodes", len(found)),
        "devices": sum(d.total for d in devices if d.schedulable),
        "free": sum(len(d.free) for d in devices if d.schedulable),
        "price_per_hour": spec.get("price_per_hour", 0.0),
    }


NAME_IT = "`checkpoint: {path: …}` in a job's file names what its script saves"
_ACCEPTED = job_view(Record(Job("", "", "", ())), {})
FIELDS = tuple(_ACCEPTED)
