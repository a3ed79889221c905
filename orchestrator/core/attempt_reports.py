"""What agents tell of attempts, turned into events: started, checkpoint, metrics, and how each part ended. Pure."""

from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from orchestrator.core import attempt_stops, membership, nodes, progress
from orchestrator.core.attempt_outcome import lost
from orchestrator.core.attempts import ORDER, Live, Part
from orchestrator.core.commands import Forget, Stop, StoreReport
from orchestrator.core.draft import Draft
from orchestrator.core.messages import Heartbeat, Spoiled
from orchestrator.core.nodes import Node, Stranger
from orchestrator.core.states import State
from orchestrator.core.timing import NODE_SILENT_S
from workers.messages import AttemptStatus, RankEvent

AGAIN_S = 2.0
"""Before a node is asked once more to stop or forget what does not count."""


def heard(draft: Draft, beat: Heartbeat) -> None:
    """An answer of an agent. One of a node that has another Ray id by now does not count."""
    node = draft.nodes.get(beat.node)
    if node is None or node.ray_id != beat.ray_id:
        return
    was_closed = (
        bool(node.broken) or node.facts is None or node.listed_s is None or node.silent_s(draft.now.s) > NODE_SILENT_S
    )
    before = node.notice
    draft.nodes[node.name] = node = _refreshed(node, beat, draft.now.s)
    if beat.facts is not None or was_closed:
        draft.change(changed=True)
        membership.noticed(draft, node.name, before)
    for report in beat.reports:
        _report(draft, node.name, report, beat)
    for job, epoch in beat.epochs.items():
        _seen_epoch(draft, node.name, job, epoch)
    after = draft.nodes[node.name]
    if beat.attempts is not None and after.listed_s == beat.asked_s:  # else a newer list has come before it
        _listed(draft, after, beat.attempts)


def _refreshed(node: Node, beat: Heartbeat, now_s: float) -> Node:
    changes: dict[str, Any] = {"heard_s": max(node.heard_s, now_s), "failing": False, "unmade": 0}
    if beat.facts is not None:
        changes |= {"facts": beat.facts, "refused": nodes.refusal(beat.facts)}
    if beat.attempts is not None and (node.listed_s is None or beat.asked_s >= node.listed_s):
        changes |= {"listed_s": beat.asked_s, "listed": beat.attempts, "broken": ""}
    return replace(node, **changes)


def _report(draft: Draft, node: str, report: AttemptStatus, beat: Heartbeat) -> None:
    live, known = draft.lives.get(report.job), report.job in beat.known
    if live is None or live.epoch != report.epoch:
        _of_no_life(draft, node, report, known)
        return
    if not (0 <= report.node_rank < len(live.parts)) or live.parts[report.node_rank].node != node:
        _of_no_life(draft, node, report, known)  # another attempt that bears the same number
        return
    part = live.parts[report.node_rank]
    if part.outcome is not None or (report.outcome is None and _is_late(draft, part, report, beat)):
        return
    told_at = live.told_at
    for event in report.events if not part.spoiled else ():
        if event.rank == 0 and event.at > told_at:
            told_at = event.at
            live = _absorb(draft, live, node, event)
    part = replace(part, phase=report.phase, cursor=max(part.cursor, report.cursor), unsure="")
    live = live.with_part(report.node_rank, part, told_at)
    draft.lives[live.job] = live
    if report.phase != "starting" and live.running and draft.records[live.job].job.state is State.STARTING:
        draft.event(live.job, "started", live.epoch)
    if report.outcome is not None:
        attempt_stops.part_ended(draft, live.job, report.node_rank, report.outcome)


def _is_late(draft: Draft, part: Part, report: AttemptStatus, beat: Heartbeat) -> bool:
    """An answer may come after a newer one: phases never go back, and what a node said before its newest list, which
    does not have the part, is no sign that it is there. What such a report has beside that is told again.
    """
    listed_s = draft.nodes[part.node].listed_s
    past = listed_s is not None and beat.asked_s < listed_s
    return ORDER.index(report.phase) < ORDER.index(part.phase) or (bool(part.unsure) and past)


def _absorb(draft: Draft, live: Live, node: str, event: RankEvent) -> Live:
    """Rank 0 speaks for all; what was stored before is known by its position, since clocks may be set back."""
    if event.type == "checkpoint":
        _checkpoint(draft, live, node, event)
    elif event.type == "report":
        draft.command(StoreReport(live.job, live.epoch, event.t, event.at, dict(event.data)))
        return replace(live, pace=progress.reported(draft, live, event.t, event.data))
    return live


def _checkpoint(draft: Draft, live: Live, node: str, event: RankEvent) -> None:
    facts = draft.nodes[node].facts
    whole = PurePosixPath(str(event.data["path"]))
    if facts is None or ".." in whole.parts or not whole.is_relative_to(facts.storage):
        return  # a path that user code made up
    told = {key: event.data[key] for key in ("step", "bytes", "seconds", "blocked_s") if key in event.data}
    path = str(whole.relative_to(facts.storage))
    draft.event(live.job, "checkpoint", live.epoch, pool=facts.pool, path=path, node=node, at=event.at, **told)


