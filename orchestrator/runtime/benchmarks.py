"""Benchmark runs over the fleet: a job per node that holds it, a thread per run that conducts, a log that is kept.

A run outlives this process: what it measured is in the store, its sessions go on waiting on their nodes, and the server
that comes next takes it up at the case that was under way.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cluster.errors import Conflict, NotFound, PolyfleetError, SpecError, nearest
from orchestrator.benchmark import suite
from orchestrator.benchmark.conductor import Cancelled, ColumnLost, Conductor
from orchestrator.benchmark.suite import Request
from orchestrator.core import nodes
from orchestrator.core.states import TERMINAL
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.columns import FleetColumn
from orchestrator.runtime.jobs import Jobs
from orchestrator.store.benchmarks import BenchmarkLines

log = logging.getLogger(__name__)
LEASE = "120s"
GRACE_S = 20.0
"""For sessions to end by themselves."""
RESTARTS = 50
"""Of a session: each case that ends its process costs one."""
Data = dict[str, Any]
Submit = Callable[[Data, str, str], Data]
Cancel = Callable[[str], Data]


@dataclass(frozen=True, slots=True)
class Target:
    """One node's equal devices; `numbers` of them are measured, all of them are held."""

    pool: str
    kind: str
    node: str
    total: int
    numbers: tuple[int, ...]


class Benchmarks:
    """All runs of a server. `submit` and `cancel` are those of jobs."""

    def __init__(self, lines: BenchmarkLines, jobs: Jobs, agents: Agents, submit: Submit, cancel: Cancel):
        self._lines, self._jobs, self._agents = lines, jobs, agents
        self._submit, self._cancel = submit, cancel
        self._live: dict[str, _Run] = {}
        self._closing = threading.Event()

    def take_up(self) -> None:
        """Go on with runs that a server before this one left."""
        for known in self._lines.runs():
            if known["ended"] is None:
                try:
                    self._start(known["run"], suite.request(known["begun"]["request"]), known["begun"]["columns"])
                except PolyfleetError as e:
                    reason = f"this version cannot go on with it: {e.message}"
                    self._lines.append(known["run"], {"line": "ended", "state": "FAILED", "reason": reason})
                    self._let_go(known["begun"]["columns"])

    def begin(self, data: Data, package: str) -> Data:
        """Start a run; durable when it returns. Raises SpecError, NotFound for what cannot be measured here."""
        asked = suite.request(data)
        chosen = targets(asked, self._agents)
        run = f"bench-{secrets.token_hex(3)}"
        columns: list[Data] = []
        try:
            for number, target in enumerate(chosen):
                columns += self._submitted(run, asked, target, package, number, _distinct(chosen))
            begun = {"line": "begun", "run": run, "request": asked.to_plain(), "columns": columns, "package": package}
            self._lines.append(run, begun)
        except PolyfleetError:
            self._let_go(columns)
            raise
        self._start(run, asked, columns)
        return self.view(run)

    def view(self, ref: str) -> Data:
        """Where a run stands."""
        known = self._find(ref)
        live = self._live.get(known["run"])
        told = {k: v for k, v in known["begun"].items() if k != "line"}
        ended = known["ended"]
        return told | {
            "run": known["run"],
            "state": ended["state"] if ended else "RUNNING" if live and live.measuring else "WAITING",
            "reason": ended["reason"] if ended else live.waiting if live else "",
            "progress": live.progress if live else {},
            "cells": known["cells"],
            "baseline": known["baseline"] is not None,
            "begun_s": known["begun"]["time"],
            "ended_s": ended["time"] if ended else None,
        }

    def views(self) -> list[Data]:
        return [self.view(known["run"]) for known in self._lines.runs()]

    def lines(self, ref: str, after: int) -> list[Data]:
        return self._lines.read(self._find(ref)["run"], after)

    def cancel(self, ref: str) -> Data:
        """A run that has ended stays as it is."""
        run = self._find(ref)["run"]
        if run in self._live:
            self._live[run].cancelled = "cancelled by the user"
            self._live[run].join(timeout=30)
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

    def _submitted(
        self, run: str, asked: Request, target: Target, package: str, number: int, distinct: bool
    ) -> list[Data]:
        spec: Data = {
            "name": f"{run}-{target.pool}",
            "task": "benchmark",
            "arguments": {"session": run} | ({"sample_input": asked.sample_input} if asked.sample_input else {}),
            "resources": {"accelerators": f"{target.kind}:{target.total}", "pool": target.pool, "node": target.node},
            "seed": asked.seed,
            "priority": asked.priority,
            "recovery": {"max_restarts": RESTARTS, "max_interruptions": 3, "lease": LEASE},
        }
        spec |= {"entry": asked.entry} if asked.entry else {}
        spec |= {"batch_size": asked.batch_size} if asked.batch_size else {}
        job = self._submit(spec, package, f"{run}-{number}")["id"]
        return [
            {"column": _name(target, n, distinct), "job": job, "number": n, "pool": target.pool, "kind": target.kind}
            for n in target.numbers
        ]

    def _let_go(self, columns: list[Data]) -> None:
        """Of the nodes that a run's jobs hold; what is wrong with one of them keeps no other."""
        for job in dict.fromkeys(column["job"] for column in columns):
            try:
                self._cancel(job)
            except PolyfleetError as e:
                log.warning("%s was not cancelled: %s", job, e)

    def _start(self, run: str, asked: Request, columns: list[Data]) -> None:
        made = [FleetColumn(c["column"], c["job"], c["number"], self._jobs, self._agents) for c in columns]
        self._live[run] = _Run(run, asked, made, self._lines, self._jobs, self._cancel, self._closing)
        self._live[run].start()

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


