"""Decide when a part of an attempt on a silent node counts as ended. Pure.

A silent node does not prove that the work has stopped: a frozen or disconnected machine may continue, and its agent may
renew leases as long as the fence allows that. So a fence above the attempt's epoch is raised first. Once Ray has stored
it, the lease is not renewed any more, nothing of that epoch starts, and none of its checkpoints is committed. The part
has ended one full lease later, or as soon as its node itself reports that no process of it runs (expiry.py).
"""

from collections.abc import Callable

from orchestrator.core.attempt import attempt_stops, expiry
from orchestrator.core.attempt.attempt_outcome import lost_outcome
from orchestrator.core.attempt.attempt_states import ABOVE, CLEAR, LOWERED, OWN, RAISED, TIMERS
from orchestrator.core.attempt.stop_modes import is_broken
from orchestrator.core.attempt.transitions import REPORTED, move, void_stops
from orchestrator.core.controller import nodes
from orchestrator.core.controller.attempts import AttemptPart, AttemptState, LiveAttempt, PartState
from orchestrator.core.controller.draft import Control, Draft
from orchestrator.core.controller.messages import FenceAnswered, Now
from orchestrator.core.jobs.fold import WORKING
from orchestrator.core.states import State
from orchestrator.core.timing import LAUNCH_SLOW_S, NODE_SILENT_S

A = AttemptState


def review(draft: Draft) -> None:
    """Review every attempt that is not launching or healthy. Called once per tick."""
    now_s = draft.now.s
    answering = {n.name for n in draft.nodes.values() if not n.lost_reason and n.silent_s(now_s) <= NODE_SILENT_S}
    for attempt in draft.attempts.values():
        if attempt.state is not A.LAUNCHING and not _is_healthy(draft, attempt, answering):
            _review(draft, attempt)


def _is_healthy(draft: Draft, attempt: LiveAttempt, answering: set[str]) -> bool:
    """Return True if all parts run on nodes that respond, and no stop, fence or doubt is pending."""
    cut_off = attempt.cut_off is not None and attempt.cut_off.until_s is None
    if cut_off or attempt.state is not A.ACTIVE:
        return False
    if draft.records[attempt.job].job.state not in WORKING:
        return False
    return all(p.node in answering and p.state in REPORTED for p in attempt.parts)


def _review(draft: Draft, attempt: LiveAttempt) -> None:
    attempt = _request_again(draft, attempt)
    suspects = [
        rank
        for rank, part in enumerate(attempt.parts)
        if part.state is not PartState.ENDED and _suspect_reason(draft, attempt, part)
    ]
    if not suspects:
        _recover(draft, attempt)
        _request_again(draft, draft.attempts[attempt.job])
        attempt_stops.review(draft, attempt.job)
        return
    if attempt.fenced_s is None:
        _raise_fence(draft, attempt, _suspect_reason(draft, attempt, attempt.parts[suspects[0]]))
    for rank in suspects:
        current = draft.attempts.get(attempt.job)
        if current is not None and current.epoch == attempt.epoch and (why := _expired_reason(draft, current, rank)):
            _end_lost(draft, current, rank, why)
    if (current := draft.attempts.get(attempt.job)) is not None and current.epoch == attempt.epoch:
        attempt_stops.review(draft, attempt.job)


def _suspect_reason(draft: Draft, attempt: LiveAttempt, part: AttemptPart) -> str:
    """Say why a part may have ended without a message about it; "" if nothing suggests that."""
    if attempt.superseded_reason or part.doubt:
        return attempt.superseded_reason or part.doubt
    if not draft.control.is_joined:
        return ""  # no node can be reached
    node, now_s = draft.nodes.get(part.node), draft.now.s
    if node is None:
        return f"node {part.node} is not in the fleet" if now_s - attempt.since_s > NODE_SILENT_S else ""
    silent_s = now_s - max(node.last_contact_s, attempt.since_s)
    if node.lost_reason:
        return f"node {node.name} was lost: {node.lost_reason}" if silent_s > NODE_SILENT_S else ""
    return f"node {node.name} has not answered for {silent_s:.0f} s" if silent_s > NODE_SILENT_S else ""


