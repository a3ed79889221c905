"""Handle users' requests about open jobs: cancel, migrate and rename. Pure."""

from dataclasses import replace

from cluster.catalogue import matches_pattern
from cluster.serialization import to_plain
from orchestrator.core.attempt import attempt_stops
from orchestrator.core.controller.commands import Reject
from orchestrator.core.controller.draft import Draft
from orchestrator.core.controller.messages import CancelRequested, MigrateRequested, RenameRequested
from orchestrator.core.jobs.fold import WORKING, Record
from orchestrator.core.model import Candidate, Job
from orchestrator.core.plan.options.capacity import FreeCapacity
from orchestrator.core.plan.options.fit import ANY
from orchestrator.core.plan.options.placement_options import list_options, refusal_reasons
from orchestrator.core.states import TERMINAL, WAITING
from orchestrator.core.step import placement
from orchestrator.core.throughput import Throughput


def cancel(draft: Draft, message: CancelRequested) -> None:
    """Cancel a job, whatever its state; no effect on a job that has ended."""
    record = draft.records.get(message.job)
    if record is None or record.job.state in TERMINAL:
        return
    draft.event(message.job, "cancelled", record.job.epoch, reason=message.reason)
    if message.job in draft.attempts:
        attempt_stops.review(draft, message.job)


def migrate(draft: Draft, message: MigrateRequested) -> None:
    """Let a job save, stop and continue on other devices. Rejected while none is free there, as it would only wait."""
    record = draft.records.get(message.job)
    where = ", ".join([*message.kinds, *([f"pool {message.pool}"] if message.pool else [])])
    if record is None or record.job.state in TERMINAL:
        draft.command(Reject(f"job {message.job} has ended", "submit it again with resume_from"))
        return
    if present := _runs_there(record, message):
        draft.command(Reject(f"job {message.job} already runs on {present}", "name another kind or pool"))
        return
    job = replace(record.job, candidates=(_migrated_candidate(record.job, message),))
    if _is_vendor_change_forbidden(job):
        explanation = f"the job last ran on {job.backend}, and recovery.cross_vendor is false"
        remedy = "submit it again with resume_from and cross_vendor: true"
        draft.command(Reject(f"job {message.job} cannot move to {where}: {explanation}", remedy))
        return
    if record.job.state not in WAITING and (reasons := _why_not(draft, job)):
        explanation = f"job {message.job} cannot move to {where} now: {reasons}"
        draft.command(Reject(explanation, "`polyfleet inventory` shows what is free"))
        return
    reason = f"moves to {where}"
    draft.event(
        message.job, "migrated", record.job.epoch, candidates=[to_plain(c) for c in job.candidates], reason=reason
    )
    draft.paused_until_s.pop(message.job)
    if not draft.event(message.job, "preempted", record.job.epoch, reason=reason):
        attempt_stops.review(draft, message.job)


def rename(draft: Draft, message: RenameRequested) -> None:
    """Give an open job another name."""
    record = draft.records.get(message.job)
    if record is None or record.job.state in TERMINAL:
        draft.command(Reject(f"job {message.job} has ended: its name is final", "rename jobs before they end"))
    elif record.job.name != message.name:
        draft.event(message.job, "renamed", record.job.epoch, name=message.name)


def _runs_there(record: Record, message: MigrateRequested) -> str:
    """Return the kind and pool on which the job runs if they match the request, else ""."""
    attempt = record.live_attempt
    if attempt is None or record.job.state not in WORKING or message.pool not in ("", attempt.pool):
        return ""
    is_match = not message.kinds or any(matches_pattern(pattern, attempt.kind) for pattern in message.kinds)
    return f"{attempt.kind} in pool {attempt.pool}" if is_match else ""


def _migrated_candidate(job: Job, message: MigrateRequested) -> Candidate:
    """Return the candidate that requests such devices already, else the first one with its devices replaced."""
    first = job.candidates[0]
    matching = [c for c in job.candidates if message.kinds and set(c.kinds) & set(message.kinds)]
    candidate = matching[0] if matching else replace(first, kinds=message.kinds or ("any",), node="", memory_bytes=0)
    if message.pool:
        return replace(candidate, pool=message.pool, pools=(), not_pools=())
    return candidate if matching else replace(candidate, pool="", pools=(), not_pools=())


def _is_vendor_change_forbidden(job: Job) -> bool:
    """Return True if all requested kinds are of another vendor and the job must not change vendors."""
    vendors = {kind.partition(":")[0].lower() for kind in job.candidates[0].kinds}
    return not job.recovery.cross_vendor and bool(job.backend) and vendors.isdisjoint({ANY, job.backend})


def _why_not(draft: Draft, job: Job) -> str:
    snapshot = placement.snapshot(draft.finish(), draft.now, Throughput())
    capacity = FreeCapacity(snapshot)
    if list_options(job, capacity):
        return ""
    reasons = refusal_reasons(job, capacity)
    lines = [f"{devices_id} {why}".strip() for (_, devices_id), why in sorted(reasons.items())]
    return "; ".join(lines[:3]) or "the fleet has no nodes"