class _Run(threading.Thread):
    """One run, from waiting for its nodes to letting go of them."""

    def __init__(
        self,
        run: str,
        asked: Request,
        columns: list[FleetColumn],
        lines: BenchmarkLines,
        jobs: Jobs,
        cancel: Cancel,
        closing: threading.Event,
    ):
        super().__init__(name=run, daemon=True)
        self.run_id, self.cancelled, self.waiting = run, "", "waiting for its nodes"
        self.measuring = False
        self.progress: Data = {}
        self._asked, self._columns, self._lines = asked, columns, lines
        self._jobs, self._cancel, self._closing = jobs, cancel, closing

    def run(self) -> None:
        try:
            self._conduct()
        except _LeftError:
            return
        except Cancelled as e:
            self._end("CANCELLED", str(e))
        except PolyfleetError as e:
            self._end("FAILED", str(e))
        except Exception as e:
            log.exception("benchmark run %s failed", self.run_id)
            self._end("FAILED", f"internal error: {e!r}; its traceback is in the server's log")

    def _conduct(self) -> None:
        before = self._lines.read(self.run_id)
        done = frozenset(line["case"] for line in before if line["line"] == "case")
        columns = self._opened({line["column"] for line in before if line["line"] == "lost"})
        known = {line["column"] for line in before if line["line"] == "column"}
        for column in columns:
            if column.id not in known:
                self._lines.append(self.run_id, {"line": "column", "column": column.id, "facts": column.facts,
                                                 "host": column.host})  # fmt: skip
        if not columns:
            self._end("FAILED", "no column came up")
            return
        self.measuring, self.waiting = True, ""
        conductor = Conductor(self._asked, columns, self._tell, self._reason_to_end, done)
        conductor.run(suite.groups(self._asked))
        self._end("SUCCEEDED", "")

    def _opened(self, lost: set[str]) -> list[FleetColumn]:
        """Columns whose sessions answer, all nodes waited for side by side. What does not come up is told once."""
        came: dict[str, str] = {}

        def bring_up(column: FleetColumn) -> None:
            try:
                column.open()
                came[column.id] = ""
            except ColumnLost as e:
                came[column.id] = str(e)
            except PolyfleetError as e:
                came[column.id] = e.message

        threads = [threading.Thread(target=bring_up, args=(c,), daemon=True) for c in self._columns if c.id not in lost]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if reason := self._reason_to_end():
                raise Cancelled(reason)
            time.sleep(0.1)
        for name, why in came.items():
            if why:
                self._lines.append(self.run_id, {"line": "lost", "column": name, "reason": why})
        return [column for column in self._columns if came.get(column.id) == ""]

    def _reason_to_end(self) -> str:
        if self._closing.is_set():
            raise _LeftError
        return self.cancelled

    def _tell(self, line: Data) -> None:
        if self._closing.is_set():
            raise _LeftError  # agents go away now: what that looks like is no result
        if line["line"] == "progress":
            self.progress = {k: v for k, v in line.items() if k != "line"}
        else:
            self._lines.append(self.run_id, line)

    def _end(self, state: str, reason: str) -> None:
        """Let go of the nodes, then say so: who reads that it ended finds its jobs ended as well."""
        self.measuring, self.waiting = False, reason
        for column in self._columns if state == "SUCCEEDED" else ():
            column.end()
        deadline = time.monotonic() + (GRACE_S if state == "SUCCEEDED" else 0)
        for job in {column.job for column in self._columns}:
            while time.monotonic() < deadline and self._jobs[job].job.state not in TERMINAL:
                time.sleep(0.05)
            if self._jobs[job].job.state not in TERMINAL:
                self._cancel(job)
        try:
            self._lines.append(self.run_id, {"line": "ended", "state": state, "reason": reason})
        except PolyfleetError as e:
            log.error("the end of %s could not be stored: %s", self.run_id, e)


