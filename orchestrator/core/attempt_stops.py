"""Stop attempts when their job or another part requires it, and conclude them once all parts have ended. Pure."""

from dataclasses import replace

from orchestrator.core import fold, leaked_devices, nodes, progress, retry
from orchestrator.core.attempt_outcome import combine, lost, peak_of, refused_by_user, result_of
from orchestrator.core.attempts import Asked, Live, Part
from orchestrator.core.commands import Forget, Release, Stop
from orchestrator.core.draft import Draft, Kept
from orchestrator.core.messages import Launched, LaunchFailed, Stopped
from orchestrator.core.nodes import Stranger
from orchestrator.core.states import State
from workers.messages import Outcome

UNANSWERED_S = 5.0
"""Seconds without a reply after which a stop request is repeated."""

UNHEEDED_S = 15.0
"""Seconds after an acknowledged stop, in addition to the grace, after which it is repeated."""


def part_ended(draft: Draft, job: str, rank: int, outcome: Outcome, *, told: bool = True) -> None:
    """Record the end of a part; only the first outcome counts. The last part concludes the attempt.

    `told`: the part's own node reported the outcome.
    """
    attempt = draft.lives[job]
    part = attempt.parts[rank]
    if part.outcome is not None:
        return
    if part.spoiled:
        outcome = lost(attempt, rank, part.spoiled, "unreadable")
    node = draft.nodes.get(part.node)
    heard_s = node.listed_s if node and node.listed_s is not None and attempt.part_key(rank) in node.listed else 0.0
    ended = replace(part, phase="ended", outcome=outcome, ended_s=draft.now.s, heard_s=heard_s, told=told, unsure="")
    draft.lives[job] = attempt.with_part(rank, ended)
    look_after(draft, job)


def launched(draft: Draft, message: Launched) -> None:
    attempt = draft.lives.get(message.job)
    if attempt is None or attempt.epoch != message.epoch or not attempt.launching:
        return
    draft.lives[attempt.job] = replace(attempt, launching=False, since_s=draft.now.s)
    for name in {part.node for part in attempt.parts}:
        if (node := draft.nodes.get(name)) is not None and node.taken_s > float("-inf"):
            draft.nodes[name] = replace(node, taken_s=float("-inf"))
    details = {
        "missed": message.missed,
        "missed_files": message.missed_files,
        "script": message.script,
        "source": message.source,
    }
    record = draft.records[attempt.job]
    if message.step is not None or any(details.values()) or record.missed_files or record.resumed_step is not None:
        draft.event(attempt.job, "resumed", attempt.epoch, step=message.step, **{k: v for k, v in details.items() if v})
    look_after(draft, attempt.job)


def launch_failed(draft: Draft, message: LaunchFailed) -> None:
    """Handle a failed launch. An error of the user ends the job; a problem of the fleet costs it nothing.

    A part that may have started ends once it is certain that it does not run: see core/suspicion.py. If every node has
    reported its part, the attempt has started and only a reply was lost.
    """
    attempt = draft.lives.get(message.job)
    if attempt is None or attempt.epoch != message.epoch or not attempt.launching:
        return
    if message.seen >= attempt.epoch:
        draft.event(attempt.job, "overtaken", attempt.epoch, node="", seen=message.seen)
    attempt = replace(attempt, launching=False, since_s=draft.now.s)
    started = message.kind == "launch" and all(part.phase and part.node in message.nodes for part in attempt.parts)
    if not started and message.nodes and message.kind == "launch":
        attempt = attempt.cut(message.message, draft.now.s)  # later ends of its parts are attributed to this failure
    for rank, part in enumerate(attempt.parts) if not started else ():
        attempt = attempt.with_part(rank, _after_failed_launch(attempt, rank, part, message, draft.now.s))
    draft.lives[attempt.job] = attempt
    if not started:
        _node_failed(draft, message)
    leaked_devices.told(draft, message.unheld)
    _note_taken(draft, message)
    look_after(draft, attempt.job)


def _after_failed_launch(attempt: Live, rank: int, part: Part, message: LaunchFailed, now_s: float) -> Part:
    """Return a part after a failed launch. A part that has ended, or that its node has reported, does not change."""
    if part.outcome is not None or (part.phase and part.node in message.nodes):
        return part
    if part.node in message.nodes:
        return replace(part, unsure=message.message)
    return replace(part, phase="ended", ended_s=now_s, told=False, outcome=_not_started(attempt, rank, message))


def _not_started(attempt: Live, rank: int, message: LaunchFailed) -> Outcome:
    """Return the outcome of a part that was not started. Only nodes that lacked resources count as failed."""
    outcome = lost(attempt, rank, message.message, message.kind)
    if message.short and attempt.parts[rank].node not in message.short:
        return replace(outcome, state="cancelled", failure=None)
    return outcome


def _note_taken(draft: Draft, message: LaunchFailed) -> None:
    for name in set(message.short) - set(message.unheld):
        if (node := draft.nodes.get(name)) is not None:
            draft.nodes[name] = replace(node, taken_s=draft.now.s)


def _node_failed(draft: Draft, message: LaunchFailed) -> None:
    for name in message.failed if message.kind == "launch" else ():
        if (node := draft.nodes.get(name)) is not None:
            draft.nodes[name] = nodes.failed(node, f"an attempt could not be started: {message.message}", draft.now.s)


def stopped(draft: Draft, message: Stopped) -> None:
    attempt = draft.lives.get(message.job)
    if attempt is None or attempt.epoch != message.epoch or (stop := attempt.asked.get(message.node)) is None:
        return
    if stop.how == message.how and message.asked_s >= stop.since_s and not (stop.heard and message.error):
        at_s = draft.now.s if not message.error else draft.now.s - UNANSWERED_S + 1.0
        after = replace(stop, at_s=at_s, heard=not message.error)
        draft.lives[attempt.job] = replace(attempt, asked={**attempt.asked, message.node: after})


