"""Planted bugs around what users set and request: cancel, drain, budgets; and around events that come twice."""

from dataclasses import replace
from typing import Any

from orchestrator.core.attempt import attempt_reports
from orchestrator.core.controller import messages as m
from orchestrator.core.controller import nodes
from orchestrator.core.controller.draft import Draft
from orchestrator.core.jobs import retry
from orchestrator.core.jobs.retry import AttemptEnd, Decision
from orchestrator.core.model import Job
from orchestrator.core.step import control
from tests.simulator.planted_reply_bugs import Patch


def cancel_without_effect() -> list[Patch]:
    """A cancel is acknowledged, but the job goes on."""
    return [(control, "HANDLERS", control.HANDLERS | {m.CancelRequested: lambda draft, message: None})]


def drained_nodes_used() -> list[Patch]:
    """A drained node gets new jobs."""
    original = nodes.closed_reason
    return [(nodes, "closed_reason", lambda node, drained, now_s: original(node, {}, now_s))]


def budgets_ignored() -> list[Patch]:
    """A job is retried although its restarts and interruptions are used up."""
    original = retry.decide_retry

    def decide(job: Job, ended: AttemptEnd) -> Decision:
        unlimited = replace(job.recovery, max_restarts=-1, max_interruptions=-1)
        return original(replace(job, recovery=unlimited), ended)

    return [(retry, "decide_retry", decide)]


def old_events_applied_again() -> list[Patch]:
    """Events of a rank that come twice, or late, are applied again."""
    original = attempt_reports._apply_status

    def apply_status(draft: Draft, node: str, status: Any, heartbeat: m.Heartbeat) -> None:
        attempt = draft.attempts.get(status.job)
        if attempt is not None:
            draft.attempts[attempt.job] = replace(attempt, last_event_at=-1)
        original(draft, node, status, heartbeat)

    return [(attempt_reports, "_apply_status", apply_status)]


BUGS = (cancel_without_effect, drained_nodes_used, budgets_ignored, old_events_applied_again)
