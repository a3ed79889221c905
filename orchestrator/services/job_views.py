"""Views of jobs and events for the API, with the state of the running fleet."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from orchestrator.core.attempt.story import story
from orchestrator.core.attempt.suspicion import waiting_reason
from orchestrator.core.controller.attempts import node_of
from orchestrator.core.controller.messages import Now
from orchestrator.core.explanation.waiting_queue import WaitingQueue
from orchestrator.core.jobs.fold import Record
from orchestrator.core.jobs.progress import device_seconds_by_kind
from orchestrator.core.jobs.remaining_time import Evidence
from orchestrator.core.model import Event, Plan, Progress
from orchestrator.core.states import WAITING
from orchestrator.core.timing import NODE_SILENT_S
from orchestrator.runtime.clock import now
from orchestrator.runtime.controller.controller import ControllerThread
from orchestrator.runtime.health.last_inventory import LastInventory
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.services.views import job_view, placement_view, progress_view
from orchestrator.units import iso, when
from orchestrator.views.jobs import JobEvent, JobView, StoryStepView


class JobViews:
    """Makes views. `launching`: what a launch does now, by attempt key. `inventory`: has last contacts."""

    def __init__(self, jobs: Jobs, runtime: ControllerThread, launching: Mapping[str, str], inventory: LastInventory):
        self._jobs, self._runtime, self._launching, self._inventory = jobs, runtime, launching, inventory
        self._line = WaitingQueue(Plan(), {})

    def fields(self, record: Record, fields: tuple[str, ...]) -> JobView:
        """The view of a job with some of its keys alone."""
        view: Mapping[str, Any] = self.view(record)
        return cast(JobView, {name: view[name] for name in fields})

    def view(self, record: Record) -> JobView:
        metrics = self._jobs.metrics(record.job.id) if record.attempts else {}
        progress = progress_view(record, self._estimate_inputs(record))
        return job_view(record, metrics, self.waiting_reason(record), progress, self._known_until_s(record))

    def _estimate_inputs(self, record: Record) -> Evidence:
        throughput, history = self._runtime.measurements
        control = self._runtime.control
        throughput = replace(throughput, step_rates=control.step_rates)
        progress = control.progress.get(record.job.id) or Progress()
        return Evidence(throughput, progress, history, device_seconds_by_kind(record.attempts, now().wall_s))

    def waiting_reason(self, record: Record) -> str:
        """Why a job waits, in one sentence; "" for other jobs.

        It is pending, its node is silent or down, or its launch takes long.
        """
        if record.live_attempt is not None:
            if trouble := self._runtime.problem:
                at = when(iso(self._known_until_s(record)))
                return f"{trouble}; it was {record.job.state} at the last contact, {at} UTC"
            activity = self._launching.get(f"{record.job.id}.{record.live_attempt.epoch}", "")
            return waiting_reason(self._runtime.control, record.job.id, now(), activity)
        if record.job.state not in WAITING:
            return ""
        if problem := self._runtime.problem or self._runtime.hold_reason:
            return problem
        if (line := self._line).plan is not self._runtime.plan:
            line = self._line = WaitingQueue(self._runtime.plan, self._runtime.control.records)
        queue_reason, paused_s = (
            line.waiting_reason(record.job),
            self._runtime.control.paused_until_s.get(record.job.id, 0.0),
        )
        return (
            f"{record.reason}; {queue_reason}"
            if queue_reason and record.reason and paused_s > now().s
            else queue_reason
        )

    def _known_until_s(self, record: Record) -> float | None:
        """Time of the job's last confirmed state (seconds since the epoch); None while all its nodes respond."""
        if (live := record.live_attempt) is None or not live.allocation:
            return None
        at = now()
        last_contact_s = min(self._last_contact_s(node_of(devices_id), at) for devices_id, _ in live.allocation)
        last_event_s = max(live.placed_s, live.started_s or 0.0)
        is_silent = self._runtime.problem or last_contact_s < at.wall_s - NODE_SILENT_S
        return max(last_event_s, last_contact_s) if is_silent else None

    def _last_contact_s(self, name: str, at: Now) -> float:
        """Last contact with a node, seconds since the epoch; 0 if unknown."""
        node = None if self._runtime.problem else self._runtime.control.nodes.get(name)
        return self._inventory.last_contact_s(name) if node is None else at.wall_s - node.silent_s(at.s)

    def story(self, job: str) -> list[StoryStepView]:
        """What followed for a job from the newest messages, oldest first."""
        steps = story(self._runtime.story, job)
        return [
            {"number": s.number, "handled_at": iso(s.wall_s) or "", "message": s.message, "changes": [*s.changes]}
            for s in steps
        ]

    def event(self, event: Event) -> JobEvent:
        record = self._jobs.get(event.job)
        state = str(record.job.state) if record else ""
        data = {k: v for k, v in event.data.items() if k not in ("spec", "job")}
        if event.event == "placed":
            data = placement_view(data)
        view = {"seq": event.seq, "occurred_at": iso(event.time_s), "job": event.job, "event": event.event,
                "attempt": event.epoch, "state": state, "data": data}  # fmt: skip
        return cast(JobEvent, view)
