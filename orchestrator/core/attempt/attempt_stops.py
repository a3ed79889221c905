"""Stop attempts when their job or another part requires it, and conclude them once all parts have ended. Pure."""

from collections.abc import Iterable
from dataclasses import replace

from orchestrator.core.attempt.attempt_outcome import combine, lost_outcome, peak_of, result_of
from orchestrator.core.attempt.attempt_states import TIMERS
from orchestrator.core.attempt.stop_modes import stop_mode
from orchestrator.core.attempt.transitions import move, move_part, move_stop
from orchestrator.core.controller import nodes
from orchestrator.core.controller.attempts import AttemptPart, AttemptState, LiveAttempt, PartState, StopState
from orchestrator.core.controller.commands import Release
from orchestrator.core.controller.draft import Draft, PendingRelease
from orchestrator.core.controller.messages import Launched, LaunchFailed, StopAnswered
from orchestrator.core.controller.nodes import StuckReservation, UntrackedAttempt
from orchestrator.core.jobs import fold, progress, retry
from orchestrator.core.states import State
from orchestrator.core.timing import STOP_RETRY_S, STUCK_EXPIRES_S
from workers.protocol.messages import Outcome


def end_part(draft: Draft, job: str, rank: int, outcome: Outcome, *, is_reported: bool = True) -> None:
    """Record the end of a part that has not ended. The last part concludes the attempt.

    `is_reported`: the part's own node reported the outcome.
    """
    attempt = draft.attempts[job]
    part = attempt.parts[rank]
    if part.unreadable_reason:
        outcome = lost_outcome(attempt, rank, part.unreadable_reason, "unreadable")
    node = draft.nodes.get(part.node)
    last_listed_s = (
        node.list_requested_s
        if node and node.list_requested_s is not None and attempt.part_key(rank) in node.listed
        else 0.0
    )
    move_part(
        draft,
        job,
        rank,
        "reported_ended" if is_reported else "expired",
        outcome=outcome,
        ended_s=draft.now.s,
        last_listed_s=last_listed_s,
        is_reported=is_reported,
    )
    review(draft, job)


def launched(draft: Draft, message: Launched) -> None:
    attempt = draft.attempts.get(message.job)
    if attempt is None or attempt.epoch != message.epoch or attempt.state is not AttemptState.LAUNCHING:
        return
    move(draft, attempt.job, "launched", since_s=draft.now.s)
    for name in {part.node for part in attempt.parts}:
        if (node := draft.nodes.get(name)) is not None and node.foreign_use_s > float("-inf"):
            draft.nodes[name] = replace(node, foreign_use_s=float("-inf"))
    details = {
        "missed": message.missed,
        "missed_files": message.missed_files,
        "script": message.script,
        "source": message.source,
    }
    record = draft.records[attempt.job]
    if message.step is not None or any(details.values()) or record.missed_files or record.resumed_step is not None:
        draft.event(attempt.job, "resumed", attempt.epoch, step=message.step, **{k: v for k, v in details.items() if v})
    review(draft, attempt.job)


def launch_failed(draft: Draft, message: LaunchFailed) -> None:
    """Handle a failed launch. An error of the user ends the job; a problem of the fleet costs it nothing.

    A part that may have started ends once it is certain that it does not run: see suspicion.py. If every node has
    reported its part, the attempt has started and only a reply was lost.
    """
    attempt = draft.attempts.get(message.job)
    if attempt is None or attempt.epoch != message.epoch or attempt.state is not AttemptState.LAUNCHING:
        return
    if message.newest_epoch >= attempt.epoch:
        draft.event(attempt.job, "overtaken", attempt.epoch, node="", seen=message.newest_epoch)
    attempt = move(draft, attempt.job, "launch_failed", message.message, since_s=draft.now.s)
    started = message.kind == "launch" and all(
        part.phase and part.node in message.maybe_started for part in attempt.parts
    )
    if not started and message.maybe_started and message.kind == "launch":
        # later ends of its parts are attributed to this failure
        draft.attempts[attempt.job] = attempt.begin_cut_off(message.message, draft.now.s)
    if not started:
        for rank in range(len(attempt.parts)):
            _part_after_failed_launch(draft, attempt, rank, message)
        _record_node_failures(draft, message)
    note_stuck(draft, message.stuck)
    _record_foreign_use(draft, message)
    review(draft, attempt.job)


