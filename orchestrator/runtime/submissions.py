"""Jobs on their way into the store: known keys answer first, then what is new is checked and becomes durable."""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.errors import FleetError, SpecError, nearest
from orchestrator import entry_check
from orchestrator.checkpoint_address import of_this_machine
from orchestrator.checkpoints import CheckpointService
from orchestrator.code_archive import check_module_names
from orchestrator.core.explain import Never
from orchestrator.core.fold import Record, submitted
from orchestrator.core.model import Devices, Job
from orchestrator.core.throughput import with_code
from orchestrator.job_spec import JobSpec, parse_job
from orchestrator.job_spec_parts import DataSpec
from orchestrator.limits import TooManyJobs, max_waiting_jobs
from orchestrator.runtime import crash_hook
from orchestrator.runtime.code_archives import Packages
from orchestrator.runtime.data_store import DataStore, missing
from orchestrator.runtime.jobs import Jobs, NotStored
from orchestrator.runtime.secrets import resolve_secrets
from orchestrator.runtime.views import acknowledged
from orchestrator.store.event_store import EventStore
from orchestrator.store.idempotency import IdempotentRequest, StoredResponse
from orchestrator.store.unit_of_work import Stored

Data = dict[str, Any]
Seen = Callable[[], tuple[tuple[Devices, ...] | None, str]]
COUNT_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Submission:
    """A spec as it was written, the SHA-256 of its code archive or "", and an idempotency key or ""."""

    spec: Data
    package: str
    key: str

    @property
    def quick(self) -> bool:
        """To check it, no file has to be read and no node to be asked: others may wait for it."""
        return not self.package and not any(self.spec.get(name) for name in ("secrets", "checkpoint", "data"))


@dataclass(slots=True)
class _Accepting:
    """Whether it was accepted tells an error of the store's from one of the request's."""

    accept: Callable[[], StoredResponse]
    accepted: bool = False

    def __call__(self) -> StoredResponse:
        made = self.accept()
        self.accepted = True
        crash_hook.point("event:submitted:before")
        return made


