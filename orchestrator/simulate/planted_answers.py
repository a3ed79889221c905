"""Planted bugs of answers: one that counts for what it does not answer, one that nobody asks for again, and a reason
that outlives what it explained.
"""

from dataclasses import replace
from typing import Any

from orchestrator.core import attempt_outcome, attempt_reports, attempt_stops, control, retry, suspicion
from orchestrator.core import messages as m
from orchestrator.core.attempts import Live, Part
from orchestrator.core.commands import Fence
from orchestrator.core.draft import Draft
from orchestrator.core.model import Job
from orchestrator.core.retry import Decision, Ended
from orchestrator.simulate import launch

Change = tuple[Any, str, Any]


def cut_off_for_ever() -> list[Change]:
    """A node that was silent once explains every later failure."""
    return [(Live, "reached", lambda live, now_s: live)]


def own_fence_taken_for_anothers() -> list[Change]:
    """In a cluster that is joined anew, a fence that we raised is read as if nobody knew whose it is."""

    def rejoined(draft: Draft) -> None:
        for live in draft.lives.values():
            if not live.launching:
                draft.lives[live.job] = replace(live, fence_asked_s=None, fenced_s=None, lowering=None)
                draft.command(Fence(live.job, live.epoch, asked_s=draft.now.s))

    def read(draft: Draft, live: Live) -> None:
        draft.lives[live.job] = suspicion._fenced_by_others(draft, live, live.epoch + 1)

    return [(suspicion, "rejoined", rejoined), (suspicion, "_own_fence_read", read)]


def late_answers_believed() -> list[Change]:
    """What a node said before it said something newer counts as news."""
    return [(attempt_reports, "_is_late", lambda draft, part, report, beat: False)]


def ended_parts_doubted() -> list[Change]:
    """Where the answer of a launch is lost, every part may have been started, those that have ended as well."""

    def after(live: Live, rank: int, part: Part, told: m.LaunchFailed, now_s: float) -> Part:
        return replace(part, unsure=told.message) if part.node in told.nodes else was(live, rank, part, told, now_s)

    was = attempt_stops._after_failed_launch
    return [(attempt_stops, "_after_failed_launch", after)]


def stops_begin_anew() -> list[Change]:
    """Since when an attempt was to stop is forgotten with each time that its node is asked."""
    was = attempt_stops._ask

    def ask(draft: Draft, job: str, node: str, how: str) -> None:
        before = draft.lives[job].asked.get(node)
        was(draft, job, node, how)
        live = draft.lives[job]
        if live.asked.get(node) is not before and live.cancelled_s is not None:
            draft.lives[job] = replace(live, cancelled_s=draft.now.s)

    return [(attempt_stops, "_ask", ask)]


def lowering_asked_for_once() -> list[Change]:
    """A fence that could not be taken down stays."""
    return [(suspicion, "_lower_again", lambda draft, live: live)]


def any_release_believed() -> list[Change]:
    """The answer of an earlier release counts for what was reserved anew since."""

    def released(draft: Draft, told: m.Released) -> None:
        if not told.error:
            draft.releasing.pop(told.place)

    return [(control, "HANDLERS", control.HANDLERS | {m.Released: released})]


def users_error_taken_for_a_lost_node() -> list[Change]:
    """What its user got wrong on one node of a gang explains how the others end, as a node that is lost would."""
    was = attempt_outcome._class

    def launch_failed(draft: Draft, told: m.LaunchFailed) -> None:
        live = draft.lives.get(told.job)
        if live is not None and live.launching and live.epoch == told.epoch and told.kind == "user" and told.nodes:
            draft.lives[live.job] = live.cut(told.message, draft.now.s)
        attempt_stops.launch_failed(draft, told)

    def place(part: Part, first_failed_s: float | None) -> int:
        return 4 if attempt_outcome.refused_by_user(part) else was(part, first_failed_s)

    handlers = control.HANDLERS | {m.LaunchFailed: launch_failed}
    never = lambda part: False  # noqa: E731
    return [
        (control, "HANDLERS", handlers),
        (attempt_outcome, "_class", place),
        (attempt_stops, "refused_by_user", never),
    ]


def users_error_tried_again() -> list[Change]:
    """What its user got wrong spends a restart, though the next start is as wrong."""
    was = retry.after

    def after(job: Job, ended: Ended) -> Decision:
        return was(job, replace(ended, refused=False))

    return [(retry, "after", after)]


def conflict_taken_for_a_newer_attempt() -> list[Change]:
    """A launch whose code another one sends as well is told of as if its own epoch had run."""
    was = launch.SimulatedLaunch._failed

    def failed(launching: launch.SimulatedLaunch, cause: Exception) -> None:
        if isinstance(cause, launch.UploadConflict):
            launching.fail(str(cause), seen=launching.command.epoch)
        else:
            was(launching, cause)

    return [(launch.SimulatedLaunch, "_failed", failed)]


BUGS = (
    *(cut_off_for_ever, own_fence_taken_for_anothers, late_answers_believed, ended_parts_doubted, stops_begin_anew),
    *(lowering_asked_for_once, any_release_believed, users_error_taken_for_a_lost_node, users_error_tried_again),
    conflict_taken_for_a_newer_attempt,
)
