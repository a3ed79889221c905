"""Jobs of which attempts have run that this log does not know, since it is an older copy. Pure.

Such an attempt may still run on a node that nobody hears. So a fence is raised above it, and its job is placed one full
lease after that fence stood. What stood before is read first: a fence above all known epochs was raised by another
controller, for an attempt of its own.
"""

from dataclasses import replace

from orchestrator.core.commands import Fence
from orchestrator.core.draft import Control, Draft, Overtaken
from orchestrator.core.messages import Fenced
from orchestrator.core.model import Job
from orchestrator.core.states import WAITING
from orchestrator.core.suspicion import UNANSWERED_S, lease_s
from orchestrator.core.timing import LEASE_MARGIN_S


def look(draft: Draft) -> None:
    """Once per tick, while the fleet's cluster is joined."""
    for name, known in draft.overtaken.items():
        job = draft.records[name].job
        if job.state not in WAITING or name in draft.lives:
            continue
        if known.floor != job.floor:
            _ask(draft, job, Overtaken(job.floor, job.next_epoch - 1, since_s=draft.now.s))
        elif known.stood_s is None and draft.now.s - known.asked_s > UNANSWERED_S:
            _ask(draft, job, known)


def _ask(draft: Draft, job: Job, known: Overtaken) -> None:
    draft.overtaken[job.id] = replace(known, asked_s=draft.now.s)
    draft.command(Fence(job.id, known.epoch, asked_s=draft.now.s))


def fenced(draft: Draft, told: Fenced) -> None:
    """The fence of a job without an attempt."""
    known = draft.overtaken.get(told.job)
    if known is None or told.error or told.epoch != known.epoch or told.asked_s < known.since_s:
        return
    job = draft.records[told.job].job
    ours = told.stands == job.next_epoch == draft.raised.get(job.id)  # before we joined anew
    if told.stands > known.epoch and not ours:
        draft.overtaken[job.id] = Overtaken()
        draft.event(job.id, "overtaken", job.epoch, node="", seen=told.stands)
    elif known.epoch < job.next_epoch:
        draft.raised[job.id] = job.next_epoch
        _ask(draft, job, Overtaken(known.floor, job.next_epoch, since_s=draft.now.s))
    elif known.stood_s is None:
        draft.overtaken[job.id] = replace(known, stood_s=draft.now.s)


def begin_again(draft: Draft) -> None:
    """In another cluster, or in one that was lost, fences may be gone: those that are waited for are raised anew."""
    for name, known in draft.overtaken.items():
        if _left_s(draft.records[name].job, known, draft.now.s) > 0:
            draft.overtaken[name] = Overtaken()


def waits(control: Control, now_s: float) -> dict[str, str]:
    """Jobs that are not placed for now, with the sentence for it."""
    found = {}
    for name, known in control.overtaken.items():
        job = control.records[name].job
        if (left_s := _left_s(job, known, now_s)) > 0:
            found[name] = _sentence(job, known, left_s)
    return found


def _left_s(job: Job, known: Overtaken, now_s: float) -> float:
    if known.floor != job.floor or known.stood_s is None:
        return float("inf")
    return known.stood_s + lease_s(job) + LEASE_MARGIN_S - now_s


def _sentence(job: Job, known: Overtaken, left_s: float) -> str:
    newest = f"attempt {job.floor} or an earlier one" if job.floor > 1 else "attempt 1"
    why = f"{newest}, which this server's database does not know, may still run"
    if left_s == float("inf"):
        return f"{why}; its lease is being revoked"
    lease = "the lease of a day that recovery.on_disconnect: wait gives" if lease_s(job) > 3600 else "its lease"
    return f"{why}: {lease} ends in {left_s:.0f} s"
