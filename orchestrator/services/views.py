"""Jobs and nodes as JSON for the API: what `polyfleet show`, `jobs` and `inventory` print."""

from collections.abc import Iterable
from typing import Any, Literal, cast

from cluster.serialization import to_plain
from cluster.types import Finding
from orchestrator.core.controller import nodes
from orchestrator.core.controller.attempts import node_of
from orchestrator.core.controller.draft import Control
from orchestrator.core.controller.nodes import Allocations, Node
from orchestrator.core.jobs.fold import Attempt, Record
from orchestrator.core.jobs.progress import devices_of as devices_of_attempt
from orchestrator.core.jobs.remaining_time import Evidence, remaining
from orchestrator.core.model import Job
from orchestrator.core.states import TERMINAL, State
from orchestrator.core.step.placement import devices_of
from orchestrator.core.timing import NODE_SILENT_S
from orchestrator.units import iso
from orchestrator.views.fleet import FindingView, NodeView, PoolView
from orchestrator.views.jobs import JobView, ProgressView, ReportView
from orchestrator.views.values import AllocationView
from workers.protocol.messages import ScriptCheckpoint

STORED_ALLOCATIONS = ("allocation", "leases")
"""Keys of pairs (devices id, numbers) in plans, and in stored events."""
NOTE_VISIBLE_S = 180.0
"""Seconds for which the note appears: a refused job is retried, and the use noticed again, within about a minute."""


def progress_view(record: Record, estimate_inputs: Evidence) -> ProgressView | None:
    if record.job.state in TERMINAL or not record.attempts:
        return None
    last, progress = record.attempts[-1], estimate_inputs.progress
    devices = devices_of_attempt(last)
    estimate = remaining(record.job, last.kind, devices, estimate_inputs)
    rate = progress.rates.get((last.kind, devices)) if record.live_attempt else None
    return {
        "step": progress.step,
        "of": progress.of or record.job.work.steps or None,
        "steps_per_s": rate,
        "left_s": estimate.seconds,
        "left_from": estimate.source,
        "left": estimate.sentence,
    }


