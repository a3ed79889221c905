"""Everything the server offers, as plain functions on plain data: the REST routes call exactly this.

Methods are synchronous and safe to call from many threads. They raise PolyfleetError and nothing else on purpose.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.errors import SpecError, UserError
from cluster.serialization import to_plain
from orchestrator.benchmark import throughput
from orchestrator.checkpoints import CheckpointService
from orchestrator.core.explain import Explanation, explain
from orchestrator.core.fold import Record
from orchestrator.core.messages import CancelAsked, MigrateAsked, Submitted
from orchestrator.core.model import Job
from orchestrator.core.offer import growth, offers
from orchestrator.core.states import TERMINAL
from orchestrator.core.throughput import with_code
from orchestrator.core.what_if import what_if
from orchestrator.job_files import JobFiles
from orchestrator.job_spec import parse_job
from orchestrator.resource_syntax import accelerators
from orchestrator.runtime import cleanup, jobs_page, repair
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.bandwidth_limit import Pace, copy_bytes_per_s
from orchestrator.runtime.benchmarks import Benchmarks
from orchestrator.runtime.cleanup import Housekeeping
from orchestrator.runtime.code_archives import Packages, Unnamed
from orchestrator.runtime.controller import Runtime
from orchestrator.runtime.data_moves import DataMoves
from orchestrator.runtime.data_store import DataStore
from orchestrator.runtime.exec_relay import Execs
from orchestrator.runtime.files_limit import FilesLimit, keep_files_bytes
from orchestrator.runtime.fleet_ready import FleetSeen
from orchestrator.runtime.health_snapshot import Watched
from orchestrator.runtime.histories import Histories
from orchestrator.runtime.host_rejoin import RejoinThread
from orchestrator.runtime.inbox import Inbox
from orchestrator.runtime.job_views import JobViews
from orchestrator.runtime.jobs import Jobs
from orchestrator.runtime.jobs_page import JobsPage, JobsWanted
from orchestrator.runtime.kept_logs import KeptLogs
from orchestrator.runtime.last_inventory import KnownDevices
from orchestrator.runtime.launch import Launcher
from orchestrator.runtime.liveness import Pulse
from orchestrator.runtime.log_preservation import Keeping
from orchestrator.runtime.logs import Logs
from orchestrator.runtime.repair import RepairThread
from orchestrator.runtime.submissions import Submission, Submissions, digest
from orchestrator.runtime.views import FIELDS, accepted_view
from orchestrator.service_benchmarks import BenchmarkVerbs
from orchestrator.service_checkpoints import CheckpointVerbs
from orchestrator.service_files import FileVerbs
from orchestrator.service_fleet import FleetVerbs
from orchestrator.service_logs import LogVerbs
from orchestrator.store.database_setting import open_store
from orchestrator.store.idempotency import StoredResponse

CHANGES_AT_ONCE = 1000


def _kinds(text: str) -> tuple[str, ...]:
    try:
        return accelerators(text)[0].kinds
    except UserError as e:
        raise SpecError("to", e.message, e.remedy) from None


class _AbsentError(Exception):
    """No request had that key."""


class Service(LogVerbs, FileVerbs, CheckpointVerbs, FleetVerbs, BenchmarkVerbs):
    """One per server process. `home` holds the store, uploaded folders and the fleet's record."""

    def __init__(self, home: Path):
        self.store = open_store(home)
        self.jobs_table = Jobs(self.store)
        self.packages = Packages(home / "packages")
        inbox = Inbox()
        pulse = Pulse()
        self.agents = Agents(inbox.put, pulse.repaired)
        self._checkpoints = CheckpointService(self.agents, Pace(copy_bytes_per_s()), self.jobs_table.id_of)
        self._files = JobFiles(self.agents)
        self.data = DataStore(home / "data")
        moves = DataMoves(self.agents, self._checkpoints, self.data)
        launcher = Launcher(self.agents, self.packages, self._checkpoints, moves)
        kept = KeptLogs(home / "kept-logs", self.agents)
        self._rates = throughput.RateTable(self.store.benchmarks)
        self._repair = RepairThread(pulse.repaired) if repair.wanted() else None
        keeping = Keeping(kept, self.agents, self.jobs_table)
        served = (self.jobs_table, self.store, self.agents, launcher, inbox, keeping)
        self.runtime = Runtime(*served, self._rates.newest, pulse, self._repair, Histories(self.jobs_table).newest)
        known = KnownDevices(home / "inventory.json")
        self._fleet = FleetSeen(self.runtime, self.agents, known)
        self._views = JobViews(self.jobs_table, self.runtime, launcher.doing, known)
        parts = (self.jobs_table, self.store, self.packages, self.data, self._checkpoints)
        self._submissions = Submissions(
            *parts,
            self._fleet.devices,
            self._stored,
            lambda: len(self.runtime.control.records),
            lambda: self.runtime.control.projects,
        )
        rejoin = RejoinThread(lambda: [name for name, _ in self.agents.ready()], pulse.repaired)
        self._repairs = (self._repair, rejoin) if self._repair else ()
        self._watched = Watched(self.store, self.agents, self.runtime, self._repairs)
        self._logs = Logs(self.agents, kept)
        self._execs = Execs(self.agents)
        verbs = (self.submit, self.cancel, self.packages.contents)
        self._benchmarks = Benchmarks(self.store.benchmarks, self.jobs_table, self.agents, *verbs)
        keep_s = cleanup.keep_jobs_s()
        forget = cleanup.forget_on(self.agents)
        named = (self.store.jobs.naming, self.store.jobs.exists, self._benchmarks.packages)
        unnamed = Unnamed(self.packages, self.agents, *named)

        def remove_unnamed() -> None:
            self.data.remove_unused(self._data_in_use)
            unnamed.remove()
            kept.remove_unknown(self.store.jobs.exists)

        tidy = FilesLimit(self.agents, self.jobs_table, keep_files_bytes(), then=remove_unnamed).remove
        self._housekeeping = Housekeeping(self.jobs_table, self.store, forget, keep_s, self._distrust, tidy)
        self.runtime.start()
        self._benchmarks.take_up()
        self._housekeeping.start()
        for thread in self._repairs:
            thread.start()

    def close(self) -> None:
        self._housekeeping.close()
        for thread in self._repairs:
            thread.close()
        self._benchmarks.close()
        self.runtime.close()
        self.store.close()

    # -- jobs

    def submit(self, spec: dict[str, Any], package: str, key: str) -> dict[str, Any]:
        """As `submit_each` with one job; raises its error."""
        (told,) = self.submit_each([Submission(spec, package, key)])
        if isinstance(told, Exception):
            raise told
        return told

    def submit_each(self, asked: Sequence[Submission]) -> list[dict[str, Any] | Exception]:
        """The jobs as they were accepted, or why one was not. Durable when it returns. The same key gives the same
        answer; with another body it is a Conflict.
        """
        told = self._submissions.each(asked)
        return [one if isinstance(one, Exception) else accepted_view(one) for one in told]

    def submit_many(self, jobs: list[tuple[dict[str, Any], str]], key: str) -> dict[str, Any]:
        """Specs with their packages, all of them or none: {"jobs": [{"id", "name"}], "note"}"""
        return self._submissions.many(jobs, key)

    def _distrust(self, job: str, why: str) -> None:
        self.runtime.post(CancelAsked(job, f"its history in the job store is damaged: {why}"))

    def _data_in_use(self) -> set[str]:
        return {one.sha256 for record in self.runtime.control.records.values() for one in record.job.data}

    def _stored(self, records: list[Record]) -> None:
        """The controller knows a job before anybody else sees it, and can ask for anything."""
        self.runtime.post(Submitted(tuple(records)))

    def job(self, ref: str) -> dict[str, Any]:
        return self._views.whole(self.jobs_table.find(ref))

    def jobs(self, wanted: JobsWanted) -> JobsPage:
        """One page of the list, the newest last, and what to ask for next."""
        fields = wanted.fields or FIELDS
        found, before = jobs_page.page(self.jobs_table, wanted)
        return JobsPage([self._views.fields(record, fields) for record in found], before)

    def cancel(self, ref: str) -> dict[str, Any]:
        """Wins over whatever the job does next; a job that has ended stays as it is."""
        record = self.jobs_table.find(ref)
        if record.job.state not in TERMINAL:
            self.runtime.ask(CancelAsked(record.job.id))
        return self.job(record.job.id)

    def migrate(self, ref: str, to: str) -> dict[str, Any]:
        """`to` is a pool of the fleet, else a kind or back end. Refused while nothing is free there."""
        job = self.jobs_table.find(ref).job
        asked = MigrateAsked(job.id, pool=to) if to in self._fleet.pools() else MigrateAsked(job.id, kinds=_kinds(to))
        self.runtime.ask(asked)
        return self.job(job.id)

    def explain(self, ref: str, changes: Sequence[str] = ()) -> dict[str, Any]:
        """`changes` of the fleet, as core/what_if.py reads them: then the answer is of that fleet, and `if` has what
        would be different for others. Raises SpecError for one that is none.
        """
        record, seen = self.jobs_table.find(ref), self._fleet.snapshot()
        told = self._what_if(record.job, seen, changes) if changes else self._explained(record.job, seen)
        missed = [why for why in (record.missed, record.missed_files) if why]
        reason = self._views.why(record) or record.reason
        if told["runs"] and record.attempts:
            told["runs"]["reason"] = record.attempts[-1].reason
        return {"state": str(record.job.state), "reason": reason, "missed": missed, **told}

    def plan(self, spec: dict[str, Any], content_sha: str) -> dict[str, Any]:
        """What would happen to `spec` if it were submitted now. Its folder need not be uploaded: measurements of it are
        found by `content_sha`.
        """
        return self._explained(_as_new(spec, content_sha), self._fleet.snapshot())

    def offers(self, spec: dict[str, Any], content_sha: str) -> dict[str, Any]:
        """Where `spec` could run if it were submitted now; `content_sha` as in `plan`."""
        job, seen = _as_new(spec, content_sha), self._fleet.snapshot()
        told: dict[str, Any] = to_plain(offers(job, seen, growth(self.runtime.control, seen.now_s)))
        return told

    def _what_if(self, job: Job, seen: Any, changes: Sequence[str]) -> dict[str, Any]:
        running = {attempt.job: self.jobs_table.find(attempt.job).job for attempt in seen.running}
        found = what_if(job, seen, changes, running)
        different: dict[str, Any] = {"changes": list(found.changes), "others": to_plain(found.others)}
        return {**to_plain(found.explanation), "if": different}

    def _explained(self, job: Job, seen: Any) -> dict[str, Any]:
        told: Explanation = explain(job, seen)
        plain: dict[str, Any] = to_plain(told)
        return plain

    def history(self, ref: str) -> list[dict[str, Any]]:
        return [self._views.event(e) for e in self.store.events_of(self.jobs_table.find(ref).job.id)]

    def reports(self, ref: str, after: int) -> list[dict[str, Any]]:
        """The metrics a job reported, oldest first, each with its `seq`."""
        return self.store.reports(self.jobs_table.find(ref).job.id, after)

    def changes(self, after: int, timeout_s: float) -> dict[str, Any]:
        """Events past `after`, as soon as there are any, else an empty list after `timeout_s`. One goes on from `last`,
        up to which events may be gone.
        """
        self.store.wait(after, timeout_s)
        events, last = self.store.read_on(after, CHANGES_AT_ONCE)
        return {"events": [self._views.event(e) for e in events], "last": last}

    # -- requests with a key

    def answered(self, key: str, asked: Any) -> dict[str, Any] | None:
        """What a request with this key was answered with; None when there was none. Raises Conflict when that asked for
        something else.
        """

        def absent() -> StoredResponse:
            raise _AbsentError

        try:
            return self.store.once(key, digest(asked), absent)
        except _AbsentError:
            return None

    def answer(self, key: str, asked: Any, told: dict[str, Any]) -> dict[str, Any]:
        """Keep `told` as the answer to this key, durably. Without a key nothing is kept."""
        return self.store.once(key, digest(asked), lambda: StoredResponse(told))

    # -- folders

    def store_package(self, sha: str, data_path: Path) -> None:
        self.packages.keep(sha, data_path)

    def has_package(self, sha: str) -> bool:
        return self.packages.has(sha)


def _as_new(spec: dict[str, Any], content_sha: str) -> Job:
    return with_code(parse_job(spec).to_job("new", time.time()), "", content_sha)
