"""Reasons of jobs that wait after a plan, and the number of jobs ahead of each. Pure."""

from collections.abc import Mapping

from orchestrator.core.jobs.fold import Record
from orchestrator.core.model import Job, Plan
from orchestrator.core.plan.options.placement_options import fleet_reasons, summary

WAITS_PREFIX = "waits for "


class WaitingQueue:
    """Waiting jobs of one plan.

    Jobs with the same reason form a queue in the planner's order: higher priority first, then by submission.
    """

    def __init__(self, plan: Plan, records: Mapping[str, Record]):
        self.plan = plan
        waiting = [records[job].job for job in plan.why_not if job in records]
        counts: dict[str, int] = {}
        self._ahead: dict[str, int] = {}
        for job in sorted(waiting, key=lambda job: (-job.priority, job.number, job.id)):
            awaited = fleet_reasons(job, plan.why_not[job.id])
            self._ahead[job.id] = counts.get(awaited, 0) if awaited.startswith(WAITS_PREFIX) else 0
            counts[awaited] = counts.get(awaited, 0) + 1

    def waiting_reason(self, job: Job) -> str:
        """Say why a job waits and how many jobs are ahead of it; "" if it is not in the plan."""
        if job.id not in self.plan.why_not:
            return ""
        why, ahead = summary(job, self.plan.why_not[job.id]), self._ahead.get(job.id, 0)
        jobs = "1 job that waits for the same is" if ahead == 1 else f"{ahead} jobs that wait for the same are"
        return f"{why}; {jobs} ahead of it" if ahead else why
