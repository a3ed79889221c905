"""When a part of an attempt whose node is silent may be taken for ended. Pure.

"The node is dead" never proves that the work has stopped: a frozen or cut off machine goes on, and its agent may renew
leases through the fence. So a fence above the attempt's epoch is raised first. From the time it stands, nothing renews
the lease any more, nothing of that epoch starts, and none of its checkpoints is committed. The part has ended one full
lease later, or as soon as its node itself says that nothing of it runs.
"""

from dataclasses import replace

from orchestrator.core import attempt_stops, nodes
from orchestrator.core.attempt_outcome import lost
from orchestrator.core.attempts import Live, Lowering, Part
from orchestrator.core.commands import Fence
from orchestrator.core.draft import Control, Draft
from orchestrator.core.fold import WORKING
from orchestrator.core.launch_orders import PATIENT_LEASE_S
from orchestrator.core.messages import Fenced, Now
from orchestrator.core.model import Job
from orchestrator.core.states import State
from orchestrator.core.timing import LEASE_MARGIN_S, NODE_SILENT_S

UNANSWERED_S = 3.0
LAUNCHED_S = 10.0
"""A launch that takes longer is told of."""
CANCELLED_S = 30.0
"""A cancelled job has no next attempt that could meet this one: its devices need not wait longer."""


def look(draft: Draft) -> None:
    """Once per tick, at every attempt but those of which there is nothing to be said."""
    now_s = draft.now.s
    heard = {n.name for n in draft.nodes.values() if not n.lost and n.silent_s(now_s) <= NODE_SILENT_S}
    for live in draft.lives.values():
        if not (live.launching or _is_well(draft, live, heard)):
            _look(draft, live)


def _is_well(draft: Draft, live: Live, heard: set[str]) -> bool:
    """All of it is where it should be, and nobody wants it to stop."""
    cut_off = live.cut_off is not None and live.cut_off.over_s is None
    if cut_off or live.overruled or live.fence_asked_s is not None or live.lowering or not live.fence_known:
        return False
    if draft.records[live.job].job.state not in WORKING:
        return False
    return all(p.node in heard and p.outcome is None and not p.unsure and not p.spoiled for p in live.parts)


def _look(draft: Draft, live: Live) -> None:
    live = _read_again(draft, _lower_again(draft, live))
    doubtful = [rank for rank, part in enumerate(live.parts) if part.outcome is None and _doubt(draft, live, part)]
    if not doubtful:
        _lower(draft, live)
        attempt_stops.look_after(draft, live.job)
        return
    if live.fenced_s is None:
        _raise(draft, live, _doubt(draft, live, live.parts[doubtful[0]]))
    for rank in doubtful:
        now = draft.lives.get(live.job)
        if now is not None and now.epoch == live.epoch and (why := _certain(draft, now, rank)):
            _lost(draft, now, rank, why)
    if (now := draft.lives.get(live.job)) is not None and now.epoch == live.epoch:
        attempt_stops.look_after(draft, live.job)


def _doubt(draft: Draft, live: Live, part: Part) -> str:
    """Why it may have ended without a word, "" while there is no reason to think so."""
    if live.overruled or part.unsure:
        return live.overruled or part.unsure
    if not draft.control.joined:
        return ""  # nobody could be heard
    node, now_s = draft.nodes.get(part.node), draft.now.s
    if node is None:
        return f"node {part.node} is not in the fleet" if now_s - live.since_s > NODE_SILENT_S else ""
    silent_s = now_s - max(node.heard_s, live.since_s)
    if node.lost:
        return f"node {node.name} was lost: {node.lost}" if silent_s > NODE_SILENT_S else ""
    return f"node {node.name} has not answered for {silent_s:.0f} s" if silent_s > NODE_SILENT_S else ""


def rejoined(draft: Draft) -> None:
    """In another cluster, or in one that was lost, what was written may be gone. A fence of ours that is to stand is
    raised anew: to read it would not tell whose it is. Of the other attempts it is read: one that stands above was
    raised by a controller before us, or by one whose log is newer. A launch under way reads its own.
    """
    for live in draft.lives.values():
        if live.launching:
            continue
        if live.lowering is not None:
            _ask_to_lower(draft, live)
        elif live.overruled or (live.fence_known and live.fence_asked_s is not None):
            _ask_to_raise(draft, replace(live, fence_asked_s=None, fenced_s=None))
        else:
            _ask_to_read(draft, replace(live, fence_asked_s=None, fence_known=False))


