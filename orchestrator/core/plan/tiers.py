"""Group waiting jobs by priority, and find those in a pause."""

from collections import defaultdict
from collections.abc import Iterable

from orchestrator.core.jobs.expected_duration import tier
from orchestrator.core.model import Job, Running, Snapshot
from orchestrator.core.plan.options.placement_options import Reasons
from orchestrator.core.plan.policies import fifo


def tiers(waiting: Iterable[Job], snapshot: Snapshot, movable: Iterable[Running]) -> list[tuple[int, list[Job]]]:
    """Return (priority, jobs), highest first; also tiers without waiting jobs, if attempts in `movable` have them."""
    by_priority: dict[int, list[Job]] = defaultdict(list)
    for job in waiting:
        by_priority[tier(job, snapshot)].append(job)
    if snapshot.ageing_s:  # jobs that have aged into a tier are equal to the others there
        by_priority |= {at: fifo.by_number(jobs) for at, jobs in by_priority.items()}
    by_priority |= {attempt.priority: by_priority[attempt.priority] for attempt in movable}
    return sorted(by_priority.items(), reverse=True)


def pause_reasons(waiting: Iterable[Job], snapshot: Snapshot) -> dict[str, Reasons]:
    """Return the reasons of waiting jobs that are in a pause after a failure, in their order."""
    until = {job: at_s for job, at_s in snapshot.paused_until_s.items() if at_s > snapshot.now_s}
    if not until:
        return {}
    return {job.id: _reasons(job, until[job.id] - snapshot.now_s) for job in waiting if job.id in until}


def _reasons(job: Job, pause_s: float) -> Reasons:
    sentence = f"the server retries the job in {pause_s:.1f} s, after {_failure_counts(job)}"
    return {(index, ""): sentence for index in range(len(job.candidates))}


def _failure_counts(job: Job) -> str:
    counts = [(job.restarts, "failure"), (job.interruptions, "interruption"), (job.refusals, "failed start")]
    return " and ".join(f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in counts if count) or "a pause"
