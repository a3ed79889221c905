"""Planted bugs around replies, and around reasons that outlive what they explained.

Replies are matched to the wrong request, or are lost and not requested again.
"""

from dataclasses import replace
from typing import Any

from orchestrator.core.attempt import (
    attempt_outcome,
    attempt_reports,
    attempt_stops,
    stop_modes,
    suspicion,
    transitions,
)
from orchestrator.core.attempt.attempt_states import ATTEMPT, PART
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.attempts import AttemptPart, AttemptState, LiveAttempt, PartState
from orchestrator.core.controller.draft import Draft
from orchestrator.core.jobs import retry
from orchestrator.core.jobs.retry import AttemptEnd, Decision
from orchestrator.core.model import Job
from orchestrator.core.step import control
from tests.simulator import launch

Patch = tuple[Any, str, Any]


def cut_off_for_ever() -> list[Patch]:
    """One silence of a node counts as the reason of every later failure."""
    rules = tuple(rule for rule in suspicion.RECOVERY if rule is not suspicion._end_cut_off)
    return [(suspicion, "RECOVERY", rules)]


def own_fence_mistaken_for_anothers() -> list[Patch]:
    """After joining a cluster again, a fence that this server raised is mistaken for that of another one."""

    def read(draft: Draft, attempt: LiveAttempt) -> None:
        suspicion._fenced_by_others(draft, attempt, attempt.epoch + 1)

    fenced = (AttemptState.FENCING, AttemptState.FENCED, AttemptState.LOWERING)
    rows = {(state, "rejoined"): (AttemptState.ADOPTED, "read") for state in fenced}
    return [(transitions, "ATTEMPT", ATTEMPT | rows), (suspicion, "_own_fence_read", read)]


def late_replies_believed() -> list[Patch]:
    """An older reply of a node that arrives late overwrites a newer one."""
    row = {(PartState.RUNNING, "reported_starting"): PartState.STARTING}
    return [
        (attempt_reports, "_is_late", lambda draft, part, report, beat: False),
        (transitions, "PART", PART | row),
    ]


def ended_parts_doubted() -> list[Patch]:
    """When the result of a launch is lost, parts that have already ended are also put in doubt."""

    original = attempt_stops._launch_event

    def launch_event(part: AttemptPart, failure: m.LaunchFailed) -> str:
        return "start_unanswered" if part.node in failure.maybe_started else original(part, failure)

    rows = {(state, "start_unanswered"): PartState.UNCONFIRMED for state in PartState}
    return [(attempt_stops, "_launch_event", launch_event), (transitions, "PART", PART | rows)]


def stops_restart() -> list[Patch]:
    """Each repeated stop request resets the time since when an attempt should stop."""
    original = attempt_stops._request_stop

    def request_stop(draft: Draft, job: str, node: str, mode: str) -> None:
        before = draft.attempts[job].stop_requests.get(node)
        original(draft, job, node, mode)
        attempt = draft.attempts[job]
        if attempt.stop_requests.get(node) is not before and attempt.cancelled_s is not None:
            draft.attempts[job] = replace(attempt, cancelled_s=draft.now.s)

    return [(attempt_stops, "_request_stop", request_stop)]


def lowering_requested_once() -> list[Patch]:
    """A fence that could not be lowered at once is never lowered."""
    row = {(AttemptState.LOWERING, "timed_out"): (AttemptState.LOWERING, "")}
    return [(transitions, "ATTEMPT", ATTEMPT | row)]


def any_release_believed() -> list[Patch]:
    """The reply to an earlier release counts for a newer reservation of the same devices."""

    def released(draft: Draft, message: m.ReleaseAnswered) -> None:
        if not message.error:
            draft.pending_releases.pop(message.reservation_name)

    return [(control, "HANDLERS", control.HANDLERS | {m.ReleaseAnswered: released})]


def user_error_mistaken_for_a_lost_node() -> list[Patch]:
    """A user's error on one node of a gang is treated like a lost node: it explains all other ends."""
    original = attempt_outcome._cause_rank

    def launch_failed(draft: Draft, failure: m.LaunchFailed) -> None:
        attempt = draft.attempts.get(failure.job)
        if (
            attempt is not None
            and attempt.state is AttemptState.LAUNCHING
            and attempt.epoch == failure.epoch
            and failure.kind == "user"
            and failure.maybe_started
        ):
            draft.attempts[attempt.job] = attempt.begin_cut_off(failure.message, draft.now.s)
        attempt_stops.launch_failed(draft, failure)

    def cause_rank(part: AttemptPart, first_failed_s: float | None) -> int:
        return 4 if attempt_outcome.is_user_error(part) else original(part, first_failed_s)

    handlers = control.HANDLERS | {m.LaunchFailed: launch_failed}
    never = lambda part: False  # noqa: E731
    return [
        (control, "HANDLERS", handlers),
        (attempt_outcome, "_cause_rank", cause_rank),
        (stop_modes, "is_user_error", never),
    ]


def users_error_tried_again() -> list[Patch]:
    """A user's error uses up a restart, although the next start fails for the same reason."""
    original = retry.decide_retry

    def after(job: Job, ended: AttemptEnd) -> Decision:
        return original(job, replace(ended, is_user_error=False))

    return [(retry, "decide_retry", after)]


def conflict_mistaken_for_a_newer_attempt() -> list[Patch]:
    """A launch that conflicts with another upload of its code reports that its own epoch had already run."""
    original = launch.SimulatedLaunch._failed

    def failed(launching: launch.SimulatedLaunch, cause: Exception) -> None:
        if isinstance(cause, launch.UploadConflict):
            launching.fail(str(cause), newest=launching.command.epoch)
        else:
            original(launching, cause)

    return [(launch.SimulatedLaunch, "_failed", failed)]


BUGS = (
    *(cut_off_for_ever, own_fence_mistaken_for_anothers, late_replies_believed, ended_parts_doubted, stops_restart),
    *(lowering_requested_once, any_release_believed, user_error_mistaken_for_a_lost_node, users_error_tried_again),
    conflict_mistaken_for_a_newer_attempt,
)
