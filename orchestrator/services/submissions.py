"""Accept submissions: return stored responses for repeated idempotency keys, check new jobs, and store them."""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from cluster.errors import FleetError, SpecError, nearest
from orchestrator.code_archives.code_archive import check_module_names
from orchestrator.core.explanation.explain import ImpossibleCheck
from orchestrator.core.jobs.fold import Record, submitted
from orchestrator.core.model import Devices, Job
from orchestrator.core.throughput import with_code
from orchestrator.limits import TooManyJobs, max_waiting_jobs
from orchestrator.runtime import crash_points
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService
from orchestrator.runtime.controller.secrets import resolve_secrets
from orchestrator.runtime.files.code_archives import ServerCodeArchives
from orchestrator.runtime.files.data_store import DataStore, not_uploaded
from orchestrator.runtime.jobs.jobs import Jobs, StoreUnavailable
from orchestrator.services.views import accepted_view, acknowledged
from orchestrator.spec import entry_check
from orchestrator.spec.checkpoint_address import is_local_path
from orchestrator.spec.job_spec import JobSpec, parse_job
from orchestrator.spec.job_spec_parts import DataSpec
from orchestrator.store.events.event_store import EventStore
from orchestrator.store.events.idempotency import IdempotentRequest, StoredResponse
from orchestrator.store.events.unit_of_work import Stored
from orchestrator.views.jobs import AcceptedView, JobView

Data = dict[str, Any]
DevicesNow = Callable[[], tuple[tuple[Devices, ...] | None, str]]
COUNT_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Submission:
    """A spec as the user wrote it, the SHA-256 of its code archive or "", and an idempotency key or ""."""

    spec: Data
    code_archive: str
    key: str

    @property
    def is_quick(self) -> bool:
        """Whether it is checked without reading files or calling nodes, so that others may wait for it."""
        return not self.code_archive and not any(self.spec.get(name) for name in ("secrets", "checkpoint", "data"))


@dataclass(slots=True)
class _Acceptance:
    """Calls `accept`. `accepted` then distinguishes an error of the store from an error of the request."""

    accept: Callable[[], StoredResponse]
    accepted: bool = False

    def __call__(self) -> StoredResponse:
        response = self.accept()
        self.accepted = True
        crash_points.point("event:submitted:before")
        return response