def job_view(
    record: Record,
    metrics: dict[str, Any],
    why_waiting: str = "",
    progress: ProgressView | None = None,
    known_until_s: float | None = None,
) -> JobView:
    """The view of a job.

    `known_until_s`: last contact (seconds since the epoch), if its nodes do not respond now.
    """
    job, last = record.job, record.attempts[-1] if record.attempts else None
    view: dict[str, Any] = {
        "id": job.id,
        "name": job.name,
        "task": job.task,
        "state": str(job.state),
        "reason": why_waiting or record.reason,
        "priority": job.priority,
        "kind": last.kind if last else "",
        "pool": last.pool if last else "",
        "nodes": [node_of(devices_id) for devices_id, _ in last.allocation] if last else [],
        "attempt": job.epoch,
        "candidate": last.candidate + 1 if last else None,
        "submitted_at": iso(job.submitted_s),
        "started_at": iso(record.started_s),
        "ended_at": iso(record.ended_s),
        "known_until": iso(known_until_s),
        "restarts": job.restarts,
        "interruptions": job.interruptions,
        "resumed_step": record.resumed_step,
        "resumed_from": record.source,
        "continues": resume_clause(record),
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
    return cast(JobView, view)


def placement_view(data: Any) -> Any:
    """A copy of JSON data about placements: candidates are counted from 1, and allocations are objects."""
    if isinstance(data, list | tuple):
        return [placement_view(item) for item in data]
    if not isinstance(data, dict):
        return data
    view = {k: placement_view(v) for k, v in data.items() if k not in STORED_ALLOCATIONS}
    if isinstance(candidate := data.get("candidate"), int):
        view["candidate"] = candidate + 1
    if stored := next((key for key in STORED_ALLOCATIONS if key in data), None):
        view["allocations"] = allocation_views(data[stored])
    return view


def allocation_views(allocation: Iterable[tuple[str, Iterable[int]]]) -> list[AllocationView]:
    return [{"devices": devices_id, "numbers": list(numbers)} for devices_id, numbers in allocation]


def resume_clause(record: Record) -> str:
    """Clause on what the job's next attempt would resume from; "" if it has not started or has ended."""
    job, point = record.job, record.checkpoint
    if job.state in TERMINAL or not record.attempts:
        return ""
    if point:
        newer = ", or from a newer one if it saves before it stops" if record.live_attempt else ""
        return f"continues from {point['pool']}:{point['path']} (step {point['step']}){newer}"
    if script := ScriptCheckpoint.of(job.task, job.candidates[0].arguments):
        return f"continues from {script.path} in its files, if its script has saved there"
    if job.resume_from:
        return f"starts again from {job.resume_from}: it has not saved a checkpoint of its own yet"
    if job.task == "run":
        return f"starts from the beginning, with its files: it has no checkpoint; {SET_CHECKPOINT}"
    return "starts from the beginning, unless it saves a checkpoint before it stops: it has none yet"


def acknowledged(job: Job, note: str) -> dict[str, Any]:
    """The stored part of the response to a submission, from which `accepted_view` restores the response."""
    return {
        "id": job.id,
        "name": job.name,
        "task": job.task,
        "priority": job.priority,
        "submitted_at": iso(job.submitted_s),
        "reason": note or "submitted",
    }


def accepted_view(stored: dict[str, Any]) -> JobView:
    """The view of a job at its acceptance. `stored`: the result of `acknowledged`."""
    return cast(JobView, {**_ACCEPTED, **stored})


def attempt_view(attempt: Attempt) -> dict[str, Any]:
    return {
        "attempt": attempt.epoch,
        "candidate": attempt.candidate + 1,
        "kind": attempt.kind,
        "pool": attempt.pool,
        "allocations": allocation_views(attempt.allocation),
        "placed_at": iso(attempt.placed_s),
        "started_at": iso(attempt.started_s),
        "ended_at": iso(attempt.ended_s),
        "outcome": attempt.outcome,
        "reason": attempt.reason,
        "peak_memory_bytes": attempt.peak_memory_bytes or None,
    }


def metrics_view(row: dict[str, Any]) -> ReportView:
    """The view of the metrics of one step. `row` is how the job store has them."""
    metrics = {k: v for k, v in row["metrics"].items() if k not in ("step", "of")}
    total = row["metrics"].get("of")
    return {
        "seq": row["seq"],
        "attempt": row["attempt"],
        "step": row["step"],
        "of": total if type(total) is int else None,
        "reported_at": iso(row["time"]),
        "metrics": metrics,
    }


def node_view(node: Node, control: Control, now_s: float, allocations: Allocations) -> NodeView:
    """The view of a node."""
    state, reason = _node_state(node, control, now_s)
    age_s = now_s - node.foreign_use_s
    note = f"another program of this Ray cluster used devices of this node {age_s:.0f} s ago"
    view: dict[str, Any] = _NO_FACTS | {
        "node": node.name,
        "state": state,
        "reason": reason,
        "closed": nodes.closed_reason(node, control.drained, now_s),
        "note": note if age_s < NOTE_VISIBLE_S else "",
        "pool": node.pool,
    }
    if node.facts is None:
        return cast(NodeView, view)
    view |= to_plain(node.facts) | {"node": node.name}
    view["use"] = [{"backend": use.backend, "index": use.index} | use.metrics for use in node.facts.use]
    for device in view["devices"]:
        device["allocated_to"] = allocations.get(f"{node.name}/{device['kind']}", {}).get(device["index"])
    return cast(NodeView, view)


def absent_node_view(name: str, state: Literal["removed", "unknown"]) -> NodeView:
    """The view of a node that is not in the fleet."""
    return cast(NodeView, {**_NO_FACTS, "node": name, "state": state})


def finding_view(node: str, finding: Finding) -> FindingView:
    """The view of a finding. `node` is empty for one about the fleet."""
    return cast(FindingView, {"node": node, **to_plain(finding)})


def _node_state(node: Node, control: Control, now_s: float) -> tuple[str, str]:
    """State of a node and the reason, "" for a state that needs none."""
    if reason := node.lost_reason or node.unsupported_reason or node.agent_error:
        return "lost", reason
    if node.resting:
        return "resting", ""
    if node.facts is None or node.list_requested_s is None:
        return "starting", ""
    if node.name in control.drained:
        return "drained", control.drained[node.name]
    if node.quarantined_until_s > now_s:
        return "quarantined", node.failures[-1][1] if node.failures else ""
    silent_s = node.silent_s(now_s)
    return ("silent", f"no reply for {silent_s:.0f} s") if silent_s > NODE_SILENT_S else ("ready", "")


def pool_view(pool: str, spec: dict[str, Any], control: Control, now_s: float, allocations: Allocations) -> PoolView:
    """The view of a pool, one line of `polyfleet status`.

    `spec`: its PoolSpec as JSON data, {} if not declared.
    """
    nodes_of_pool = [node for node in control.nodes.values() if node.facts and node.facts.pool == pool]
    devices = [
        d for node in nodes_of_pool if not node.lost_reason for d in devices_of(node, control, now_s, allocations)
    ]
    facts = nodes_of_pool[0].facts if nodes_of_pool else None
    return {
        "pool": pool,
        "backend": spec.get("backend") or (facts.backend if facts else ""),
        "environment": facts.environment if facts else "",
        "kinds": sorted({d.kind for d in devices}),
        "nodes": sum(not node.lost_reason for node in nodes_of_pool),
        "nodes_declared": len(spec.get("hosts") or ())
        or spec.get("max_nodes")
        or spec.get("nodes", len(nodes_of_pool)),
        "devices": sum(d.total for d in devices if d.schedulable),
        "free": sum(len(d.free) for d in devices if d.schedulable),
        "price_per_hour": spec.get("price_per_hour", 0.0),
    }


SET_CHECKPOINT = "set `checkpoint: {path: …}` in the job file to the checkpoint that its script saves"
_NO_FACTS: dict[str, Any] = {
    **dict.fromkeys(("node", "state", "reason", "closed", "note", "pool"), ""),
    "devices": [],
    **dict.fromkeys(("ray_node_id", "host", "address", "backend", "environment"), ""),
    "protocol": None,
    "versions": {},
    **dict.fromkeys(("cpu_count", "memory_total_bytes", "memory_free_bytes", "load_1min", "disk_free_bytes"), None),
    "agent_pid": None,
    **dict.fromkeys(("agent_created", "storage", "storage_id", "object_store"), ""),
    "neighbours": [],
    "pending_uploads": 0,
    "findings": [],
    "notice": None,
    "use": [],
    "data": [],
}
"""A node whose agent has not started yet."""
_ACCEPTED = job_view(Record(Job("", "", "", ())), {})
FIELDS = tuple(_ACCEPTED)
