"""What the jobs that a plan left waiting wait for, and how many of them are ahead of each. Pure."""

from collections.abc import Mapping

from orchestrator.core.fold import Record
from orchestrator.core.model import Job, Plan
from orchestrator.core.placement_options import summary, whole

WAITS = "waits for "


class Line:
    """Of one plan. Jobs that wait for the same stand in one line, in the order in which the planner looks at them:
    higher priority first, then by submission.
    """

    def __init__(self, plan: Plan, records: Mapping[str, Record]):
        self.plan = plan
        waiting = [records[job].job for job in plan.why_not if job in records]
        counts: dict[str, int] = {}
        self._ahead: dict[str, int] = {}
        for job in sorted(waiting, key=lambda job: (-job.priority, job.number, job.id)):
            what = whole(job, plan.why_not[job.id])
            self._ahead[job.id] = counts.get(what, 0) if what.startswith(WAITS) else 0
            counts[what] = counts.get(what, 0) + 1

    def why(self, job: Job) -> str:
        """Why it waits, and behind how many; "" for one that the plan says nothing of."""
        if job.id not in self.plan.why_not:
            return ""
        why, ahead = summary(job, self.plan.why_not[job.id]), self._ahead.get(job.id, 0)
        jobs = "1 job that waits for the same is" if ahead == 1 else f"{ahead} jobs that wait for the same are"
        return f"{why}; {jobs} ahead of it" if ahead else why
