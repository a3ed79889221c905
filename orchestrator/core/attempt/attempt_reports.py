"""Turn agents' messages about attempts into events: started, checkpoint, metrics, and the end of each part. Pure."""

from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from orchestrator.core.attempt import attempt_stops
from orchestrator.core.attempt.attempt_outcome import lost_outcome
from orchestrator.core.attempt.transitions import move_part
from orchestrator.core.controller import nodes
from orchestrator.core.controller.attempts import PHASE_ORDER, AttemptPart, AttemptState, LiveAttempt, PartState
from orchestrator.core.controller.commands import RemoveFiles, Stop, StoreReport
from orchestrator.core.controller.draft import Draft
from orchestrator.core.controller.messages import Heartbeat, PartUnreadable
from orchestrator.core.controller.nodes import Node, UntrackedAttempt
from orchestrator.core.jobs import job_rates, progress
from orchestrator.core.step_rates import StepRate
from orchestrator.core.timing import NODE_SILENT_S, UNTRACKED_RETRY_S
from workers.protocol.messages import AttemptStatus, RankEvent


def apply_reply(draft: Draft, heartbeat: Heartbeat) -> None:
    """Handle the reply of an agent. It is ignored if the node has another Ray id by now."""
    node = draft.nodes.get(heartbeat.node)
    if node is None or node.ray_id != heartbeat.ray_id:
        return
    was_closed = (
        bool(node.agent_error)
        or node.facts is None
        or node.list_requested_s is None
        or node.silent_s(draft.now.s) > NODE_SILENT_S
    )
    notice_before = node.notice
    draft.nodes[node.name] = node = _update_node(node, heartbeat, draft.now.s)
    if heartbeat.facts is not None or was_closed:
        draft.change(needs_plan=True)
        attempt_stops.notice_changed(draft, node.name, notice_before)
    for status in heartbeat.reports:
        _apply_status(draft, node.name, status, heartbeat)
    for job, epoch in heartbeat.epochs.items():
        _record_epoch(draft, node.name, job, epoch)
    current = draft.nodes[node.name]
    if (
        heartbeat.attempts is not None and current.list_requested_s == heartbeat.requested_s
    ):  # else a newer list arrived first
        _apply_list(draft, current, heartbeat.attempts)


def _update_node(node: Node, heartbeat: Heartbeat, now_s: float) -> Node:
    changes: dict[str, Any] = {
        "last_contact_s": max(node.last_contact_s, now_s),
        "in_failure": False,
        "failed_agent_starts": 0,
    }
    if heartbeat.facts is not None:
        changes |= {"facts": heartbeat.facts, "unsupported_reason": nodes.unsupported_reason(heartbeat.facts)}
    if heartbeat.attempts is not None and (
        node.list_requested_s is None or heartbeat.requested_s >= node.list_requested_s
    ):
        changes |= {"list_requested_s": heartbeat.requested_s, "listed": heartbeat.attempts, "agent_error": ""}
    return replace(node, **changes)


def _apply_status(draft: Draft, node: str, status: AttemptStatus, heartbeat: Heartbeat) -> None:
    attempt, in_store = draft.attempts.get(status.job), status.job in heartbeat.stored_jobs
    if attempt is None or attempt.epoch != status.epoch:
        _handle_untracked(draft, node, status, in_store)
        return
    if not (0 <= status.node_rank < len(attempt.parts)) or attempt.parts[status.node_rank].node != node:
        _handle_untracked(draft, node, status, in_store)  # another attempt with the same number
        return
    part = attempt.parts[status.node_rank]
    if part.state is PartState.ENDED or (status.outcome is None and _is_late(draft, part, status, heartbeat)):
        return
    position = attempt.last_event_at
    for event in status.events if not part.unreadable_reason else ():
        if event.rank == 0 and event.at > position:
            position = event.at
            attempt = _apply_rank_event(draft, attempt, node, event)
    part = replace(part, cursor=max(part.cursor, status.cursor))
    draft.attempts[attempt.job] = attempt.with_part(status.node_rank, part, position)
    if status.outcome is not None:
        attempt_stops.end_part(draft, attempt.job, status.node_rank, status.outcome)
    else:
        _apply_phase(draft, status, part)


