"""Everything the server offers, as plain functions on plain data: the REST routes call exactly this.

Methods are synchronous and safe to call from many threads. They raise PolyfleetError and nothing else on purpose.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster import fleet_record
from cluster.errors import FleetError, SpecError, UserError
from cluster.plain import to_plain
from orchestrator import checkpoint_moves
from orchestrator.benchmark import throughput
from orchestrator.checkpoints import Checkpoints, Progress
from orchestrator.core.explain import Explanation, explain
from orchestrator.core.fold import Record
from orchestrator.core.messages import CancelAsked, DrainAsked, MigrateAsked, ResumeAsked, Submitted
from orchestrator.core.model import Job
from orchestrator.core.nodes import leased
from orchestrator.core.states import TERMINAL
from orchestrator.resources import accelerators
from orchestrator.runtime import housekeeping, jobs_page, repair
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.benchmarks import Benchmarks
from orchestrator.runtime.controller import Runtime
from orchestrator.runtime.fleet_seen import NO_FLEET, SUBMIT_WAIT_S, FleetSeen
from orchestrator.runtime.housekeeping import Housekeeping
from orchestrator.runtime.inbox import Inbox
from orchestrator.runtime.job_views import JobViews
from orchestrator.runtime.jobs import Jobs
from orchestrator.runtime.jobs_page import JobsPage, JobsWanted
from orchestrator.runtime.known import KnownDevices
from orchestrator.runtime.launch import Launcher
from orchestrator.runtime.logs import Logs
from orchestrator.runtime.packages import Packages, Unnamed
from orchestrator.runtime.pulse import Pulse
from orchestrator.runtime.repair import RepairThread
from orchestrator.runtime.steps import now
from orchestrator.runtime.submissions import Submission, Submissions, digest
from orchestrator.runtime.views import FIELDS, accepted_view, node_view, pool_view
from orchestrator.runtime.watched import Watched
from orchestrator.spec import parse_job
from orchestrator.store.once import Answer
from orchestrator.store.setting import open_store

CHANGES_AT_ONCE = 1000


def _kinds(text: str) -> tuple[str, ...]:
    try:
        return accelerators(text)[0].kinds
    except UserError as e:
        raise SpecError("to", e.message, e.remedy) from None


class _AbsentError(Exception):
    """No request had that key."""


class Service:
    """One per server process. `home` holds the store, uploaded folders and the fleet's record."""

    def __init__(self, home: Path):
        self.store = open_store(home)
        self.jobs_table = Jobs(self.store)
        self.packages = Packages(home / "packages")
        inbox = Inbox()
        pulse = Pulse()
        self.agents = Agents(inbox.put, pulse.repaired)
        self._checkpoints = Checkpoints(self.agents)
        launcher = Launcher(self.agents, self.packages, self._checkpoints)
        self._rates = throughput.Rates(self.store.benchmarks)
        self._repair = RepairThread(pulse.repaired) if repair.wanted() else None
        served = (self.jobs_table, self.store, self.agents, launcher, inbox, self._rates.newest, pulse, self._repair)
        self.runtime = Runtime(*served)
        self._fleet = FleetSeen(self.runtime, self.agents, KnownDevices(home / "inventory.json"))
        self._views = JobViews(self.jobs_table, self.runtime, launcher.doing)
        parts = (self.jobs_table, self.store, self.packages, self._checkpoints)
        self._submissions = Submissions(
            *parts, self._fleet.devices, self._stored, lambda: len(self.runtime.control.records)
        )
        self._watched = Watched(self.store, self.agents, self.runtime, self._repair)
        self._logs = Logs(self.agents)
        self._benchmarks = Benchmarks(self.store.benchmarks, self.jobs_table, self.agents, self.submit, self.cancel)
        keep_s = housekeeping.keep_jobs_s()
        forget = housekeeping.forget_on(self.agents)
        named = (self.store.jobs.naming, self.store.jobs.exists, self._benchmarks.packages)
        tidy = Unnamed(self.packages, self.agents, *named).remove
        self._housekeeping = Housekeeping(self.jobs_table, self.store, forget, keep_s, self._distrust, tidy)
        self.runtime.start()
        self._benchmarks.take_up()
        self._housekeeping.start()
        if self._repair:
            self._repair.start()

    def close(self) -> None:
        self._housekeeping.close()
        if self._repair:
            self._repair.close()
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
        pools = {facts.pool for _, node in self.agents.items() if (facts := node.facts)}
        asked = MigrateAsked(job.id, pool=to) if to in pools else MigrateAsked(job.id, kinds=_kinds(to))
        self.runtime.ask(asked)
        return self.job(job.id)

    def explain(self, ref: str) -> dict[str, Any]:
        record = self.jobs_table.find(ref)
        told = self._explained(record.job, self._fleet.snapshot())
        return {"state": str(record.job.state), "reason": self._views.why(record) or record.reason, **told}

    def plan(self, spec: dict[str, Any]) -> dict[str, Any]:
        """What would happen to `spec` if it were submitted now."""
        return self._explained(parse_job(spec).to_job("new", time.time()), self._fleet.snapshot())

    def _explained(self, job: Job, seen: Any) -> dict[str, Any]:
        told: Explanation = explain(job, seen)
        plain: dict[str, Any] = to_plain(told)
        return plain

    def history(self, ref: str) -> list[dict[str, Any]]:
        return [self._views.event(e) for e in self.store.events_of(self.jobs_table.find(ref).job.id)]

    def reports(self, ref: str, after: int) -> list[dict[str, Any]]:
        """The metrics a job reported, oldest first, each with its `seq`."""
        return self.store.reports(self.jobs_table.find(ref).job.id, after)

    def logs(
        self, ref: str, rank: int | None, epoch: int | None, cursor: dict[str, int], limit_bytes: int
    ) -> dict[str, Any]:
        return self._logs.read(self._logged(ref), rank, epoch, cursor, limit_bytes)

    def logs_tail(self, ref: str, rank: int | None, epoch: int | None, count: int) -> dict[str, Any]:
        return self._logs.tail(self._logged(ref), rank, epoch, count)

    def _logged(self, ref: str) -> Record:
        record = self.jobs_table.find(ref)
        if record.attempts:
            self._fleet.settle()
        return record

    def changes(self, after: int, timeout_s: float) -> dict[str, Any]:
        """Events past `after`, as soon as there are any, else an empty list after `timeout_s`. One goes on from `last`,
        up to which events may be gone.
        """
        self.store.wait(after, timeout_s)
        events, last = self.store.read_on(after, CHANGES_AT_ONCE)
        return {"events": [self._views.event(e) for e in events], "last": last}

    # -- fleet

    def nodes(self) -> list[dict[str, Any]]:
        self._fleet.settle()
        state, at = self.runtime.control, now()
        held = leased(state.records.values())
        return [node_view(node, state, at.s, held) for _, node in sorted(state.nodes.items())]

    def node_drain(self, node: str, now: bool, reason: str) -> dict[str, Any]:
        self.runtime.ask(DrainAsked(node, reason, now))
        return self._node(node)

    def node_resume(self, node: str) -> dict[str, Any]:
        self.runtime.ask(ResumeAsked(node))
        return self._node(node)

    def _node(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next((n for n in self.nodes() if n["node"] == name), {"node": name, "state": "unknown"})
        return found

    def fleet(self) -> dict[str, Any]:
        record = fleet_record.read()
        if record is None:
            raise FleetError("no fleet is up", NO_FLEET)
        state, at = self.runtime.control, now()
        held = leased(state.records.values())
        pools = record.pools or {node.facts.pool: {} for node in state.nodes.values() if node.facts}
        return {
            "name": record.name,
            "address": record.address,
            "state": self.runtime.trouble or record.state,
            "left_out": [list(pair) for pair in record.left_out],
            "pools": [pool_view(name, spec, state, at.s, held) for name, spec in sorted(pools.items())],
        }

    def doctor(self) -> list[dict[str, Any]]:
        self._fleet.settle()
        told = [
            (name, finding) for name, agent in self.agents.items() if agent.facts for finding in agent.facts.findings
        ]
        told += [*self._watched.findings(), *self._checkpoints.findings()]
        return [{"node": name, **to_plain(finding)} for name, finding in told]

    def health(self) -> dict[str, Any]:
        """The server's own state, as seen now from outside its controller's thread."""
        return self._watched.view() | {"jobs": self.store.jobs.counts()}

    # -- benchmarks

    def benchmark_begin(self, request: dict[str, Any], package: str, key: str) -> dict[str, Any]:
        """The same key gives the same run, whatever the fleet has become meanwhile."""
        self._fleet.settle(SUBMIT_WAIT_S)
        return self._benchmarks.begin(request, package, key)

    def benchmarks(self) -> list[dict[str, Any]]:
        return self._benchmarks.views()

    def benchmark(self, ref: str) -> dict[str, Any]:
        return self._benchmarks.view(ref)

    def benchmark_lines(self, ref: str, after: int) -> list[dict[str, Any]]:
        return self._benchmarks.lines(ref, after)

    def benchmark_cancel(self, ref: str) -> dict[str, Any]:
        return self._benchmarks.cancel(ref)

    def benchmark_baseline(self, ref: str) -> dict[str, Any]:
        return self._benchmarks.baseline(ref)

    # -- requests with a key

    def answered(self, key: str, asked: Any) -> dict[str, Any] | None:
        """What a request with this key was answered with; None when there was none. Raises Conflict when that asked for
        something else.
        """

        def absent() -> Answer:
            raise _AbsentError

        try:
            return self.store.once(key, digest(asked), absent)
        except _AbsentError:
            return None

    def answer(self, key: str, asked: Any, told: dict[str, Any]) -> dict[str, Any]:
        """Keep `told` as the answer to this key, durably. Without a key nothing is kept."""
        return self.store.once(key, digest(asked), lambda: Answer(told))

    # -- folders and checkpoints

    def store_package(self, sha: str, data_path: Path) -> None:
        self.packages.keep(sha, data_path)

    def has_package(self, sha: str) -> bool:
        return self.packages.has(sha)

    def checkpoints(self, pool: str, prefix: str) -> list[dict[str, Any]]:
        self._fleet.settle()
        return self._checkpoints.list(pool, prefix)

    def checkpoint_show(self, ref: str) -> dict[str, Any]:
        self._fleet.settle()
        return self._checkpoints.show(ref)

    def checkpoint_plan(self, ref: str, to_kind: str, count: int = 1) -> dict[str, Any]:
        self._fleet.settle()
        return self._checkpoints.plan(ref, to_kind, count)

    def checkpoint_copy(self, order: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """`order` has source, target, to_kind, convert_at and on_lossy."""
        self._fleet.settle()
        return checkpoint_moves.copy(self._checkpoints, checkpoint_moves.Move(**order), progress)

    def checkpoint_tool(self, verb: str, arguments: dict[str, Any], progress: Progress) -> Any:
        self._fleet.settle()
        return checkpoint_moves.run(self._checkpoints, verb, arguments, progress)