def _part_after_failed_launch(draft: Draft, attempt: LiveAttempt, rank: int, message: LaunchFailed) -> None:
    event = _launch_event(attempt.parts[rank], message)
    if event == "start_unanswered":
        move_part(draft, attempt.job, rank, event, doubt=message.message)
    elif event == "not_started":
        outcome = _not_started(attempt, rank, message)
        move_part(draft, attempt.job, rank, event, outcome=outcome, ended_s=draft.now.s, is_reported=False)


def _launch_event(part: AttemptPart, message: LaunchFailed) -> str:
    """Return what a failed launch means for a part; "" if the part has ended, or if its node has reported it."""
    if part.state is PartState.ENDED or (part.phase and part.node in message.maybe_started):
        return ""
    return "start_unanswered" if part.node in message.maybe_started else "not_started"


def _not_started(attempt: LiveAttempt, rank: int, message: LaunchFailed) -> Outcome:
    """Return the outcome of a part that was not started. Only nodes that lacked resources count as failed."""
    outcome = lost_outcome(attempt, rank, message.message, message.kind)
    if message.lacking and attempt.parts[rank].node not in message.lacking:
        return replace(outcome, state="cancelled", failure=None)
    return outcome


def note_stuck(draft: Draft, names: Iterable[str]) -> None:
    """Record that a launch failed because Ray reserves resources of these nodes for no existing holder."""
    for name in names:
        if (node := draft.nodes.get(name)) is not None:
            reservation = node.stuck or StuckReservation(draft.now.s, draft.now.s)
            since_s = reservation.since_s if draft.now.s - reservation.last_failed_s < STUCK_EXPIRES_S else draft.now.s
            draft.nodes[name] = replace(node, stuck=replace(reservation, since_s=since_s, last_failed_s=draft.now.s))


def _record_foreign_use(draft: Draft, message: LaunchFailed) -> None:
    for name in set(message.lacking) - set(message.stuck):
        if (node := draft.nodes.get(name)) is not None:
            draft.nodes[name] = replace(node, foreign_use_s=draft.now.s)


def _record_node_failures(draft: Draft, message: LaunchFailed) -> None:
    for name in message.unanswered if message.kind == "launch" else ():
        if (node := draft.nodes.get(name)) is not None:
            draft.nodes[name] = nodes.record_failure(
                node, f"an attempt could not be started: {message.message}", draft.now.s
            )


def stop_answered(draft: Draft, message: StopAnswered) -> None:
    attempt = draft.attempts.get(message.job)
    if attempt is None or attempt.epoch != message.epoch:
        return
    request = attempt.stop_requests.get(message.node)
    if request is None or (request.how == message.how and message.requested_s >= request.since_s):
        move_stop(draft, attempt.job, message.node, "failed" if message.error else "answered")


def preempt_node(draft: Draft, node: str, why: str) -> None:
    """Let every attempt on `node` save and stop; their jobs continue on other nodes."""
    for job in sorted(draft.on_node(node)):
        record = draft.records[job]
        if not draft.event(job, "preempted", record.job.epoch, reason=why):
            review(draft, job)


def notice_changed(draft: Draft, name: str, before: str) -> None:
    """Handle a changed termination notice: the node gets no new jobs, and its attempts save and move."""
    why = draft.nodes[name].notice
    if bool(why) == bool(before):
        return
    draft.change(needs_plan=True)
    if why:
        preempt_node(draft, name, f"node {name} is about to shut down: {why}")