def _apply_phase(draft: Draft, status: AttemptStatus, part: AttemptPart) -> None:
    """Apply a status of a part that has not ended. The last part that runs makes its job run."""
    job, rank = status.job, status.node_rank
    if part.unreadable_reason:
        reported = replace(part, last_reported=PartState(status.phase.upper()))
        draft.attempts[job] = draft.attempts[job].with_part(rank, reported)
        move_part(draft, job, rank, "unreadable")
    else:
        move_part(draft, job, rank, f"reported_{status.phase}")
    attempt = draft.attempts[job]
    if status.phase == "running" and draft.records[job].may_start and attempt.is_running:
        draft.event(job, "started", attempt.epoch)


def _is_late(draft: Draft, part: AttemptPart, status: AttemptStatus, heartbeat: Heartbeat) -> bool:
    """Return True if a status is older than the recorded one: replies may arrive out of order.

    The phase of a part never returns to an earlier one. A status from before the node's newest list, if that list lacks
    the part, does not prove that the part exists. The agent repeats the other contents of an ignored status.
    """
    listed_s = draft.nodes[part.node].list_requested_s
    is_older = listed_s is not None and heartbeat.requested_s < listed_s
    return PHASE_ORDER.index(status.phase) < PHASE_ORDER.index(part.phase) or (
        part.state is PartState.UNCONFIRMED and is_older
    )


def _apply_rank_event(draft: Draft, attempt: LiveAttempt, node: str, event: RankEvent) -> LiveAttempt:
    """Apply an event of rank 0. Its position, not its time, shows whether it is stored already: clocks may be set."""
    if event.type == "checkpoint":
        _record_checkpoint(draft, attempt, node, event)
    elif event.type == "report":
        draft.store_metrics(StoreReport(attempt.job, attempt.epoch, event.t, event.at, dict(event.data)))
        pace, record = progress.apply_report(draft, attempt, event.t, event.data), draft.records[attempt.job]
        if pace is not None and pace.rate is not None and record.live_attempt is not None:
            rate = StepRate(pace.rate, attempt.job, draft.now.wall_s, pace.samples)
            job_rates.put_rate(draft, record, record.live_attempt, rate)
        return replace(attempt, pace=pace)
    return attempt


def _record_checkpoint(draft: Draft, attempt: LiveAttempt, node: str, event: RankEvent) -> None:
    facts = draft.nodes[node].facts
    full_path = PurePosixPath(str(event.data["path"]))
    if facts is None or ".." in full_path.parts or not full_path.is_relative_to(facts.storage):
        return  # user code wrote an invalid path
    details = {key: event.data[key] for key in ("step", "bytes", "seconds", "blocked_s") if key in event.data}
    path = str(full_path.relative_to(facts.storage))
    draft.event(attempt.job, "checkpoint", attempt.epoch, pool=facts.pool, path=path, node=node, at=event.at, **details)


def mark_unreadable(draft: Draft, message: PartUnreadable) -> None:
    """Handle an unreadable message about one part: its attempt is stopped, others are not affected."""
    attempt = draft.attempts.get(message.job)
    if attempt is None or attempt.epoch != message.epoch or not 0 <= message.node_rank < len(attempt.parts):
        draft.warn(f"dropped an unreadable message about attempt {message.job}.{message.epoch}: {message.why}")
        return
    part = attempt.parts[message.node_rank]
    if part.state is PartState.ENDED:
        return  # its end is recorded already, and final
    if not part.unreadable_reason:
        draft.warn(
            f"attempt {attempt.part_key(message.node_rank)}: node {part.node} sent an unreadable message: {message.why}"
        )
    cursor = part.cursor if message.cursor is None else message.cursor
    reason = part.unreadable_reason or message.why
    attempt = attempt.with_part(message.node_rank, replace(part, unreadable_reason=reason, cursor=cursor))
    draft.attempts[attempt.job] = attempt
    if message.ended:
        attempt_stops.end_part(
            draft, attempt.job, message.node_rank, lost_outcome(attempt, message.node_rank, message.why, "unreadable")
        )
    elif part.state is not PartState.UNCONFIRMED:  # the message may be older than the list that lacks the part
        move_part(draft, attempt.job, message.node_rank, "unreadable")