def rejoined(draft: Draft) -> None:
    """Send fence commands after joining a cluster, where stored fences may be missing.

    A fence that we had raised is raised again, because reading it would not show who raised it. The fences of other
    attempts are read: one above the attempt was raised by an earlier controller, or by one with a newer log. A launch
    that is still running reads its own fence.
    """
    for attempt in draft.attempts.values():
        move(draft, attempt.job, "rejoined")


def _raise_fence(draft: Draft, attempt: LiveAttempt, why: str) -> None:
    """Raise a fence above the attempt.

    It is read first if this server has not read it: it may be above the attempt already, for a newer one that is
    missing from an older log.
    """
    if _waits_for_node(draft, attempt):
        return
    is_requested = attempt.state in (A.CHECKING, A.FENCING)
    if is_requested and not _is_overdue(attempt, draft.now.s):
        return
    draft.attempts[attempt.job] = attempt.begin_cut_off(why, draft.now.s)
    move(draft, attempt.job, "timed_out" if is_requested else "suspected", why)


def _is_overdue(attempt: LiveAttempt, now_s: float) -> bool:
    sent_s = attempt.fence.sent_s if attempt.fence else attempt.read_s
    return now_s - sent_s > TIMERS[attempt.state]


def _waits_for_node(draft: Draft, attempt: LiveAttempt) -> bool:
    """Return True if the job waits for a disconnected node, as its user requested."""
    if attempt.superseded_reason or any(is_broken(part) for part in attempt.parts):
        return False  # the attempt ends in any case
    job = draft.records[attempt.job].job
    is_doubtful = any(part.state is PartState.UNCONFIRMED for part in attempt.parts)
    return job.recovery.on_disconnect == "wait" and job.state is not State.CANCELLED and not is_doubtful


def _recover(draft: Draft, attempt: LiveAttempt) -> None:
    """Let the attempt count again if all nodes respond again and no part was lost or failed."""
    if not any(is_broken(part) for part in attempt.parts):
        for restore in RECOVERY:
            restore(draft, attempt.job)


def _end_cut_off(draft: Draft, job: str) -> None:
    draft.attempts[job] = draft.attempts[job].end_cut_off(draft.now.s)


def _withdraw_fence(draft: Draft, job: str) -> None:
    if draft.attempts[job].state in (A.CHECKING, A.FENCING, A.FENCED):
        move(draft, job, "recovered")


RECOVERY: tuple[Callable[[Draft, str], None], ...] = (_end_cut_off, _withdraw_fence)
"""What follows for an attempt whose nodes all respond again, in this order."""


def _request_again(draft: Draft, attempt: LiveAttempt) -> LiveAttempt:
    """Repeat the request to read or to lower the fence until a reply arrives.

    Until then ranks cannot save: an earlier server may have raised the fence that is to be read.
    """
    if attempt.state in (A.ADOPTED, A.LOWERING) and _is_overdue(attempt, draft.now.s):
        return move(draft, attempt.job, "timed_out")
    return attempt


def fence_answered(draft: Draft, message: FenceAnswered) -> None:
    """Handle a reply about a fence. A fence above an attempt ends it, whichever controller raised it."""
    attempt = draft.attempts.get(message.job)
    if attempt is None or message.error:
        return
    if message.current_epoch <= attempt.epoch:
        if message.epoch == attempt.epoch:
            _fence_below(draft, attempt, message)
    elif message.epoch != attempt.epoch:
        _fence_raised(draft, attempt, message)
    elif not attempt.superseded_reason and draft.raised_fences.get(attempt.job) == message.current_epoch:
        _own_fence_read(draft, attempt)
    else:
        _fenced_by_others(draft, attempt, message.current_epoch)


def _fence_below(draft: Draft, attempt: LiveAttempt, message: FenceAnswered) -> None:
    """Handle a fence that is not above the attempt. A value read in a previous cluster is ignored."""
    if attempt.state is A.LOWERING and attempt.fence and message.requested_s >= attempt.fence.since_s:
        move(draft, attempt.job, LOWERED)
    elif attempt.state in (A.ADOPTED, A.CHECKING) and message.requested_s >= draft.control.joined_s:
        attempt = move(draft, attempt.job, CLEAR)
        if draft.control.is_joined:
            _review(draft, attempt)