def spoiled(draft: Draft, told: Spoiled) -> None:
    """This concerns that attempt only, which is stopped."""
    live = draft.lives.get(told.job)
    if live is None or live.epoch != told.epoch or not 0 <= told.node_rank < len(live.parts):
        draft.warn(f"a report of {told.job}.{told.epoch} that cannot be used is dropped: {told.why}")
        return
    part = live.parts[told.node_rank]
    if part.outcome is not None:
        return  # its end is told already, and final
    if not part.spoiled:
        draft.warn(f"attempt {live.part_key(told.node_rank)}: what node {part.node} told cannot be used: {told.why}")
    cursor = part.cursor if told.cursor is None else told.cursor
    part = replace(part, spoiled=part.spoiled or told.why, cursor=cursor)
    draft.lives[live.job] = live = live.with_part(told.node_rank, part)
    if told.ended:
        attempt_stops.part_ended(draft, live.job, told.node_rank, lost(live, told.node_rank, told.why, "unreadable"))


def _of_no_life(draft: Draft, node: str, report: AttemptStatus, known: bool) -> None:
    """An older attempt is stopped, and forgotten once it has ended. A newer one than the log knows means that the log
    is an older copy: its epoch is never used again. One of a job that the log does not know is not ours to stop. The
    log knows the jobs that were open before this step: what was told just now may have ended them.
    """
    key = report.key
    if report.job in draft.records:
        _seen_epoch(draft, node, report.job, report.epoch)
    known = known or report.job in draft.records or report.job in draft.control.records
    _strange(draft, node, key, Stranger(report.cursor, report.phase, known))
    if draft.nodes[node].strangers[key].known:
        dismiss(draft, node, key)


def _strange(draft: Draft, node: str, key: str, stranger: Stranger) -> None:
    have = draft.nodes[node]
    before = have.strangers.get(key)
    asked_s = before.asked_s if before and before.phase == stranger.phase else float("-inf")
    strangers = {**have.strangers, key: replace(stranger, asked_s=asked_s)}
    draft.nodes[node] = replace(have, strangers=strangers)
    if before is None or before.phase != stranger.phase:
        draft.change(changed=True)


def dismiss(draft: Draft, node: str, key: str) -> None:
    """Stop what does not count, or let its node forget it once it has ended; not more often than it can answer. What a
    node tells that may be another one under a second name is left to that.
    """
    have = draft.nodes[node]
    stranger = have.strangers[key]
    if have.same_as or draft.now.s - stranger.asked_s < AGAIN_S:
        return
    strangers = {**have.strangers, key: replace(stranger, asked_s=draft.now.s)}
    draft.nodes[node] = replace(have, strangers=strangers)
    job, epoch, _ = key.rsplit(".", 2)
    record = draft.records.get(job)
    how = "preempt" if record and int(epoch) > record.job.epoch else "cancel"
    ended = stranger.phase == "ended"
    draft.command(Forget(node, job, int(epoch)) if ended else Stop(node, job, int(epoch), how))


def look(draft: Draft) -> None:
    """Once per tick: nodes that were asked to stop or forget something, and still have it, are asked again."""
    for name, node in draft.nodes.items():
        for key, stranger in node.strangers.items() if node.has_agent else ():
            if stranger.known:
                dismiss(draft, name, key)


def _seen_epoch(draft: Draft, node: str, job: str, epoch: int) -> None:
    record = draft.records.get(job)
    if record is not None and epoch >= record.job.next_epoch:
        draft.event(job, "overtaken", record.job.epoch, node=node, seen=epoch)


def _listed(draft: Draft, node: Node, there: frozenset[str]) -> None:
    """Parts that their own node knows nothing of: the order never arrived, or the node's folder is gone. One that it
    has after all, as after an agent that could not read it, is in doubt no more. Strangers that it has forgotten.
    """
    if gone := node.strangers.keys() - there:
        strangers = {key: s for key, s in node.strangers.items() if key not in gone}
        draft.nodes[node.name] = node = replace(node, strangers=strangers)
        draft.change(changed=True)
    for job in draft.on_node(node.name):
        live = draft.lives[job]
        if not live.launching and node.listed_s is not None and node.listed_s >= live.since_s:
            for rank, part in enumerate(live.parts):
                if part.node == node.name and part.outcome is None:
                    _doubted(draft, job, rank, live.part_key(rank) in there)


def _doubted(draft: Draft, job: str, rank: int, is_there: bool) -> None:
    """By the newest list of its node: what an older one lacked, or a launch was not answered, says less."""
    live = draft.lives[job]
    part = live.parts[rank]
    unsure = "" if is_there else part.unsure or f"node {part.node} has no record of this attempt"
    if unsure != part.unsure:
        draft.lives[job] = live.with_part(rank, replace(part, unsure=unsure))