class Submissions:
    """`seen` gives the devices to check against (None: none were ever seen) and why a job will wait, or "". `stored`
    gets the records of what was accepted; `count` tells how many jobs have not ended, `projects` those of the fleet.
    """

    def __init__(
        self,
        jobs: Jobs,
        store: EventStore,
        packages: Packages,
        data: DataStore,
        checkpoints: CheckpointService,
        seen: Seen,
        stored: Stored,
        count: Callable[[], int],
        projects: Callable[[], Collection[str]] = tuple,
    ):
        self._jobs, self._store, self._packages, self._data = jobs, store, packages, data
        self._checkpoints = checkpoints
        self._seen, self._stored, self._count, self._projects = seen, stored, count, projects
        self._never = Never(())
        self._most = max_waiting_jobs()
        self._waiting, self._counted_s = 0, float("-inf")

    def each(self, asked: Sequence[Submission]) -> list[Data | Exception]:
        """Of each what `acknowledged` keeps of it, or its error."""
        return self._once([(one.key, [one.spec, one.package], partial(self._one, one)) for one in asked])

    def many(self, jobs: list[tuple[Data, str]], key: str) -> Data:
        """Of specs with their packages: {"jobs": [{"id", "name"}], "note"}. The field of an error begins with `jobs.N`,
        N counting from 0.
        """
        (told,) = self._once([(key, jobs, partial(self._many, jobs))])
        if isinstance(told, Exception):
            raise told
        return told

    def _one(self, asked: Submission) -> StoredResponse:
        self._refuse_too_many(1)
        devices, note = self._seen()
        job = self._accepted(asked.spec, asked.package, "", devices, bool(note))
        return StoredResponse(acknowledged(job, note), (submitted(job, asked.spec, job.submitted_s),), 201)

    def _many(self, jobs: list[tuple[Data, str]]) -> StoredResponse:
        self._refuse_too_many(len(jobs))
        devices, note = self._seen()
        accepted = [self._accepted(*job, f"jobs.{n}", devices, bool(note)) for n, job in enumerate(jobs)]
        events = [submitted(job, spec, job.submitted_s) for job, (spec, _) in zip(accepted, jobs, strict=True)]
        return StoredResponse(
            {"jobs": [{"id": job.id, "name": job.name} for job in accepted], "note": note}, events, 201
        )

    def _once(self, asked: Sequence[tuple[str, Any, Callable[[], StoredResponse]]]) -> list[Data | Exception]:
        """Of (key, body, what accepts it). An error is NotStored, which says when to come back, where it is the store
        that cannot take what was accepted.
        """
        accepting = [_Accepting(accept) for _, _, accept in asked]
        keyed = [(key, digest(body) if key else "") for key, body, _ in asked]
        each = [IdempotentRequest(*k, make) for k, make in zip(keyed, accepting, strict=True)]
        try:
            told = self._store.once_each(each, self._durable)
        except FleetError as e:  # the keys could not be looked up
            raise NotStored.of(e) from e
        return [_not_stored(one) if made.accepted else one for one, made in zip(told, accepting, strict=True)]

    def _durable(self, records: list[Record]) -> None:
        crash_hook.point("event:submitted:after")
        self._stored(records)

    def _accepted(self, spec: Data, package: str, place: str, devices: tuple[Devices, ...] | None, waits: bool) -> Job:
        try:
            return self._acceptable(spec, package, devices, waits)
        except SpecError as e:
            if not place:
                raise
            message = e.message.removeprefix(f"{e.field}: ")
            raise SpecError(".".join(filter(None, (place, e.field))), message, e.remedy) from None

    def _acceptable(self, spec: Data, package: str, devices: tuple[Devices, ...] | None, waits: bool) -> Job:
        """Refuse now what could only fail later: unknown fields, absent folder or secret, resources nobody here has.

        `waits`: no node can be asked now.
        """
        checked = parse_job(spec)
        if not package and entry_check.is_in_folder(checked.entry):
            remedy = "upload the folder that has it: PUT /v1/packages/{sha}"
            raise SpecError("package", f"is required: {checked.entry} is a file in it", remedy)
        contents = self._packages.contents(package)
        check_module_names(contents.names, checked.task)
        self._refuse_data(checked, contents.names)
        self._refuse_project(checked.project)
        resolve_secrets(checked.secrets)
        if ":" in checked.checkpoint.resume_from and not waits:
            self._checkpoints.show(checked.checkpoint.resume_from)
        job = checked.to_job(self._jobs.new_id(checked.name or checked.task), time.time())
        if devices is not None and (impossible := self._never_on(devices)(job)):
            raise SpecError("resources", impossible, "`polyfleet inventory` shows what is here")
        return with_code(job, package, contents.content_sha)

    def _refuse_project(self, project: str) -> None:
        """A fleet without projects takes any: nothing is counted there."""
        known = self._projects()
        if project and known and project not in known:
            raise SpecError("project", f"the fleet has no project {project!r}", nearest(project, sorted(known)))

    def _refuse_data(self, spec: JobSpec, names: list[str]) -> None:
        """Data of the client's machine that was not sent, and mounts where the submitted folder has something."""
        for index, one in enumerate(spec.data):
            if of_this_machine(one.uri) and not (one.sha256 and self._data.has(one.sha256)):
                raise missing(f"data.{index}.uri", one.uri)
            check_module_names([f"{one.path}/x.py"], spec.task)
            if clash := next((name for name in names if _clash(name, one)), ""):
                told = f"{one.mount!r} is where the submitted folder has {clash!r}"
                raise SpecError(f"data.{index}.mount", told, "name another place in the job's folder")

    def _never_on(self, devices: tuple[Devices, ...]) -> Never:
        """What was found of the same devices before is kept."""
        if self._never.devices is not devices:
            self._never = Never(devices)
        return self._never

    def _refuse_too_many(self, more: int) -> None:
        """Counted once a second: the limit protects the server, and need not be exact."""
        if time.monotonic() - self._counted_s > COUNT_EVERY_S:
            self._waiting, self._counted_s = self._count(), time.monotonic()
        if self._waiting + more > self._most:
            raise TooManyJobs(self._waiting, self._most)
        self._waiting += more


def _clash(name: str, data: DataSpec) -> bool:
    """Whether a file of the submitted folder lies where data is shown, or as a file in the way to it."""
    return f"{name}/".startswith(f"{data.path}/") or f"{data.path}/".startswith(f"{name}/")


def _not_stored(told: Data | Exception) -> Data | Exception:
    return NotStored.of(told) if isinstance(told, FleetError) else told


def digest(body: Any) -> str:
    """Of a request's body, whatever the order of the keys in it."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()