def _own_fence_read(draft: Draft, attempt: LiveAttempt) -> None:
    """Lower a fence that we raised ourselves and that was not lowered; it does not indicate a newer attempt."""
    move(draft, attempt.job, OWN)


def _fenced_by_others(draft: Draft, attempt: LiveAttempt, newer_epoch: int) -> None:
    why = f"attempt {newer_epoch} of this job was started, so attempt {attempt.epoch} no longer counts"
    cut_off = attempt.begin_cut_off(why, draft.now.s).cut_off
    after = move(draft, attempt.job, ABOVE, superseded_reason=why, cut_off=cut_off)
    if after.state is A.SUPERSEDED:
        draft.event(attempt.job, "overtaken", attempt.epoch, node="", seen=newer_epoch)
        _apply_stored_fence(draft, attempt)


def _fence_raised(draft: Draft, attempt: LiveAttempt, message: FenceAnswered) -> None:
    """Handle a fence above the attempt that we requested, unless it was lowered after this request."""
    fence = attempt.raised_fence
    if fence is not None and message.requested_s >= fence.since_s:
        move(draft, attempt.job, ABOVE if attempt.superseded_reason else RAISED)
        _apply_stored_fence(draft, attempt)


def _apply_stored_fence(draft: Draft, before: LiveAttempt) -> None:
    """Stop the attempt once its fence is stored: requests to stop it that were sent before do not count."""
    if before.fenced_s is None:
        void_stops(draft, before)
    attempt_stops.review(draft, before.job)


def _expired_reason(draft: Draft, attempt: LiveAttempt, rank: int) -> str:
    """Say why it is certain that no process of this part runs; "" if it is not certain."""
    return _suspect_reason(draft, attempt, attempt.parts[rank]) if expiry.is_over(draft, attempt, rank) else ""


def waiting_reason(control: Control, job: str, now: Now, activity: str = "") -> str:
    """Say what an attempt waits for if its node is silent or its launch is slow; "" for other attempts.

    `activity` is the present step of the launch, e.g. "waits for Ray to reserve its devices".
    """
    attempt, draft = control.attempts.get(job), Draft(control, now)
    if attempt is None:
        return ""
    if attempt.state is A.LAUNCHING:
        took_s = now.s - attempt.since_s
        message = (
            f"the attempt has been starting for {took_s:.0f} s: it {activity or 'waits for other launches to end'}"
        )
        return message if took_s > LAUNCH_SLOW_S else ""
    open_parts = [(rank, part) for rank, part in enumerate(attempt.parts) if part.state is not PartState.ENDED]
    doubts = [(rank, why) for rank, part in open_parts if (why := _suspect_reason(draft, attempt, part))]
    if not doubts:
        return ""
    rank, why = doubts[0]
    if _waits_for_node(draft, attempt):
        return f"{why}; the job waits for it (recovery.on_disconnect is wait)"
    if attempt.fenced_s is None:
        return f"{why}; the lease of its attempt is being revoked"
    left_s = max(0.0, expiry.expires_s(draft, attempt, rank) - now.s)
    return f"{why}; its attempt is replaced in {left_s:.0f} s unless the node answers"


def _end_lost(draft: Draft, attempt: LiveAttempt, rank: int, why: str) -> None:
    """End a part as lost; as a failed launch, which does not count against the job, if it never ran."""
    part, state = attempt.parts[rank], draft.records[attempt.job].job.state
    never_ran = part.state is PartState.UNCONFIRMED and state is State.STARTING and not part.phase
    if not never_ran and (node := draft.nodes.get(part.node)) is not None:
        cut_off_since_s = attempt.cut_off.since_s if attempt.cut_off else None
        draft.nodes[node.name] = nodes.record_failure(node, why, draft.now.s, cut_off_since_s)
    attempt_stops.end_part(
        draft, attempt.job, rank, lost_outcome(attempt, rank, why, "launch" if never_ran else "lost"), is_reported=False
    )
