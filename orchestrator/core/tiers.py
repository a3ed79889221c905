"""Who waits, by priority, and who is not tried now."""

from collections import defaultdict
from collections.abc import Iterable

from orchestrator.core.expected_duration import tier
from orchestrator.core.model import Job, Running, Snapshot
from orchestrator.core.placement_options import Reasons
from orchestrator.core.policies import fifo


def tiers(waiting: Iterable[Job], seen: Snapshot, movable: Iterable[Running]) -> list[tuple[int, list[Job]]]:
    """(priority, jobs), the highest first; also those in which nobody waits, where equals of `movable` may be moved."""
    found: dict[int, list[Job]] = defaultdict(list)
    for job in waiting:
        found[tier(job, seen)].append(job)
    if seen.ageing_s:  # those that have aged into a tier are equals there
        found |= {at: fifo.by_number(jobs) for at, jobs in found.items()}
    found |= {attempt.priority: found[attempt.priority] for attempt in movable}
    return sorted(found.items(), reverse=True)


def pauses(waiting: Iterable[Job], seen: Snapshot) -> dict[str, Reasons]:
    """Why some of those that wait are not tried now, in their order."""
    until = {job: at_s for job, at_s in seen.paused_until_s.items() if at_s > seen.now_s}
    if not until:
        return {}
    return {job.id: _reasons(job, until[job.id] - seen.now_s) for job in waiting if job.id in until}


def _reasons(job: Job, pause_s: float) -> Reasons:
    sentence = f"is tried again in {pause_s:.1f} s, after {_troubles(job)}"
    return {(index, ""): sentence for index in range(len(job.candidates))}


def _troubles(job: Job) -> str:
    told = [(job.restarts, "failure"), (job.interruptions, "interruption"), (job.refusals, "failed start")]
    return " and ".join(f"{count} {word}{'s' if count > 1 else ''}" for count, word in told if count) or "a pause"
