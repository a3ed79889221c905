"""The parts of the server, built and connected here; the verbs of `orchestrator/verbs` call them.

Methods are synchronous and thread-safe. The only errors that they raise deliberately are PolyfleetErrors.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.host.copy_rate import copy_bytes_per_s
from orchestrator.core.controller.messages import CancelRequested, Submitted
from orchestrator.core.jobs.fold import Record
from orchestrator.core.states import TERMINAL
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.benchmarks import throughput
from orchestrator.runtime.benchmarks.benchmarks import Benchmarks
from orchestrator.runtime.checkpoints.bandwidth_limit import RateLimit
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService
from orchestrator.runtime.controller import repair
from orchestrator.runtime.controller.controller import ControllerThread
from orchestrator.runtime.controller.inbox import Inbox, Liveness
from orchestrator.runtime.controller.launch import Launcher
from orchestrator.runtime.controller.repair import RepairThread
from orchestrator.runtime.files.code_archives import ServerCodeArchives, UnusedArchives
from orchestrator.runtime.files.data_moves import DataMoves
from orchestrator.runtime.files.data_store import DataStore
from orchestrator.runtime.files.job_files import JobFileService
from orchestrator.runtime.health.fleet_ready import FleetReadiness
from orchestrator.runtime.health.health_snapshot import HealthCollector
from orchestrator.runtime.health.host_rejoin import RejoinThread
from orchestrator.runtime.health.last_inventory import LastInventory
from orchestrator.runtime.jobs import cleanup
from orchestrator.runtime.jobs.cleanup import Housekeeping
from orchestrator.runtime.jobs.exec_relay import ExecRelay
from orchestrator.runtime.jobs.files_limit import FilesLimit, keep_files_bytes
from orchestrator.runtime.jobs.histories import Histories
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.runtime.jobs.log_copies import LogCopies
from orchestrator.runtime.jobs.log_preservation import LogPreservation
from orchestrator.runtime.jobs.logs import JobLogs
from orchestrator.services.explanations import Explanations
from orchestrator.services.job_views import JobViews
from orchestrator.services.submissions import Submissions, digest
from orchestrator.store.events.database_setting import open_store
from orchestrator.store.events.idempotency import StoredResponse
from orchestrator.views.jobs import ChangesPage

MAX_CHANGES = 1000


class _NotStoredError(Exception):
    """No request with that key is stored."""


class Service:
    """One per server process. `home` contains the store, uploaded folders and the fleet's record."""

    def __init__(self, home: Path):
        self.store = open_store(home)
        self.jobs_table = Jobs(self.store)
        self.code_archives = ServerCodeArchives(home / "packages")
        inbox = Inbox()
        liveness = Liveness()
        self.agents = Agents(inbox.put, liveness.add_repair)
        self.checkpoint_service = CheckpointService(self.agents, RateLimit(copy_bytes_per_s()), self.jobs_table.id_of)
        self.job_files = JobFileService(self.agents)
        self.data = DataStore(home / "data")
        moves = DataMoves(self.agents, self.checkpoint_service, self.data)
        launcher = Launcher(self.agents, self.code_archives, self.checkpoint_service, moves)
        log_copies = LogCopies(home / "kept-logs", self.agents)
        self._rates = throughput.RateTable(self.store.benchmarks)
        self._repair = RepairThread(liveness.add_repair) if repair.is_enabled() else None
        log_preservation = LogPreservation(log_copies, self.agents, self.jobs_table)
        served = (self.jobs_table, self.store, self.agents, launcher, inbox, log_preservation)
        self.runtime = ControllerThread(
            *served, self._rates.newest, liveness, self._repair, Histories(self.jobs_table).newest
        )
        last_inventory = LastInventory(home / "inventory.json")
        self.readiness = FleetReadiness(self.runtime, self.agents, last_inventory)
        self.job_views = JobViews(self.jobs_table, self.runtime, launcher.activity, last_inventory)
        self.explanations = Explanations(self.jobs_table, self.runtime, self.readiness, self.job_views)
        parts = (self.jobs_table, self.store, self.code_archives, self.data, self.checkpoint_service)
        self.submissions = Submissions(
            *parts,
            self.readiness.devices,
            self._post_submitted,
            lambda: len(self.runtime.control.records),
            lambda: self.runtime.control.projects,
        )
        rejoin = RejoinThread(lambda: [name for name, _ in self.agents.ready()], liveness.add_repair)
        self._repairs = (self._repair, rejoin) if self._repair else ()
        self.health_collector = HealthCollector(self.store, self.agents, self.runtime, self._repairs)
        self.job_logs = JobLogs(self.agents, log_copies)
        self.exec_relay = ExecRelay(self.agents)
        actions = (self.submissions.submit, self.cancel, self.code_archives.contents)
        self.benchmark_runs = Benchmarks(self.store.benchmarks, self.jobs_table, self.agents, *actions)
        keep_s = cleanup.keep_jobs_s()
        remove_folders = cleanup.folder_remover(self.agents)
        in_use = (self.store.jobs.newest_containing, self.store.jobs.exists, self.benchmark_runs.code_archives)
        unused = UnusedArchives(self.code_archives, self.agents, *in_use)

        def remove_unreferenced() -> None:
            self.data.remove_unused(self._data_in_use)
            unused.remove()
            log_copies.remove_stale(self.store.jobs.exists)

        remove_unused_data = FilesLimit(
            self.agents, self.jobs_table, keep_files_bytes(), then=remove_unreferenced
        ).remove
        self._housekeeping = Housekeeping(
            self.jobs_table, self.store, remove_folders, keep_s, self._cancel_damaged, remove_unused_data
        )
        self.runtime.start()
        self.benchmark_runs.resume()
        self._housekeeping.start()
        for thread in self._repairs:
            thread.start()

    def close(self) -> None:
        self._housekeeping.close()
        for thread in self._repairs:
            thread.close()
        self.benchmark_runs.close()
        self.runtime.close()
        self.store.close()

    # -- jobs

    def _cancel_damaged(self, job: str, why: str) -> None:
        self.runtime.post(CancelRequested(job, f"its history in the job store is damaged: {why}"))

    def _data_in_use(self) -> set[str]:
        return {one.sha256 for record in self.runtime.control.records.values() for one in record.job.data}

    def _post_submitted(self, records: list[Record]) -> None:
        """Pass new jobs to the controller, before any client can see them and send requests about them."""
        self.runtime.post(Submitted(tuple(records)))

    def find_run_job(self, ref: str) -> Record:
        """Find a job; if it has run, wait first until the fleet's nodes have reported. Raises NotFound."""
        record = self.jobs_table.find(ref)
        if record.attempts:
            self.readiness.wait_until_ready()
        return record

    def cancel(self, ref: str) -> str:
        """Cancel a job and return its id. This takes precedence over its next state. A job that has ended is not
        changed.
        """
        job = self.jobs_table.find(ref).job
        if job.state not in TERMINAL:
            self.runtime.post_and_wait(CancelRequested(job.id))
        return job.id

    def changes(self, after: int, timeout_s: float) -> ChangesPage:
        """Events after number `after`, as soon as there are any, else an empty list after `timeout_s`. Continue with
        `last`; events up to it may have been deleted.
        """
        self.store.wait(after, timeout_s)
        events, last = self.store.read_with_end(after, MAX_CHANGES)
        return {"events": [self.job_views.event(e) for e in events], "last": last}

    # -- requests with a key

    def stored_response(self, key: str, request: Any) -> dict[str, Any] | None:
        """Return the stored response to a request with this key; None if there is none. Raises Conflict if that request
        had another body.
        """

        def absent() -> StoredResponse:
            raise _NotStoredError

        try:
            return self.store.idempotent(key, digest(request), absent)
        except _NotStoredError:
            return None

    def once(self, key: str, request: Any, call: Callable[[], Any]) -> Any:
        """Return the result of `call`, which a repeated request gets from the store. If the server stops after the call
        and before its result is durable, a repeated request calls again. Raises Conflict if the request with this key
        was another one.
        """
        stored = self.store.idempotent(key, digest(request), lambda: StoredResponse({"response": call()}))
        return stored["response"]

    def store_response(self, key: str, request: Any, response: dict[str, Any]) -> dict[str, Any]:
        """Store the response to this key durably. Without a key, store nothing."""
        return self.store.idempotent(key, digest(request), lambda: StoredResponse(response))
