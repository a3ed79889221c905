"""Guard epochs that may be in use by attempts missing from this log, because it is an older copy. Pure.

Such an attempt may still run on a node that does not respond. So a fence is raised above its epoch, and its job is
placed one full lease after Ray has stored that fence. The stored fence is read first: if it is above all epochs in this
log, another controller raised it for an attempt of its own.
"""

from dataclasses import replace

from orchestrator.core.attempt.expiry import lease_s
from orchestrator.core.controller.commands import Fence
from orchestrator.core.controller.draft import Control, Draft, EpochGuard
from orchestrator.core.controller.messages import FenceAnswered
from orchestrator.core.model import Job
from orchestrator.core.states import WAITING
from orchestrator.core.timing import FENCE_RETRY_S, LEASE_MARGIN_S


def review(draft: Draft) -> None:
    """Read or raise fences for guarded jobs. Called once per tick while the cluster is joined."""
    for name, guard in draft.epoch_guards.items():
        job = draft.records[name].job
        if job.state not in WAITING or name in draft.attempts:
            continue
        if guard.floor != job.floor:
            _request_fence(draft, job, EpochGuard(job.floor, job.next_epoch - 1, since_s=draft.now.s))
        elif guard.fence_stored_s is None and draft.now.s - guard.requested_s > FENCE_RETRY_S:
            _request_fence(draft, job, guard)


def _request_fence(draft: Draft, job: Job, guard: EpochGuard) -> None:
    draft.epoch_guards[job.id] = replace(guard, requested_s=draft.now.s)
    draft.command(Fence(job.id, guard.epoch, requested_s=draft.now.s))


def fence_answered(draft: Draft, message: FenceAnswered) -> None:
    """Handle the reply about the fence of a job without an attempt."""
    guard = draft.epoch_guards.get(message.job)
    if guard is None or message.error or message.epoch != guard.epoch or message.requested_s < guard.since_s:
        return
    job = draft.records[message.job].job
    ours = (
        message.current_epoch == job.next_epoch == draft.raised_fences.get(job.id)
    )  # raised before we joined the cluster again
    if message.current_epoch > guard.epoch and not ours:
        draft.epoch_guards[job.id] = EpochGuard()
        draft.event(job.id, "overtaken", job.epoch, node="", seen=message.current_epoch)
    elif guard.epoch < job.next_epoch:
        draft.raised_fences[job.id] = job.next_epoch
        _request_fence(draft, job, EpochGuard(guard.floor, job.next_epoch, since_s=draft.now.s))
    elif guard.fence_stored_s is None:
        draft.epoch_guards[job.id] = replace(guard, fence_stored_s=draft.now.s)


def restart_guards(draft: Draft) -> None:
    """Raise the fences that jobs wait for again: after a rejoin they may be missing from the cluster."""
    for name, guard in draft.epoch_guards.items():
        if _left_s(draft.records[name].job, guard, draft.now.s) > 0:
            draft.epoch_guards[name] = EpochGuard()


def guard_reasons(control: Control, now_s: float) -> dict[str, str]:
    """Return the reason for each job that may not be placed yet."""
    reasons = {}
    for name, guard in control.epoch_guards.items():
        job = control.records[name].job
        if (left_s := _left_s(job, guard, now_s)) > 0:
            reasons[name] = _sentence(job, guard, left_s)
    return reasons


def _left_s(job: Job, guard: EpochGuard, now_s: float) -> float:
    if guard.floor != job.floor or guard.fence_stored_s is None:
        return float("inf")
    return guard.fence_stored_s + lease_s(job) + LEASE_MARGIN_S - now_s


def _sentence(job: Job, guard: EpochGuard, left_s: float) -> str:
    newest = f"attempt {job.floor} or an earlier one" if job.floor > 1 else "attempt 1"
    why = f"{newest}, which is not in this server's database, may still be running"
    if left_s == float("inf"):
        return f"{why}; its lease is being revoked"
    detail = " (one day, because recovery.on_disconnect is wait)" if lease_s(job) > 3600 else ""
    return f"{why}; the job can start in {left_s:.0f} s, when its lease{detail} has expired"