def _raise(draft: Draft, live: Live, why: str) -> None:
    if _waits(draft, live):
        return
    if live.fence_asked_s is None or draft.now.s - live.fence_asked_s > UNANSWERED_S:
        _ask_to_raise(draft, live.cut(why, draft.now.s))


def _ask_to_raise(draft: Draft, live: Live) -> None:
    """`raised_s` is of the first time since it was lowered."""
    raised_s = draft.now.s if live.fence_asked_s is None else live.raised_s
    draft.lives[live.job] = replace(live, fence_asked_s=draft.now.s, raised_s=raised_s, lowering=None)
    if not live.fence_known:
        # It may stand there already, for an attempt that an older log does not know.
        draft.command(Fence(live.job, live.epoch, asked_s=draft.now.s))
        return
    draft.raised[live.job] = live.epoch + 1
    draft.command(Fence(live.job, live.epoch + 1, asked_s=draft.now.s))


def _waits(draft: Draft, live: Live) -> bool:
    """The job's user wants it to wait for a node that is cut off."""
    if live.overruled or any(attempt_stops.is_broken(part) for part in live.parts):
        return False  # it ends in any case
    job = draft.records[live.job].job
    unsure = any(part.unsure for part in live.parts)
    return job.recovery.on_disconnect == "wait" and job.state is not State.CANCELLED and not unsure


def _lower(draft: Draft, live: Live) -> None:
    """All its nodes are heard again, and no part was lost or failed: it counts again."""
    if any(attempt_stops.is_broken(part) for part in live.parts):
        return
    was_asked = live.fence_asked_s is not None
    draft.lives[live.job] = live = replace(live.reached(draft.now.s), fence_asked_s=None, fenced_s=None)
    if was_asked and live.fence_known:
        _ask_to_lower(draft, live)


def _lower_again(draft: Draft, live: Live) -> Live:
    """Until it is confirmed: ranks save nothing while a fence stands above them."""
    if live.lowering is None or draft.now.s - live.lowering.asked_s <= UNANSWERED_S:
        return live
    return _ask_to_lower(draft, live)


def _read_again(draft: Draft, live: Live) -> Live:
    """Until it is known: a server before us may have raised it, and its ranks save nothing until it is taken down."""
    if live.fence_known or live.fence_asked_s is not None or draft.now.s - live.read_s <= UNANSWERED_S:
        return live
    return _ask_to_read(draft, live)


def _ask_to_read(draft: Draft, live: Live) -> Live:
    draft.lives[live.job] = live = replace(live, read_s=draft.now.s)
    draft.command(Fence(live.job, live.epoch, asked_s=draft.now.s))
    return live


def _ask_to_lower(draft: Draft, live: Live) -> Live:
    since_s = draft.now.s if live.lowering is None else live.lowering.since_s
    draft.lives[live.job] = live = replace(live, lowering=Lowering(since_s, draft.now.s))
    draft.command(Fence(live.job, live.epoch, lower=True, asked_s=draft.now.s))
    return live


def fenced(draft: Draft, told: Fenced) -> None:
    """A fence that stands above an attempt ends it, whoever raised it."""
    live = draft.lives.get(told.job)
    if live is None or told.error:
        return
    if told.stands <= live.epoch:
        if told.epoch == live.epoch:
            _not_above(draft, live, told)
        return
    if told.epoch == live.epoch:
        if not live.overruled and draft.raised.get(live.job) == told.stands:
            _own_fence_read(draft, live)
            return
        live = _fenced_by_others(draft, live, told.stands)
    elif live.fence_asked_s is None or told.asked_s < live.raised_s:
        return  # it was lowered after that
    if live.fenced_s is None:
        live = replace(live, fenced_s=draft.now.s, asked={})  # a word from before does not count
    draft.lives[live.job] = live
    attempt_stops.look_after(draft, live.job)


def _not_above(draft: Draft, live: Live, told: Fenced) -> None:
    """What was read in a cluster before says nothing of this one."""
    if live.lowering is not None and told.asked_s >= live.lowering.since_s:
        draft.lives[live.job] = live = replace(live, lowering=None)
    if live.fence_known or told.asked_s < draft.control.joined_s:
        return
    draft.lives[live.job] = known = replace(live, fence_known=True, fence_asked_s=None)
    if draft.control.joined and not known.launching:
        _look(draft, known)


