"""Benchmark runs over the fleet: one job per node, one thread per run, and a stored log of results.

A run survives a server restart: its results are in the store, its sessions keep waiting on their nodes, and the next
server continues with the case that was in progress.
"""

import hashlib
import json
import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any, cast

from cluster.errors import Conflict, FleetError, NotFound, PolyfleetError, UserError, nearest
from cluster.input.archive_unpack import ArchiveContents
from cluster.serialization import to_plain
from orchestrator.benchmark import suite
from orchestrator.benchmark.results import LINE_FORMAT
from orchestrator.core.controller.nodes import device_groups
from orchestrator.core.model import Devices
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.benchmarks import job_requests
from orchestrator.runtime.benchmarks.benchmark_run import Cancel, Run, RunServices, Submit, cancel_job
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.store.events.benchmark_lines import BenchmarkLines
from orchestrator.units import iso
from orchestrator.views.benchmark_lines import BenchmarkLine
from orchestrator.views.benchmarks import RunView

log = logging.getLogger(__name__)

JOIN_S = 30.0
Data = dict[str, Any]


class Benchmarks:
    """All runs of a server. `submit` and `cancel` act on jobs; `contents` lists a code archive."""

    def __init__(
        self,
        lines: BenchmarkLines,
        jobs: Jobs,
        agents: Agents,
        submit: Submit,
        cancel: Cancel,
        contents: Callable[[str], ArchiveContents],
    ):
        self._lines, self._agents, self._contents = lines, agents, contents
        self._closing = threading.Event()
        self._shared = RunServices(lines, jobs, agents, submit, cancel, self._closing)
        self._running: dict[str, Run] = {}
        self._start_lock = threading.Lock()

    def resume(self) -> None:
        """Continue runs of an earlier server, also those whose jobs are only partly submitted."""
        for summary in self._lines.runs():
            if summary["ended"] is not None:
                continue
            try:
                self._start(Run(summary["started"], self._shared))
            except (PolyfleetError, LookupError) as e:
                message = e.message if isinstance(e, PolyfleetError) else "another version of Polyfleet started it"
                for job in dict.fromkeys(target["job"] for target in _targets_of(summary)):
                    self._cancel_job(job)
                reason = f"this version cannot continue the run: {message}"
                self._lines.append(summary["run"], {"line": "ended", "state": "FAILED", "reason": reason})

    def _cancel_job(self, job: str) -> None:
        try:
            cancel_job(job, self._shared)
        except FleetError as e:
            log.warning("%s was not cancelled: %s", job, e)

    def start(self, data: Data, code_archive: str, key: str = "") -> RunView:
        """Start a run; it is durable when this returns. The same key returns the same run.

        The run is stored before its first job is submitted: if this server ends in between, the next one continues the
        run. Raises SpecError or NotFound for a request that this fleet cannot measure, Conflict for a key that was used
        with another request.
        """
        digest = hashlib.sha256(json.dumps([data, code_archive], sort_keys=True, default=str).encode()).hexdigest()
        run = f"bench-{hashlib.sha256(key.encode()).hexdigest()[:12] if key else secrets.token_hex(3)}"
        with self._start_lock:
            if key and (existing := next((k for k in self._lines.runs() if k["run"] == run), None)):
                if existing["started"].get("digest") != digest:
                    raise Conflict(f"the idempotency key {key[:40]!r} was used with another request", "use a new key")
                return self.view(run)
            request = suite.request(data)
            jobs = [
                {"wanted": to_plain(w), "spec": w.spec(run, request)}
                for w in job_requests.plan_jobs(request, self._devices())
            ]
            folder = {"code_archive": code_archive, "content_sha": self._contents(code_archive).content_sha}
            fields = {"request": request.to_plain(), **folder, "digest": digest}
            start_line: Data = {"line": "started", "format": LINE_FORMAT, "run": run, **fields, "jobs": jobs}
            run_thread = Run(start_line, self._shared)
            self._lines.append(run, start_line)
            self._submit(run_thread)
        return self.view(run)

    def _submit(self, run_thread: Run) -> None:
        """Submit the jobs and start the run. A UserError ends the run and is raised; other errors are retried."""
        try:
            run_thread.submit()
        except UserError as e:
            run_thread.refuse(str(e))
            self._start(run_thread)
            run_thread.join(timeout=JOIN_S)
            raise
        except PolyfleetError as e:
            run_thread.waiting = e.message
        self._start(run_thread)

    def _devices(self) -> list[Devices]:
        ready = [(name, node.facts) for name, node in self._agents.ready() if node.facts is not None]
        if not ready and self._agents.problem:
            raise FleetError(self._agents.problem, "run `polyfleet up` first")
        return [group for name, facts in ready for group in device_groups(facts, name, "", 0.0, {})]

    def view(self, ref: str) -> RunView:
        """State and counts of a run, for the API. Raises NotFound."""
        summary = self._find(ref)
        live = self._running.get(summary["run"])
        request_fields = {k: v for k, v in summary["started"].items() if k not in ("line", "jobs", "digest", "time")}
        ended = summary["ended"]
        view = request_fields | {
            "run": summary["run"],
            "targets": _targets_of(summary),
            "state": ended["state"] if ended else "RUNNING" if live and live.is_measuring else "WAITING",
            "reason": ended["reason"] if ended else live.waiting if live else "",
            "progress": live.progress if live and not ended else {},
            "results": summary["results"],
            "baseline": summary["baseline"] is not None,
            "started_at": iso(summary["started"]["time"]),
            "ended_at": iso(ended["time"]) if ended else None,
        }
        return cast(RunView, view)

    def views(self) -> list[RunView]:
        return [self.view(summary["run"]) for summary in self._lines.runs()]

    def lines(self, ref: str, after: int) -> list[BenchmarkLine]:
        return cast(list[BenchmarkLine], self._lines.read(self._find(ref)["run"], after))

    def code_archives(self) -> set[str]:
        """Code archives of runs that have not ended: they may still submit jobs with them."""
        return {
            str(summary["started"].get("code_archive", ""))
            for summary in self._lines.runs()
            if summary["ended"] is None
        }

    def cancel(self, ref: str) -> RunView:
        """Cancel a run. A run that has ended is not changed."""
        run = self._find(ref)["run"]
        if run in self._running:
            self._running[run].cancel_reason = "cancelled by the user"
            self._running[run].join(timeout=JOIN_S)
        return self.view(run)

    def make_baseline(self, ref: str) -> RunView:
        """Make a run the baseline of later runs, until another is named.

        Raises Conflict if it did not succeed.
        """
        summary = self._find(ref)
        if summary["ended"] is None or summary["ended"]["state"] != "SUCCEEDED":
            raise Conflict(f"{summary['run']} did not succeed", "name a run that succeeded")
        self._lines.append(summary["run"], {"line": "baseline"})
        return self.view(summary["run"])

    def close(self) -> None:
        """Leave all runs as they are, for the next server."""
        self._closing.set()
        for run in self._running.values():
            run.join(timeout=5)

    def _start(self, run_thread: Run) -> None:
        self._running[run_thread.run_id] = run_thread
        run_thread.start()

    def _find(self, ref: str) -> Data:
        summaries = self._lines.runs()
        if ref == "latest" and summaries:
            return summaries[-1]
        matches = [k for k in summaries if k["run"] == ref] or [
            k for k in summaries if ref and k["run"].startswith(ref)
        ]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise NotFound(f"{ref!r} could be any of {len(matches)} runs", "give more of the id")
        raise NotFound(f"no benchmark run {ref!r}", nearest(ref, [k["run"] for k in summaries][-20:]))


def _targets_of(summary: Data) -> list[Data]:
    """Targets of a run, as logged last; before that, those that it was requested for, without jobs."""
    start_line = summary["started"]
    if summary["targets"]:
        return list(summary["targets"]["targets"])
    jobs = [job["wanted"] for job in start_line.get("jobs", ())]  # absent if a later version stored the run
    return [
        {"target": w["name"], "job": "", "kind": w["kind"], "pool": ", ".join(w["pools"]), "node": w["node"]}
        for w in jobs
    ]