def review(draft: Draft, job: str) -> None:
    """Send stop requests if the attempt has to stop, and conclude it if all its parts have ended."""
    attempt = draft.attempts[job]
    if attempt.cancelled_s is None and draft.records[job].job.state is State.CANCELLED:
        draft.attempts[job] = attempt = replace(attempt, cancelled_s=draft.now.s)
    if attempt.state is AttemptState.LAUNCHING:
        return
    if attempt.is_over:
        _conclude(draft, attempt)
    elif how := stop_mode(attempt, draft.records[job].job.state):
        for node in dict.fromkeys(part.node for part in attempt.parts if part.state is not PartState.ENDED):
            _request_stop(draft, job, node, how)


def _request_stop(draft: Draft, job: str, node: str, how: str) -> None:
    request = draft.attempts[job].stop_requests.get(node)
    if request is None or request.how != how:
        move_stop(draft, job, node, "wanted" if request is None else "mode_changed", how)
        return
    is_saving = how == "preempt" and request.state is StopState.ACKNOWLEDGED
    grace_s = draft.records[job].job.recovery.grace_s if is_saving else 0.0
    if draft.now.s - request.updated_s >= TIMERS[request.state] + grace_s:
        move_stop(draft, job, node, "timed_out")


def _conclude(draft: Draft, attempt: LiveAttempt) -> None:
    """Store the end of the attempt, release its reservation, and let its nodes remove its files."""
    if draft.records[attempt.job].may_start and _has_run(attempt):
        draft.event(attempt.job, "started", attempt.epoch)  # it ended before a status showed it running
    record, stop_took_s = draft.records[attempt.job], None
    if record.job.state is State.CANCELLED:
        draft.event(attempt.job, "released", attempt.epoch, outcome="cancelled", reason=record.reason)
    else:
        stop_reason = record.reason if record.job.state is State.SAVING else ""
        ended, decisive = combine(attempt, record.attempts[-1].candidate, stop_reason)
        stop_took_s = _stop_took_s(attempt, draft.now.s) if ended.state == "preempted" else None
        decision = retry.decide_retry(record.job, ended)
        failure = decisive.failure.to_plain() if decisive.failure else None
        details = {"outcome": ended.state, "result": result_of(attempt), "failure": failure}
        draft.record(fold.ended(record.job, decision, draft.now.wall_s, **details, peak_memory_bytes=peak_of(attempt)))
        # The pause after a lost node counts from its fence: waiting for the lease was a pause already.
        fence = attempt.raised_fence if ended.failure == "lost" else None
        if (until_s := decision.pause_s + (fence.since_s if fence else draft.now.s)) > draft.now.s:
            draft.paused_until_s[attempt.job] = until_s
    move(draft, attempt.job, "concluded")
    progress.attempt_ended(draft, attempt.job, stop_took_s)
    draft.pending_releases[attempt.allocation_name] = PendingRelease(attempt.key, draft.now.s)
    for rank, part in enumerate(attempt.parts):
        _put_untracked(draft, attempt.part_key(rank), part)


def _stop_took_s(attempt: LiveAttempt, now_s: float) -> float | None:
    """Return the seconds since the first request to its nodes to let it save and stop, None without one."""
    requested_s = [request.since_s for request in attempt.stop_requests.values() if request.how == "preempt"]
    return now_s - min(requested_s) if requested_s else None


def _has_run(attempt: LiveAttempt) -> bool:
    """Return True if every rank has started; only started ranks have exit codes."""
    return all(part.outcome is not None and part.outcome.exit_codes for part in attempt.parts)


def _put_untracked(draft: Draft, key: str, part: AttemptPart) -> None:
    """Until its node has removed a part's files, the node lists the part as an untracked attempt."""
    if (node := draft.nodes.get(part.node)) is not None:
        untracked = UntrackedAttempt(part.cursor, "ended", is_in_log=True, requested_s=draft.now.s)
        draft.nodes[node.name] = replace(node, untracked={**node.untracked, key: untracked})


def retry_releases(draft: Draft) -> None:
    """Repeat the release of reservations until Ray confirms it."""
    for name, pending in draft.pending_releases.items():
        if draft.now.s - pending.requested_s > STOP_RETRY_S:
            draft.pending_releases[name] = replace(pending, requested_s=draft.now.s)
            draft.command(Release(name, draft.now.s))
