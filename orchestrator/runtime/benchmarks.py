"""Benchmark runs over the fleet: jobs with a node each, a thread per run that conducts, a log that is kept.

A run outlives this process: what it measured is in the store, its sessions go on waiting on their nodes, and the server
that comes next takes it up at the case that was under way.
"""

import hashlib
import json
import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any

from cluster.archive_unpack import Contents
from cluster.errors import Conflict, FleetError, NotFound, PolyfleetError, UserError, nearest
from cluster.serialization import to_plain
from orchestrator.benchmark import job_requests, suite
from orchestrator.core.model import Devices
from orchestrator.core.nodes import groups
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.benchmark_run import Cancel, Run, Shared, Submit, cancelled
from orchestrator.runtime.jobs import Jobs
from orchestrator.store.benchmark_lines import BenchmarkLines

log = logging.getLogger(__name__)

JOIN_S = 30.0
Data = dict[str, Any]


class Benchmarks:
    """All runs of a server. `submit` and `cancel` are those of jobs; `contents` are those of a code archive."""

    def __init__(
        self,
        lines: BenchmarkLines,
        jobs: Jobs,
        agents: Agents,
        submit: Submit,
        cancel: Cancel,
        contents: Callable[[str], Contents],
    ):
        self._lines, self._agents, self._contents = lines, agents, contents
        self._closing = threading.Event()
        self._shared = Shared(lines, jobs, agents, submit, cancel, self._closing)
        self._live: dict[str, Run] = {}
        self._beginning = threading.Lock()

    def take_up(self) -> None:
        """Go on with runs that a server before this one left, also amid the submission of their jobs."""
        for known in self._lines.runs():
            if known["ended"] is not None:
                continue
            try:
                self._start(Run(known["begun"], self._shared))
            except (PolyfleetError, LookupError) as e:
                said = e.message if isinstance(e, PolyfleetError) else "another version began it"
                for job in dict.fromkeys(column["job"] for column in _columns(known)):
                    self._cancelled(job)
                reason = f"this version cannot go on with it: {said}"
                self._lines.append(known["run"], {"line": "ended", "state": "FAILED", "reason": reason})

    def _cancelled(self, job: str) -> None:
        try:
            cancelled(job, self._shared)
        except FleetError as e:
            log.warning("%s was not cancelled: %s", job, e)

    def begin(self, data: Data, package: str, key: str = "") -> Data:
        """Start a run; durable when it returns. The same key gives the same run; with another request it is a Conflict.

        The run is stored before its first job is submitted, so that whatever ends this server between the two leaves a
        run that the next one goes on with. Raises SpecError, NotFound for what cannot be measured here.
        """
        digest = hashlib.sha256(json.dumps([data, package], sort_keys=True, default=str).encode()).hexdigest()
        run = f"bench-{hashlib.sha256(key.encode()).hexdigest()[:12] if key else secrets.token_hex(3)}"
        with self._beginning:
            if key and (known := next((k for k in self._lines.runs() if k["run"] == run), None)):
                if known["begun"].get("digest") != digest:
                    raise Conflict(f"the idempotency key {key[:40]!r} was used with another request", "use a new key")
                return self.view(run)
            asked = suite.request(data)
            jobs = [
                {"wanted": to_plain(w), "spec": w.spec(run, asked)}
                for w in job_requests.plan_jobs(asked, self._devices())
            ]
            folder = {"package": package, "content_sha": self._contents(package).content_sha}
            about = {"request": asked.to_plain(), **folder, "digest": digest}
            begun: Data = {"line": "begun", "run": run, **about, "jobs": jobs}
            made = Run(begun, self._shared)
            self._lines.append(run, begun)
            self._submitted(made)
        return self.view(run)

    def _submitted(self, made: Run) -> None:
        """What a user did wrong is told at once, and ends the run; what the fleet cannot do now is tried again."""
        try:
            made.submit()
        except UserError as e:
            made.refuse(str(e))
            self._start(made)
            made.join(timeout=JOIN_S)
            raise
        except PolyfleetError as e:
            made.waiting = e.message
        self._start(made)

    def _devices(self) -> list[Devices]:
        ready = [(name, node.facts) for name, node in self._agents.ready() if node.facts is not None]
        if not ready and self._agents.trouble:
            raise FleetError(self._agents.trouble, "run `polyfleet up` first")
        return [group for name, facts in ready for group in groups(facts, name, "", 0.0, {})]

    def view(self, ref: str) -> Data:
        """Where a run stands."""
        known = self._find(ref)
        live = self._live.get(known["run"])
        told = {k: v for k, v in known["begun"].items() if k not in ("line", "jobs", "digest")}
        ended = known["ended"]
        return told | {
            "run": known["run"],
            "columns": _columns(known),
            "state": ended["state"] if ended else "RUNNING" if live and live.measuring else "WAITING",
            "reason": ended["reason"] if ended else live.waiting if live else "",
            "progress": live.progress if live and not ended else {},
            "cells": known["cells"],
            "baseline": known["baseline"] is not None,
            "begun_s": known["begun"]["time"],
            "ended_s": ended["time"] if ended else None,
        }

    def views(self) -> list[Data]:
        return [self.view(known["run"]) for known in self._lines.runs()]

    def lines(self, ref: str, after: int) -> list[Data]:
        return self._lines.read(self._find(ref)["run"], after)

    def packages(self) -> set[str]:
        """Of runs that have not ended: they may submit jobs with them still."""
        return {str(known["begun"].get("package", "")) for known in self._lines.runs() if known["ended"] is None}

    def cancel(self, ref: str) -> Data:
        """A run that has ended stays as it is."""
        run = self._find(ref)["run"]
        if run in self._live:
            self._live[run].cancelled = "cancelled by the user"
            self._live[run].join(timeout=JOIN_S)
        return self.view(run)

    def baseline(self, ref: str) -> Data:
        """Later runs are held against this one, until another is named. Raises Conflict for one that has not ended."""
        known = self._find(ref)
        if known["ended"] is None or known["ended"]["state"] != "SUCCEEDED":
            raise Conflict(f"{known['run']} did not succeed", "name a run that did")
        self._lines.append(known["run"], {"line": "baseline"})
        return self.view(known["run"])

    def close(self) -> None:
        """Leave all runs as they are, for the next server."""
        self._closing.set()
        for run in self._live.values():
            run.join(timeout=5)

    def _start(self, made: Run) -> None:
        self._live[made.run_id] = made
        made.start()

    def _find(self, ref: str) -> Data:
        known = self._lines.runs()
        if ref == "latest" and known:
            return known[-1]
        found = [k for k in known if k["run"] == ref] or [k for k in known if ref and k["run"].startswith(ref)]
        if len(found) == 1:
            return found[0]
        if found:
            raise NotFound(f"{ref!r} could be any of {len(found)} runs", "give more of the id")
        raise NotFound(f"no benchmark run {ref!r}", nearest(ref, [k["run"] for k in known][-20:]))


def _columns(known: Data) -> list[Data]:
    """As they were told last. A run that has none yet has those it was begun for; its jobs are not submitted yet."""
    begun = known["begun"]
    if known["columns"]:
        return list(known["columns"]["columns"])
    if "columns" in begun:  # stored by a version that chose nodes before it submitted
        return list(begun["columns"])
    jobs = [job["wanted"] for job in begun["jobs"]]
    return [
        {"column": w["name"], "job": "", "kind": w["kind"], "pool": ", ".join(w["pools"]), "node": w["node"]}
        for w in jobs
    ]
