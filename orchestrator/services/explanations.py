"""What the planner does with a job: why it is in its state, what would happen to a new one, and where it could run."""

import time
from collections.abc import Sequence
from typing import Any, cast

from cluster.serialization import to_plain
from orchestrator.core.explanation.explain import explain
from orchestrator.core.explanation.offer import growth, offers
from orchestrator.core.explanation.what_if import what_if
from orchestrator.core.model import Job, Snapshot
from orchestrator.core.throughput import with_code
from orchestrator.runtime.controller.controller import ControllerThread
from orchestrator.runtime.health.fleet_ready import FleetReadiness
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.services.job_views import JobViews
from orchestrator.services.views import placement_view
from orchestrator.spec.job_spec import parse_job
from orchestrator.units import iso
from orchestrator.views.plans import ExplanationView, JobExplanation, OffersView


class Explanations:
    """Explains jobs for the fleet as it is now, or with changes. Methods raise FleetError if no fleet is served."""

    def __init__(self, jobs: Jobs, runtime: ControllerThread, readiness: FleetReadiness, views: JobViews):
        self._jobs, self._runtime, self._readiness, self._views = jobs, runtime, readiness, views

    def explain(self, ref: str, changes: Sequence[str] = ()) -> JobExplanation:
        """Explain a job's state. With `changes` of the fleet (syntax: core/explanation/what_if.py) the result is for
        the changed fleet, and `if` contains the effects on other jobs. Raises SpecError for an invalid change.
        """
        record, fleet = self._jobs.find(ref), self._readiness.snapshot()
        explanation = self._what_if(record.job, fleet, changes) if changes else _explain(record.job, fleet)
        missing = [text for text in (record.missed, record.missed_files) if text]
        reason = self._views.waiting_reason(record) or record.reason
        if explanation["runs"] and record.attempts:
            explanation["runs"]["reason"] = record.attempts[-1].reason
        state: dict[str, Any] = {"state": str(record.job.state), "reason": reason, "missed": missing}
        return cast(JobExplanation, state | explanation)

    def plan(self, spec: dict[str, Any], content_sha: str) -> ExplanationView:
        """What the planner would do if `spec` were submitted now. Its folder need not be uploaded: measurements of it
        are looked up by `content_sha`.
        """
        return cast(ExplanationView, _explain(_new_job(spec, content_sha), self._readiness.snapshot()))

    def offers(self, spec: dict[str, Any], content_sha: str) -> OffersView:
        """List where `spec` could run if it were submitted now; `content_sha` as in `plan`."""
        job, fleet = _new_job(spec, content_sha), self._readiness.snapshot()
        result = offers(job, fleet, growth(self._runtime.control, fleet.now_s))
        view = placement_view(to_plain(result))
        for offer in view["offers"]:
            if rate := offer["rate"]:
                rate["updated_at"] = iso(rate.pop("at_s"))
        return cast(OffersView, view)

    def _what_if(self, job: Job, fleet: Snapshot, changes: Sequence[str]) -> dict[str, Any]:
        running = {attempt.job: self._jobs.find(attempt.job).job for attempt in fleet.running}
        outcome = what_if(job, fleet, changes, running)
        effects: dict[str, Any] = {"changes": list(outcome.changes), "others": to_plain(outcome.others)}
        return {**placement_view(to_plain(outcome.explanation)), "if": effects}


def _explain(job: Job, fleet: Snapshot) -> dict[str, Any]:
    return cast(dict[str, Any], placement_view(to_plain(explain(job, fleet))))


def _new_job(spec: dict[str, Any], content_sha: str) -> Job:
    return with_code(parse_job(spec).to_job("new", time.time()), "", content_sha)
