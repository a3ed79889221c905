"""Jobs and nodes as JSON for the API: what `polyfleet show`, `jobs` and `inventory` print."""

from datetime import UTC, datetime
from typing import Any

from cluster.plain import to_plain
from orchestrator.core.fold import Attempt, Record
from orchestrator.core.model import Job
from orchestrator.core.states import TERMINAL, State
from orchestrator.runtime.agents import Agent
from orchestrator.runtime.live import node_of


def iso(seconds: float | None) -> str | None:
    """UTC to the millisecond, or None for a time that has not come."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds") if seconds else None


def job_view(record: Record, metrics: dict[str, Any], why_waiting: str = "") -> dict[str, Any]:
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
        "restarts": job.restarts,
        "interruptions": job.interruptions,
        "resumed_step": record.resumed_step,
        "checkpoint": record.checkpoint,
        "metrics": metrics,
        "result": record.result,
        "failure": record.failure if job.state in TERMINAL | {State.RECOVERING} else None,
        "attempts": [attempt_view(attempt) for attempt in record.attempts],
    }


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


def node_view(name: str, agent: Agent, leased: dict[str, dict[int, str]]) -> dict[str, Any]:
    """`leased`: devices id -> device number -> job id."""
    state = f"lost: {agent.lost}" if agent.lost else "ready" if agent.facts else "starting"
    if agent.facts is None:
        return {"node": name, "state": state, "devices": []}
    view: dict[str, Any] = to_plain(agent.facts) | {"node": name, "state": state}
    for device in view["devices"]:
        device["leased_by"] = leased.get(f"{name}/{device['kind']}", {}).get(device["index"])
    return view


_ACCEPTED = job_view(Record(Job("", "", "", ()), {}), {})
FIELDS = tuple(_ACCEPTED)
