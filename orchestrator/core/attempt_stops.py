"""Attempts on their way to an end: asked to stop where the job, or a sister part, says so; concluded once all is over.
Pure.
"""

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
"""After so long without an answer a node is asked again to stop an attempt."""

UNHEEDED_S = 15.0
"""And so long after it has heard, beside the grace of the attempt."""


def part_ended(draft: Draft, job: str, rank: int, outcome: Outcome, *, told: bool = True) -> None:
    """The first that is told of a part counts. The attempt is concluded with its last part. `told`: by its own node."""
    live = draft.lives[job]
    part = live.parts[rank]
    if part.outcome is not None:
        return
    if part.spoiled:
        outcome = lost(live, rank, part.spoiled, "unreadable")
    node = draft.nodes.get(part.node)
    heard_s = node.listed_s if node and node.listed_s is not None and live.part_key(rank) in node.listed else 0.0
    ended = replace(part, phase="ended", outcome=outcome, ended_s=draft.now.s, heard_s=heard_s, told=told, unsure="")
    draft.lives[job] = live.with_part(rank, ended)
    look_after(draft, job)


def launched(draft: Draft, told: Launched) -> None:
    live = draft.lives.get(told.job)
    if live is None or live.epoch != told.epoch or not live.launching:
        return
    draft.lives[live.job] = replace(live, launching=False, since_s=draft.now.s)
    for name in {part.node for part in live.parts}:
        if (node := draft.nodes.get(name)) is not None and node.taken_s > float("-inf"):
            draft.nodes[name] = replace(node, taken_s=float("-inf"))
    said = {"missed": told.missed, "missed_files": told.missed_files, "script": told.script, "source": told.source}
    before = draft.records[live.job]
    if told.step is not None or any(said.values()) or before.missed_files or before.resumed_step is not None:
        draft.event(live.job, "resumed", live.epoch, step=told.step, **{k: v for k, v in said.items() if v})
    look_after(draft, live.job)


def launch_failed(draft: Draft, told: LaunchFailed) -> None:
    """What the user got wrong ends the job; trouble of the fleet does not, and is no interruption either. Where a part
    may have started, it ends once that is certain: see core/suspicion.py. Where every node has told of its part, only
    an answer was lost.
    """
    live = draft.lives.get(told.job)
    if live is None or live.epoch != told.epoch or not live.launching:
        return
    if told.seen >= live.epoch:
        draft.event(live.job, "overtaken", live.epoch, node="", seen=told.seen)
    live = replace(live, launching=False, since_s=draft.now.s)
    started = told.kind == "launch" and all(part.phase and part.node in told.nodes for part in live.parts)
    if not started and told.nodes and told.kind == "launch":
        live = live.cut(told.message, draft.now.s)  # from here on parts end because of that
    for rank, part in enumerate(live.parts) if not started else ():
        live = live.with_part(rank, _after_failed_launch(live, rank, part, told, draft.now.s))
    draft.lives[live.job] = live
    if not started:
        _node_failed(draft, told)
    leaked_devices.told(draft, told.unheld)
    _note_taken(draft, told)
    look_after(draft, live.job)


def _after_failed_launch(live: Live, rank: int, part: Part, told: LaunchFailed, now_s: float) -> Part:
    """A part that has ended stays so; one that its node has reported was started, whatever became of the answer."""
    if part.outcome is not None or (part.phase and part.node in told.nodes):
        return part
    if part.node in told.nodes:
        return replace(part, unsure=told.message)
    return replace(part, phase="ended", ended_s=now_s, told=False, outcome=_not_started(live, rank, told))


def _not_started(live: Live, rank: int, told: LaunchFailed) -> Outcome:
    """Where some nodes had no room, the others are not why."""
    outcome = lost(live, rank, told.message, told.kind)
    if told.short and live.parts[rank].node not in told.short:
        return replace(outcome, state="cancelled", failure=None)
    return outcome


def _note_taken(draft: Draft, told: LaunchFailed) -> None:
    for name in set(told.short) - set(told.unheld):
        if (node := draft.nodes.get(name)) is not None:
            draft.nodes[name] = replace(node, taken_s=draft.now.s)


def _node_failed(draft: Draft, told: LaunchFailed) -> None:
    for name in told.failed if told.kind == "launch" else ():
        if (node := draft.nodes.get(name)) is not None:
            draft.nodes[name] = nodes.failed(node, f"an attempt could not be started: {told.message}", draft.now.s)


def stopped(draft: Draft, told: Stopped) -> None:
    live = draft.lives.get(told.job)
    if live is None or live.epoch != told.epoch or (asked := live.asked.get(told.node)) is None:
        return
    if asked.how == told.how and told.asked_s >= asked.since_s and not (asked.heard and told.error):
        at_s = draft.now.s if not told.error else draft.now.s - UNANSWERED_S + 1.0
        after = replace(asked, at_s=at_s, heard=not told.error)
        draft.lives[live.job] = replace(live, asked={**live.asked, told.node: after})