class Submissions:
    """Accepts jobs.

    `devices_now` returns the devices to check against (None: not reported yet) and why a job will wait, or "". `stored`
    gets the records of accepted jobs. `count` returns the number of open jobs, `projects` the fleet's projects.
    """

    def __init__(
        self,
        jobs: Jobs,
        store: EventStore,
        code_archives: ServerCodeArchives,
        data: DataStore,
        checkpoints: CheckpointService,
        devices_now: DevicesNow,
        stored: Stored,
        count: Callable[[], int],
        projects: Callable[[], Collection[str]] = tuple,
    ):
        self._jobs, self._store, self._code_archives, self._data = jobs, store, code_archives, data
        self._checkpoints = checkpoints
        self._devices_now, self._on_accepted, self._count, self._projects = devices_now, stored, count, projects
        self._never = ImpossibleCheck(())
        self._max_open = max_waiting_jobs()
        self._waiting, self._counted_s = 0, float("-inf")

    def submit(self, spec: Data, code_archive: str = "", key: str = "") -> JobView:
        """Submit one job like `submit_each`; raises its error."""
        (result,) = self.submit_each([Submission(spec, code_archive, key)])
        if isinstance(result, Exception):
            raise result
        return result

    def submit_each(self, submissions: Sequence[Submission]) -> list[JobView | Exception]:
        """Submit independent jobs; return the view of each, or its error. They are stored durably before this returns.
        A repeated key returns the same result, or Conflict if the body differs.
        """
        results = self._process(
            [
                (submission.key, [submission.spec, submission.code_archive], partial(self._accept_one, submission))
                for submission in submissions
            ]
        )
        return [one if isinstance(one, Exception) else accepted_view(one) for one in results]

    def submit_all(self, jobs: list[tuple[Data, str]], key: str) -> AcceptedView:
        """Submit (spec, code archive) pairs together.

        The field of a SpecError starts with `jobs.N`, with N from 0.
        """
        (result,) = self._process([(key, jobs, partial(self._accept_all, jobs))])
        if isinstance(result, Exception):
            raise result
        return cast(AcceptedView, result)

    def _accept_one(self, submission: Submission) -> StoredResponse:
        self._check_limit(1)
        devices, note = self._devices_now()
        job = self._accept(submission.spec, submission.code_archive, "", devices, bool(note))
        return StoredResponse(acknowledged(job, note), (submitted(job, submission.spec, job.submitted_s),), 201)

    def _accept_all(self, jobs: list[tuple[Data, str]]) -> StoredResponse:
        self._check_limit(len(jobs))
        devices, note = self._devices_now()
        accepted = [self._accept(*job, f"jobs.{n}", devices, bool(note)) for n, job in enumerate(jobs)]
        events = [submitted(job, spec, job.submitted_s) for job, (spec, _) in zip(accepted, jobs, strict=True)]
        return StoredResponse(
            {"jobs": [{"id": job.id, "name": job.name} for job in accepted], "note": note}, events, 201
        )

    def _process(self, requests: Sequence[tuple[str, Any, Callable[[], StoredResponse]]]) -> list[Data | Exception]:
        """Process (key, body, function that accepts it) tuples.

        If the store cannot write an accepted request, its error is StoreUnavailable, which says when to retry.
        """
        accepting = [_Acceptance(accept) for _, _, accept in requests]
        keyed = [(key, digest(body) if key else "") for key, body, _ in requests]
        keyed_requests = [IdempotentRequest(*k, make) for k, make in zip(keyed, accepting, strict=True)]
        try:
            results = self._store.idempotent_each(keyed_requests, self._on_durable)
        except FleetError as e:  # the keys could not be looked up
            raise StoreUnavailable.from_error(e) from e
        return [
            _as_unavailable(result) if acceptance.accepted else result
            for result, acceptance in zip(results, accepting, strict=True)
        ]

    def _on_durable(self, records: list[Record]) -> None:
        crash_points.point("event:submitted:after")
        self._on_accepted(records)

    def _accept(
        self, spec: Data, code_archive: str, prefix: str, devices: tuple[Devices, ...] | None, is_waiting: bool
    ) -> Job:
        try:
            return self._check_spec(spec, code_archive, devices, is_waiting)
        except SpecError as e:
            if not prefix:
                raise
            message = e.message.removeprefix(f"{e.field}: ")
            raise SpecError(".".join(filter(None, (prefix, e.field))), message, e.remedy) from None

    def _check_spec(self, spec: Data, code_archive: str, devices: tuple[Devices, ...] | None, is_waiting: bool) -> Job:
        """Check a spec and make its job.

        Raises SpecError for what would fail later: unknown fields, a missing folder or secret, resources that no node
        has.

        `is_waiting`: nodes cannot be reached now, so checkpoints are not checked.
        """
        checked = parse_job(spec)
        if not code_archive and entry_check.is_in_folder(checked.entry):
            remedy = "upload the folder that contains it: PUT /v1/code-archives/{sha}"
            raise SpecError("code_archive", f"is required: {checked.entry} is a file in it", remedy)
        contents = self._code_archives.contents(code_archive)
        check_module_names(contents.names, checked.task)
        self._check_data(checked, contents.names)
        self._check_project(checked.project)
        resolve_secrets(checked.secrets)
        if ":" in checked.checkpoint.resume_from and not is_waiting:
            self._checkpoints.show(checked.checkpoint.resume_from)
        job = checked.to_job(self._jobs.new_id(checked.name or checked.task), time.time())
        if devices is not None and (impossible := self._impossible_check(devices)(job)):
            raise SpecError("resources", impossible, "`polyfleet inventory` shows what is here")
        return with_code(job, code_archive, contents.content_sha)

    def _check_project(self, project: str) -> None:
        """Check the project's name. A fleet without projects accepts any, because it has no quotas."""
        projects = self._projects()
        if project and projects and project not in projects:
            raise SpecError("project", f"the fleet has no project {project!r}", nearest(project, sorted(projects)))

    def _check_data(self, spec: JobSpec, names: list[str]) -> None:
        """Raise SpecError for client data that was not uploaded, and mounts that overlap the code archive."""
        for index, data in enumerate(spec.data):
            if is_local_path(data.uri) and not (data.sha256 and self._data.is_stored(data.sha256)):
                raise not_uploaded(f"data.{index}.uri", data.uri)
            check_module_names([f"{data.path}/x.py"], spec.task)
            if clash := next((name for name in names if _overlaps(name, data)), ""):
                message = f"{data.mount!r} overlaps {clash!r} of the submitted folder"
                raise SpecError(f"data.{index}.mount", message, "choose another path in the job's folder")

    def _impossible_check(self, devices: tuple[Devices, ...]) -> ImpossibleCheck:
        """The check of impossible requests for these devices, cached while the devices are the same."""
        if self._never.devices is not devices:
            self._never = ImpossibleCheck(devices)
        return self._never

    def _check_limit(self, more: int) -> None:
        """Raise TooManyJobs at the limit.

        Jobs are counted once a second: the limit protects the server and need not be exact.
        """
        if time.monotonic() - self._counted_s > COUNT_EVERY_S:
            self._waiting, self._counted_s = self._count(), time.monotonic()
        if self._waiting + more > self._max_open:
            raise TooManyJobs(self._waiting, self._max_open)
        self._waiting += more


def _overlaps(name: str, data: DataSpec) -> bool:
    """Whether a file of the submitted folder is at or below the mount of the data, or is a parent of it."""
    return f"{name}/".startswith(f"{data.path}/") or f"{data.path}/".startswith(f"{name}/")


def _as_unavailable(result: Data | Exception) -> Data | Exception:
    return StoreUnavailable.from_error(result) if isinstance(result, FleetError) else result


def digest(body: Any) -> str:
    """SHA-256 of a request's body, independent of the order of keys."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()
