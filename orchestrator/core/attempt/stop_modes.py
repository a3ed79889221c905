"""How an attempt has to stop, as a table: the first condition that holds decides. Pure."""

from collections.abc import Callable

from orchestrator.core.attempt.attempt_outcome import is_user_error
from orchestrator.core.controller.attempts import AttemptPart, LiveAttempt, PartState
from orchestrator.core.states import State

BROKEN = frozenset({"failed", "lost", "fenced", "cancelled"})


def is_broken(part: AttemptPart) -> bool:
    """Return True if the attempt can no longer succeed because of this part."""
    return bool(part.unreadable_reason) or (part.outcome is not None and part.outcome.state in BROKEN)


def _is_cancelled(attempt: LiveAttempt, job_state: State) -> bool:
    return job_state is State.CANCELLED


def _failed_before_cut_off(attempt: LiveAttempt, job_state: State) -> bool:
    """Return True if a part failed by itself, and not because nodes were disconnected.

    The kind of stop request then sent to the nodes also informs a later server, which does not have this state.
    """
    if any(part.unreadable_reason or is_user_error(part) for part in attempt.parts):
        return True
    failed_s = [part.ended_s for part in attempt.parts if part.outcome and part.outcome.state == "failed"]
    return bool(failed_s) and not (attempt.cut_off and attempt.cut_off.explains(min(failed_s)))


def _is_superseded(attempt: LiveAttempt, job_state: State) -> bool:
    return bool(attempt.superseded_reason)


def _has_unconfirmed(attempt: LiveAttempt, job_state: State) -> bool:
    return any(part.state is PartState.UNCONFIRMED for part in attempt.parts)


def _has_broken(attempt: LiveAttempt, job_state: State) -> bool:
    return any(is_broken(part) for part in attempt.parts)


def _is_saving(attempt: LiveAttempt, job_state: State) -> bool:
    return job_state is State.SAVING


def _has_preempted(attempt: LiveAttempt, job_state: State) -> bool:
    """Return True if a part was preempted: the others keep their own grace."""
    return any(part.outcome is not None and part.outcome.state == "preempted" for part in attempt.parts)


STOP_MODES: tuple[tuple[Callable[[LiveAttempt, State], bool], str], ...] = (
    (_is_cancelled, "cancel"),
    (_failed_before_cut_off, "cancel"),
    (_is_superseded, "fence"),
    (_has_unconfirmed, "fence"),
    (_has_broken, "fence"),
    (_is_saving, "preempt"),
    (_has_preempted, "preempt"),
)
"""How an attempt has to stop: the mode of the first condition that holds. None holds of one that may continue."""


def stop_mode(attempt: LiveAttempt, job_state: State) -> str:
    """Return how the attempt has to stop, or ""."""
    return next((mode for applies, mode in STOP_MODES if applies(attempt, job_state)), "")