def _own_fence_read(draft: Draft, live: Live) -> None:
    """One that we raised, and that was not taken down, is no sign of a newer attempt."""
    draft.lives[live.job] = known = replace(live, fence_known=True)
    if known.fence_asked_s is None:
        _ask_to_lower(draft, known)


def _fenced_by_others(draft: Draft, live: Live, stands: int) -> Live:
    draft.event(live.job, "overtaken", live.epoch, node="", seen=stands)
    why = f"attempt {stands} has superseded it: its fence stands there"
    raised_s = draft.now.s if live.fence_asked_s is None else live.raised_s
    after = replace(live, overruled=why, fence_known=True, fence_asked_s=draft.now.s, raised_s=raised_s)
    return replace(after, lowering=None).cut(why, draft.now.s)


def _certain(draft: Draft, live: Live, rank: int) -> str:
    """Why it is certain that nothing of this part runs, or ""."""
    if live.fenced_s is None:
        return ""
    part = live.parts[rank]
    node, asked = draft.nodes.get(part.node), live.asked.get(part.node)
    if draft.now.s > _lapses_s(draft, live, rank):
        return _doubt(draft, live, part)
    if node is None or asked is None or not asked.heard or asked.at_s < live.fenced_s:
        return ""
    gone = node.listed_s is not None and node.listed_s > asked.at_s and live.part_key(rank) not in node.listed
    return _doubt(draft, live, part) if gone else ""


def _lapses_s(draft: Draft, live: Live, rank: int) -> float:
    """When nothing of it can run any more. A node that answers renews its leases itself, under whatever name: one whose
    raylet was started again has a second name until Ray has missed the first.
    """
    name, key = live.parts[rank].node, live.part_key(rank)
    node, given_s = draft.nodes.get(name), lease_s(draft.records[live.job].job) + LEASE_MARGIN_S
    renewed_s = max(live.fenced_s or draft.now.s, node.heard_s if node else 0.0)
    if draft.now.s > renewed_s + given_s:  # no sooner: this looks at all nodes
        seconds = (n for n in draft.nodes.now.values() if n.same_as == name and n.runs(key))
        renewed_s = max([renewed_s, *(n.heard_s for n in seconds)])
    return renewed_s + given_s


def lease_s(job: Job) -> float:
    """So long the attempt may go on after the last renewal."""
    given_s = PATIENT_LEASE_S if job.recovery.on_disconnect == "wait" else job.recovery.lease_s
    return min(given_s, CANCELLED_S) if job.state is State.CANCELLED else given_s


def waits_for(control: Control, job: str, now: Now, doing: str = "") -> str:
    """What an attempt waits for whose node is silent, or whose launch takes long, in a sentence; "" for others. `doing`
    is what the launch does now.
    """
    live, draft = control.lives.get(job), Draft(control, now)
    if live is None:
        return ""
    if live.launching:
        took_s = now.s - live.since_s
        told = f"its launch takes {took_s:.0f} s so far: it {doing or 'waits for other launches to end'}"
        return told if took_s > LAUNCHED_S else ""
    parts = enumerate(live.parts)
    doubts = [(rank, why) for rank, p in parts if p.outcome is None and (why := _doubt(draft, live, p))]
    if not doubts:
        return ""
    rank, why = doubts[0]
    if _waits(draft, live):
        return f"{why}; the job waits for it (recovery.on_disconnect is wait)"
    if live.fenced_s is None:
        return f"{why}; the lease of its attempt is being revoked"
    left_s = max(0.0, _lapses_s(draft, live, rank) - now.s)
    return f"{why}; its attempt is replaced in {left_s:.0f} s unless the node answers"


def _lost(draft: Draft, live: Live, rank: int, why: str) -> None:
    """An attempt that never ran anywhere was not started: that costs its job nothing."""
    part, state = live.parts[rank], draft.records[live.job].job.state
    never = part.unsure and state is State.STARTING and not part.phase
    if not never and (node := draft.nodes.get(part.node)) is not None:
        began_s = live.cut_off.since_s if live.cut_off else None
        draft.nodes[node.name] = nodes.failed(node, why, draft.now.s, began_s)
    attempt_stops.part_ended(draft, live.job, rank, lost(live, rank, why, "launch" if never else "lost"), told=False)
