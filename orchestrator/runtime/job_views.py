"""Jobs and their events as the server shows them."""

from collections.abc import Mapping
from typing import Any

from orchestrator.core.fencing import waits_for
from orchestrator.core.fold import Record
from orchestrator.core.line import Line
from orchestrator.core.model import Event, Plan, Progress
from orchestrator.core.progress import ran_on
from orchestrator.core.remaining import Known
from orchestrator.core.states import WAITING
from orchestrator.runtime.controller import Runtime
from orchestrator.runtime.jobs import Jobs
from orchestrator.runtime.steps import now
from orchestrator.runtime.views import job_view, progress_view


class JobViews:
    """`launching` tells by the key of an attempt what its launch does now."""

    def __init__(self, jobs: Jobs, runtime: Runtime, launching: Mapping[str, str]):
        self._jobs, self._runtime, self._launching = jobs, runtime, launching
        self._line = Line(Plan(), {})

    def fields(self, record: Record, fields: tuple[str, ...]) -> dict[str, Any]:
        whole = self.whole(record)
        return {name: whole[name] for name in fields}

    def whole(self, record: Record) -> dict[str, Any]:
        metrics = self._jobs.metrics(record.job.id) if record.attempts else {}
        return job_view(record, metrics, self.why(record), progress_view(record, self._known(record)))

    def _known(self, record: Record) -> Known:
        throughput, history = self._runtime.measured
        progress = self._runtime.control.progress.get(record.job.id) or Progress()
        return Known(throughput, progress, history, ran_on(record.attempts, now().wall_s))

    def why(self, record: Record) -> str:
        """Why a waiting job, one whose node is silent or down, or one whose launch takes long waits, in one
        sentence; "" for others.
        """
        if record.live is not None:
            if trouble := self._runtime.trouble:
                return f"{trouble}; that is its state when its node last answered"
            doing = self._launching.get(f"{record.job.id}.{record.live.epoch}", "")
            return waits_for(self._runtime.control, record.job.id, now(), doing)
        if record.job.state not in WAITING:
            return ""
        if waits := self._runtime.trouble or self._runtime.holding:
            return waits
        if (line := self._line).plan is not self._runtime.planned:
            line = self._line = Line(self._runtime.planned, self._runtime.control.records)
        return line.why(record.job)

    def event(self, event: Event) -> dict[str, Any]:
        record = self._jobs.get(event.job)
        state = str(record.job.state) if record else ""
        data = {k: v for k, v in event.data.items() if k not in ("spec", "job")}
        return {"seq": event.seq, "time": event.time_s, "job": event.job, "event": event.event, "epoch": event.epoch,
                "state": state, **{"data": data}}  # fmt: skip