def save_all(draft: Draft, node: str, why: str) -> None:
    """Every attempt there saves and stops; its job goes on elsewhere."""
    for job in sorted(draft.on_node(node)):
        record = draft.records[job]
        if not draft.event(job, "preempted", record.job.epoch, reason=why):
            look_after(draft, job)


def look_after(draft: Draft, job: str) -> None:
    """Ask its nodes to stop where that is wanted, and conclude the attempt when it is over."""
    live = draft.lives[job]
    if live.cancelled_s is None and draft.records[job].job.state is State.CANCELLED:
        draft.lives[job] = live = replace(live, cancelled_s=draft.now.s)
    if live.launching:
        return
    if live.over:
        _conclude(draft, live)
    elif how := _wanted(draft, live):
        for node in dict.fromkeys(part.node for part in live.parts if part.outcome is None):
            _ask(draft, job, node, how)


def _wanted(draft: Draft, live: Live) -> str:
    """ "" or how they are to stop. A part that was asked to save and has ended leaves its sisters their own grace."""
    state = draft.records[live.job].job.state
    if state is State.CANCELLED:
        return "cancel"
    if live.overruled or any(p.unsure or is_broken(p) for p in live.parts):
        return "cancel" if _failed_first(live) else "fence"
    preempted = any(p.outcome and p.outcome.state == "preempted" for p in live.parts)
    return "preempt" if state is State.SAVING or preempted else ""


BROKEN = frozenset({"failed", "lost", "fenced", "cancelled"})


def is_broken(part: Part) -> bool:
    """Its attempt cannot end well any more, whatever the other parts do."""
    return bool(part.spoiled) or (part.outcome is not None and part.outcome.state in BROKEN)


def _failed_first(live: Live) -> bool:
    """A part had failed before anything else ended, so that its sisters do not end because they are cut off. What their
    nodes are told decides that also for a server after this one, which remembers nothing of it.
    """
    if any(part.spoiled or refused_by_user(part) for part in live.parts):
        return True
    failed_s = [part.ended_s for part in live.parts if part.outcome and part.outcome.state == "failed"]
    return bool(failed_s) and not (live.cut_off and live.cut_off.explains(min(failed_s)))


def _ask(draft: Draft, job: str, node: str, how: str) -> None:
    live, now_s = draft.lives[job], draft.now.s
    asked = live.asked.get(node)
    if asked and asked.how == how:
        grace_s = draft.records[job].job.recovery.grace_s if how == "preempt" else 0.0
        if now_s - asked.at_s < (UNHEEDED_S + grace_s if asked.heard else UNANSWERED_S):
            return
    since_s = asked.since_s if asked and asked.how == how else now_s
    draft.lives[job] = replace(live, asked={**live.asked, node: Asked(how, now_s, since_s=since_s)})
    draft.command(Stop(node, job, live.epoch, how, now_s))


def _conclude(draft: Draft, live: Live) -> None:
    """Its end is stored, its reservation goes back, and its nodes may forget it."""
    if draft.records[live.job].job.state is State.STARTING and _ran(live):
        draft.event(live.job, "started", live.epoch)  # it ended before anybody saw it run
    record = draft.records[live.job]
    if record.job.state is State.CANCELLED:
        draft.event(live.job, "released", live.epoch, outcome="cancelled", reason=record.reason)
    else:
        asked = record.reason if record.job.state is State.SAVING else ""
        ended, decisive = combine(live, record.attempts[-1].candidate, asked)
        decision = retry.after(record.job, ended)
        failure = decisive.failure.to_plain() if decisive.failure else None
        told = {"outcome": ended.state, "result": result_of(live), "failure": failure}
        draft.record(fold.ended(record.job, decision, draft.now.wall_s, **told, peak_memory_bytes=peak_of(live)))
        waited = ended.failure == "lost" and live.fence_asked_s is not None  # for its lease: a pause already
        if (until_s := decision.pause_s + (live.raised_s if waited else draft.now.s)) > draft.now.s:
            draft.paused_until_s[live.job] = until_s
    draft.end(live)
    progress.ended(draft, live.job)
    draft.releasing[live.place] = Kept(live.key, draft.now.s)
    for rank, part in enumerate(live.parts):
        _forget(draft, live.part_key(rank), part)


def _ran(live: Live) -> bool:
    """Every rank has started: only those have exit codes."""
    return all(part.outcome is not None and part.outcome.exit_codes for part in live.parts)


def _forget(draft: Draft, key: str, part: Part) -> None:
    """Its node tells of it until it has forgotten: it is a stranger there from now on."""
    if (node := draft.nodes.get(part.node)) is not None:
        stranger = Stranger(part.cursor, "ended", known=True, asked_s=draft.now.s)
        draft.nodes[node.name] = replace(node, strangers={**node.strangers, key: stranger})
    job, epoch, _ = key.rsplit(".", 2)
    draft.command(Forget(part.node, job, int(epoch)))


def release(draft: Draft) -> None:
    """Reservations go back until Ray has confirmed it."""
    for place, kept in draft.releasing.items():
        if draft.now.s - kept.asked_s > UNANSWERED_S:
            draft.releasing[place] = replace(kept, asked_s=draft.now.s)
            draft.command(Release(place, draft.now.s))