def save_all(draft: Draft, node: str, why: str) -> None:
    """Let every attempt on `node` save and stop; their jobs continue on other nodes."""
    for job in sorted(draft.on_node(node)):
        record = draft.records[job]
        if not draft.event(job, "preempted", record.job.epoch, reason=why):
            look_after(draft, job)


def look_after(draft: Draft, job: str) -> None:
    """Send stop requests if the attempt has to stop, and conclude it if all its parts have ended."""
    attempt = draft.lives[job]
    if attempt.cancelled_s is None and draft.records[job].job.state is State.CANCELLED:
        draft.lives[job] = attempt = replace(attempt, cancelled_s=draft.now.s)
    if attempt.launching:
        return
    if attempt.over:
        _conclude(draft, attempt)
    elif how := _wanted(draft, attempt):
        for node in dict.fromkeys(part.node for part in attempt.parts if part.outcome is None):
            _ask(draft, job, node, how)


def _wanted(draft: Draft, attempt: Live) -> str:
    """Return how the attempt has to stop, or "". After one part was preempted, the others keep their own grace."""
    state = draft.records[attempt.job].job.state
    if state is State.CANCELLED:
        return "cancel"
    if attempt.overruled or any(p.unsure or is_broken(p) for p in attempt.parts):
        return "cancel" if _failed_first(attempt) else "fence"
    preempted = any(p.outcome and p.outcome.state == "preempted" for p in attempt.parts)
    return "preempt" if state is State.SAVING or preempted else ""


BROKEN = frozenset({"failed", "lost", "fenced", "cancelled"})


def is_broken(part: Part) -> bool:
    """Return True if the attempt can no longer succeed because of this part."""
    return bool(part.spoiled) or (part.outcome is not None and part.outcome.state in BROKEN)


def _failed_first(attempt: Live) -> bool:
    """Return True if a part failed by itself, and not because nodes were disconnected.

    The kind of stop request then sent to the nodes also informs a later server, which does not have this state.
    """
    if any(part.spoiled or refused_by_user(part) for part in attempt.parts):
        return True
    failed_s = [part.ended_s for part in attempt.parts if part.outcome and part.outcome.state == "failed"]
    return bool(failed_s) and not (attempt.cut_off and attempt.cut_off.explains(min(failed_s)))


def _ask(draft: Draft, job: str, node: str, how: str) -> None:
    attempt, now_s = draft.lives[job], draft.now.s
    stop = attempt.asked.get(node)
    if stop and stop.how == how:
        grace_s = draft.records[job].job.recovery.grace_s if how == "preempt" else 0.0
        if now_s - stop.at_s < (UNHEEDED_S + grace_s if stop.heard else UNANSWERED_S):
            return
    since_s = stop.since_s if stop and stop.how == how else now_s
    draft.lives[job] = replace(attempt, asked={**attempt.asked, node: Asked(how, now_s, since_s=since_s)})
    draft.command(Stop(node, job, attempt.epoch, how, now_s))


def _conclude(draft: Draft, attempt: Live) -> None:
    """Store the end of the attempt, release its reservation, and let its nodes remove its files."""
    if draft.records[attempt.job].job.state is State.STARTING and _ran(attempt):
        draft.event(attempt.job, "started", attempt.epoch)  # it ended before a report showed it running
    record = draft.records[attempt.job]
    if record.job.state is State.CANCELLED:
        draft.event(attempt.job, "released", attempt.epoch, outcome="cancelled", reason=record.reason)
    else:
        stop_reason = record.reason if record.job.state is State.SAVING else ""
        ended, decisive = combine(attempt, record.attempts[-1].candidate, stop_reason)
        decision = retry.after(record.job, ended)
        failure = decisive.failure.to_plain() if decisive.failure else None
        details = {"outcome": ended.state, "result": result_of(attempt), "failure": failure}
        draft.record(fold.ended(record.job, decision, draft.now.wall_s, **details, peak_memory_bytes=peak_of(attempt)))
        # The pause after a lost node counts from its fence: waiting for the lease was a pause already.
        waited_for_lease = ended.failure == "lost" and attempt.fence_asked_s is not None
        if (until_s := decision.pause_s + (attempt.raised_s if waited_for_lease else draft.now.s)) > draft.now.s:
            draft.paused_until_s[attempt.job] = until_s
    draft.end(attempt)
    progress.ended(draft, attempt.job)
    draft.releasing[attempt.place] = Kept(attempt.key, draft.now.s)
    for rank, part in enumerate(attempt.parts):
        _forget(draft, attempt.part_key(rank), part)


def _ran(attempt: Live) -> bool:
    """Return True if every rank has started; only started ranks have exit codes."""
    return all(part.outcome is not None and part.outcome.exit_codes for part in attempt.parts)


def _forget(draft: Draft, key: str, part: Part) -> None:
    """Let the node remove a part's files. Until it has, it reports the part as an untracked attempt."""
    if (node := draft.nodes.get(part.node)) is not None:
        untracked = Stranger(part.cursor, "ended", known=True, asked_s=draft.now.s)
        draft.nodes[node.name] = replace(node, strangers={**node.strangers, key: untracked})
    job, epoch, _ = key.rsplit(".", 2)
    draft.command(Forget(part.node, job, int(epoch)))


def release(draft: Draft) -> None:
    """Repeat the release of reservations until Ray confirms it."""
    for place, pending in draft.releasing.items():
        if draft.now.s - pending.asked_s > UNANSWERED_S:
            draft.releasing[place] = replace(pending, asked_s=draft.now.s)
            draft.command(Release(place, draft.now.s))