class _LeftError(Exception):
    """The server closes; the run goes on with the next."""


def targets(asked: Request, agents: Agents) -> list[Target]:
    """One device of each kind, in the order of the pools asked for; with `all_devices` every one, node by node.

    Raises SpecError naming what is here where nothing of what was asked for is.
    """
    found = []
    for name, agent in agents.ready():
        assert agent.facts is not None
        for group in nodes.groups(agent.facts, name, "", 0.0, {}):
            if group.schedulable:
                found.append(Target(group.pool, group.kind, name, group.total, tuple(range(group.total))))
    if not found:
        raise Conflict("no device is ready", "`polyfleet status` shows what the fleet waits for")
    chosen = _of_pools(asked.pools, _of_kinds(asked.kinds, found))
    if asked.all_devices:
        return chosen
    first: dict[tuple[str, str], Target] = {}
    for target in chosen:
        first.setdefault((target.pool if asked.pools else "", target.kind), replace(target, numbers=target.numbers[:1]))
    return list(first.values())


def _of_kinds(kinds: tuple[str, ...], found: list[Target]) -> list[Target]:
    if not kinds:
        return found
    here = sorted({target.kind for target in found})
    chosen = []
    for kind in kinds:
        of_it = [t for t in found if t.kind == kind or t.kind.startswith((f"{kind}:", f"{kind}-"))]
        exact = [t for t in of_it if t.kind == kind]
        if not of_it:
            raise SpecError("kinds", f"no device of kind {kind!r} is here", f"here: {', '.join(here)}")
        chosen += exact or of_it
    return chosen


def _of_pools(pools: tuple[str, ...], found: list[Target]) -> list[Target]:
    if not pools:
        return found
    here = sorted({target.pool for target in found})
    for pool in pools:
        if pool not in here:
            raise SpecError("pools", f"no device of pool {pool!r} is ready", nearest(pool, here))
    return [target for pool in pools for target in found if target.pool == pool]


def _distinct(chosen: list[Target]) -> bool:
    """Whether a kind alone names each column."""
    kinds = [target.kind for target in chosen for _ in target.numbers]
    return len(kinds) == len(set(kinds))


def _name(target: Target, number: int, distinct: bool) -> str:
    return target.kind if distinct else f"{target.kind}@{target.node}" + (f".{number}" if target.total > 1 else "")