def _handle_untracked(draft: Draft, node: str, status: AttemptStatus, in_store: bool) -> None:
    """Handle the status of an attempt that is not tracked.

    An older attempt is stopped, and its files are removed once it has ended. A newer one than those in the log means
    that the log is an older copy: its epoch is never used again. An attempt of a job that is not in the log is not
    stopped. Jobs that were open before this step count as in the log, because an earlier status in this reply may have
    ended them.
    """
    key = status.key
    if status.job in draft.records:
        _record_epoch(draft, node, status.job, status.epoch)
    in_store = in_store or status.job in draft.records or status.job in draft.control.records
    _put_untracked(draft, node, key, UntrackedAttempt(status.cursor, status.phase, in_store))
    if draft.nodes[node].untracked[key].is_in_log:
        retire_untracked(draft, node, key)


def _put_untracked(draft: Draft, node: str, key: str, untracked: UntrackedAttempt) -> None:
    node_state = draft.nodes[node]
    previous = node_state.untracked.get(key)
    requested_s = previous.requested_s if previous and previous.phase == untracked.phase else float("-inf")
    untracked_attempts = {**node_state.untracked, key: replace(untracked, requested_s=requested_s)}
    draft.nodes[node] = replace(node_state, untracked=untracked_attempts)
    if previous is None or previous.phase != untracked.phase:
        draft.change(needs_plan=True)


def retire_untracked(draft: Draft, node: str, key: str) -> None:
    """Stop an untracked attempt, or let its node remove it once it has ended.

    The request is repeated after UNTRACKED_RETRY_S at the earliest. A node that may be another node under a second name
    is skipped; that other node gets the request.
    """
    node_state = draft.nodes[node]
    untracked = node_state.untracked[key]
    if node_state.duplicate_of or draft.now.s - untracked.requested_s < UNTRACKED_RETRY_S:
        return
    untracked_attempts = {**node_state.untracked, key: replace(untracked, requested_s=draft.now.s)}
    draft.nodes[node] = replace(node_state, untracked=untracked_attempts)
    job, epoch, _ = key.rsplit(".", 2)
    record = draft.records.get(job)
    how = "preempt" if record and int(epoch) > record.job.epoch else "cancel"
    ended = untracked.phase == "ended"
    draft.command(RemoveFiles(node, job, int(epoch)) if ended else Stop(node, job, int(epoch), how))


def retry_untracked(draft: Draft) -> None:
    """Repeat requests to stop or remove untracked attempts that nodes still have. Called once per tick."""
    for name, node in draft.nodes.items():
        for key, untracked in node.untracked.items() if node.has_agent else ():
            if untracked.is_in_log:
                retire_untracked(draft, name, key)


def _record_epoch(draft: Draft, node: str, job: str, epoch: int) -> None:
    record = draft.records.get(job)
    if record is not None and epoch >= record.job.next_epoch:
        draft.event(job, "overtaken", record.job.epoch, node=node, seen=epoch)


def _apply_list(draft: Draft, node: Node, listed: frozenset[str]) -> None:
    """Compare our attempts with a node's complete list of attempts.

    A part that is missing there becomes doubtful: its order never arrived, or the node's folder is gone. For a part
    that is there, e.g. after an agent that could not read it was restarted, the doubt ends. Untracked attempts that the
    node has removed are dropped.
    """
    if removed := node.untracked.keys() - listed:
        untracked_attempts = {key: s for key, s in node.untracked.items() if key not in removed}
        draft.nodes[node.name] = node = replace(node, untracked=untracked_attempts)
        draft.change(needs_plan=True)
    for job in draft.on_node(node.name):
        attempt = draft.attempts[job]
        is_launching = attempt.state is AttemptState.LAUNCHING
        if not is_launching and node.list_requested_s is not None and node.list_requested_s >= attempt.since_s:
            for rank, part in enumerate(attempt.parts):
                if part.node == node.name and part.state is not PartState.ENDED:
                    _set_doubt(draft, job, rank, attempt.part_key(rank) in listed)


def _set_doubt(draft: Draft, job: str, rank: int, is_there: bool) -> None:
    """Set or clear the doubt about a part. The newest list of its node outweighs older lists and lost replies."""
    part = draft.attempts[job].parts[rank]
    if is_there != (part.state is PartState.UNCONFIRMED):
        return
    if is_there:
        state = PartState.UNREADABLE if part.unreadable_reason else part.last_reported
        move_part(draft, job, rank, f"listed_{state.lower()}")
    else:
        move_part(draft, job, rank, "not_listed", doubt=f"node {part.node} has no record of this attempt")
