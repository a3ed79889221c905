"""What users ask of jobs that wait or run. Pure."""

from dataclasses import replace

from cluster.catalogue import matches_pattern
from cluster.serialization import to_plain
from orchestrator.core import attempt_stops, placement
from orchestrator.core.capacity import Room
from orchestrator.core.commands import Refuse
from orchestrator.core.draft import Draft
from orchestrator.core.fit import ANY
from orchestrator.core.fold import WORKING, Record
from orchestrator.core.messages import CancelAsked, MigrateAsked
from orchestrator.core.model import Candidate, Job
from orchestrator.core.placement_options import options_of, refusals
from orchestrator.core.states import TERMINAL, WAITING
from orchestrator.core.throughput import Throughput


def cancel(draft: Draft, asked: CancelAsked) -> None:
    """Wins over whatever the job does next; a job that has ended stays as it is."""
    record = draft.records.get(asked.job)
    if record is None or record.job.state in TERMINAL:
        return
    draft.event(asked.job, "cancelled", record.job.epoch, reason=asked.reason)
    if asked.job in draft.lives:
        attempt_stops.look_after(draft, asked.job)


def migrate(draft: Draft, asked: MigrateAsked) -> None:
    """The job saves, stops and goes on there. Nothing happens while no device is free there: it would only wait."""
    record = draft.records.get(asked.job)
    where = ", ".join([*asked.kinds, *([f"pool {asked.pool}"] if asked.pool else [])])
    if record is None or record.job.state in TERMINAL:
        draft.command(Refuse(f"job {asked.job} has ended", "submit it again with resume_from"))
        return
    if there := _runs_there(record, asked):
        draft.command(Refuse(f"job {asked.job} runs there already, on {there}", "name another kind or pool"))
        return
    job = replace(record.job, candidates=(_moved(record.job, asked),))
    if _may_not(job):
        told = f"it last ran on {job.backend}, and recovery.cross_vendor is false"
        remedy = "submit it again with resume_from and cross_vendor: true"
        draft.command(Refuse(f"job {asked.job} cannot move to {where}: {told}", remedy))
        return
    if record.job.state not in WAITING and (reasons := _why_not(draft, job)):
        told = f"job {asked.job} cannot move to {where} now: {reasons}"
        draft.command(Refuse(told, "`polyfleet inventory` shows what is free"))
        return
    reason = f"moves to {where}"
    draft.event(
        asked.job, "migrated", record.job.epoch, candidates=[to_plain(c) for c in job.candidates], reason=reason
    )
    draft.paused_until_s.pop(asked.job)
    if not draft.event(asked.job, "preempted", record.job.epoch, reason=reason):
        attempt_stops.look_after(draft, asked.job)


def _runs_there(record: Record, asked: MigrateAsked) -> str:
    """The kind and pool it runs on, where these are what was asked for; else ""."""
    live = record.live
    if live is None or record.job.state not in WORKING or asked.pool not in ("", live.pool):
        return ""
    wanted = not asked.kinds or any(matches_pattern(pattern, live.kind) for pattern in asked.kinds)
    return f"{live.kind} in pool {live.pool}" if wanted else ""


def _moved(job: Job, asked: MigrateAsked) -> Candidate:
    """The candidate that asks for such devices already, else the first with these devices instead of its own."""
    first = job.candidates[0]
    named = [c for c in job.candidates if asked.kinds and set(c.kinds) & set(asked.kinds)]
    found = named[0] if named else replace(first, kinds=asked.kinds or ("any",), node="", memory_bytes=0)
    if asked.pool:
        return replace(found, pool=asked.pool, pools=(), not_pools=())
    return found if named else replace(found, pool="", pools=(), not_pools=())


def _may_not(job: Job) -> bool:
    """Whether all that it would accept is of another vendor, and it may not cross."""
    vendors = {kind.partition(":")[0].lower() for kind in job.candidates[0].kinds}
    return not job.recovery.cross_vendor and bool(job.backend) and vendors.isdisjoint({ANY, job.backend})


def _why_not(draft: Draft, job: Job) -> str:
    seen = placement.snapshot(draft.ended(), draft.now, Throughput())
    room = Room(seen)
    if options_of(job, room):
        return ""
    reasons = refusals(job, room)
    told = [f"{devices_id} {why}".strip() for (_, devices_id), why in sorted(reasons.items())]
    return "; ".join(told[:3]) or "the fleet has no nodes"
