"""One benchmark run over the fleet: submit jobs, wait for their nodes, measure, give the nodes back."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from cluster.errors import FleetError, PolyfleetError, UserError
from cluster.serialization import from_plain
from orchestrator.benchmark import suite
from orchestrator.benchmark.results import MEASURED
from orchestrator.benchmark.round_runner import RoundRunner, RunCancelled, TargetLost
from orchestrator.core.states import TERMINAL
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.benchmarks.benchmark_target import FleetTarget, wait_for_devices
from orchestrator.runtime.benchmarks.job_requests import JobRequest
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.store.events.benchmark_lines import BenchmarkLines

log = logging.getLogger(__name__)
GRACE_S = 20.0
"""Seconds that sessions have to end by themselves at the end of a run."""
RETRY_S = 1.0
"""Seconds between retries when the fleet, the controller or the store is unavailable."""
POLL_S = 0.1
Data = dict[str, Any]
Submit = Callable[[Data, str, str], Mapping[str, Any]]
Cancel = Callable[[str], object]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RunServices:
    """Services that all runs of a server share.

    `submit`, `cancel`: of jobs; `closing`: the server is stopping.
    """

    lines: BenchmarkLines
    jobs: Jobs
    agents: Agents
    submit: Submit
    cancel: Cancel
    closing: threading.Event


class Run(threading.Thread):
    """Thread of one run, from submitting its jobs to giving their nodes back.

    `start_line`: its stored first line.
    """

    def __init__(self, start_line: Data, shared: RunServices):
        super().__init__(name=start_line["run"], daemon=True)
        self.run_id, self.cancel_reason, self.waiting = str(start_line["run"]), "", "waiting for its nodes"
        self.is_measuring = False
        self.progress: Data = {}
        self._request = suite.request(start_line["request"])
        self._job_requests = [from_plain(JobRequest, job["wanted"]) for job in start_line["jobs"]]
        self._specs: list[Data] = [job["spec"] for job in start_line["jobs"]]
        self._code_archive = str(start_line["code_archive"])
        self._jobs: list[str] = []
        self._targets: list[FleetTarget] = []
        self._logged_nodes: dict[str, str] = {}
        self._refusal_reason = ""
        self._shared, self._lines = shared, shared.lines

    def submit(self) -> None:
        """Submit the jobs that are not submitted yet, each with its own idempotency key.

        Raises PolyfleetError; jobs submitted before the error stay.
        """
        while (number := len(self._jobs)) < len(self._specs):
            reply = self._shared.submit(self._specs[number], self._code_archive, f"{self.run_id}-{number}")
            self._jobs.append(str(reply["id"]))

    def refuse(self, reason: str) -> None:
        """Make the run fail with this reason as soon as it is started."""
        self._refusal_reason = reason

    def run(self) -> None:
        try:
            if self._refusal_reason:
                self._end("FAILED", self._refusal_reason)
                return
            self._submit_all()
            self._measure()
        except _ServerClosing:
            return
        except RunCancelled as e:
            self._end("CANCELLED", str(e))
        except PolyfleetError as e:
            self._end("FAILED", str(e))
        except Exception as e:
            log.exception("benchmark run %s failed", self.run_id)
            self._end("FAILED", f"internal error: {e!r}; its traceback is in the server's log")

    def _submit_all(self) -> None:
        """Submit all jobs of the stored run; retry while the fleet or the store is unavailable."""
        while len(self._jobs) < len(self._specs):
            self._raise_if_stopping()
            try:
                self.submit()
            except UserError:
                raise
            except PolyfleetError as e:
                self.waiting = e.message
                self._shared.closing.wait(RETRY_S)
        self.waiting = "waiting for its nodes"

    def _measure(self) -> None:
        before = self._retry(lambda: self._lines.read(self.run_id))
        done_cases = frozenset(line["case"] for line in before if line["line"] == "case")
        self._logged_nodes = {
            line["target"]: line["facts"].get("node", "") for line in before if line["line"] == "target"
        }
        if not any(line["line"] == "targets" for line in before):
            self._log_line({"line": "targets", "targets": [self._describe_pending(n) for n in range(len(self._jobs))]})
        self._targets = self._open_targets({line["target"] for line in before if line["line"] == "lost"})
        if not self._targets:
            self._end("FAILED", "no device could be opened for measuring")
            return
        for target in self._targets:
            self._log_target(target)
        self.is_measuring, self.waiting = True, ""
        runner = RoundRunner(self._request, self._targets, self._log_line, self._stop_reason, done_cases)
        runner.run(suite.groups(self._request))
        lines = self._retry(lambda: self._lines.read(self.run_id))
        state, reason = outcome({line["id"]: line for line in lines if line["line"] == "result"}.values())
        self._end(state, reason, self._targets)

    def _describe_pending(self, number: int) -> Data:
        """Describe a target whose job does not hold a node yet."""
        request = self._job_requests[number]
        location = {"pool": ", ".join(request.pools), "node": request.node}
        return {"target": request.name, "job": self._jobs[number], "kind": request.kind, **location}

    def _open_targets(self, lost: set[str]) -> list[FleetTarget]:
        """Open targets in the order of jobs; return those whose sessions respond, log the others as lost."""
        numbers = [number for number, request in enumerate(self._job_requests) if request.name not in lost]
        candidates: list[FleetTarget] = []
        for number, results in zip(numbers, self._run_parallel(self._make_targets, numbers), strict=True):
            if isinstance(results, str):
                self._log_line({"line": "lost", "target": self._job_requests[number].name, "reason": results})
            else:
                candidates += [target for target in results if target.id not in lost]
        targets = []
        for target, error in zip(candidates, self._run_parallel(FleetTarget.open, candidates), strict=True):
            if error is None:
                targets.append(target)
            else:
                self._log_line({"line": "lost", "target": target.id, "reason": error})
        return targets

    def _make_targets(self, number: int) -> list[FleetTarget]:
        """Wait until the job runs on a node, then make its targets. Raises TargetLost."""
        job, shared = self._jobs[number], self._shared
        names = self._job_requests[number].targets(wait_for_devices(shared.jobs, job))
        return [
            FleetTarget(name, position, job, shared.jobs, shared.agents, self._log_target) for position, name in names
        ]

    def _run_parallel(self, work: Callable[[T], R], items: Sequence[T]) -> "list[R | str]":
        """Run `work` for all items in parallel; return each result, or a sentence on why it failed.

        Raises RunCancelled if the run is cancelled first.
        """
        results: dict[int, R | str] = {}

        def one(number: int, item: T) -> None:
            try:
                results[number] = work(item)
            except (TargetLost, PolyfleetError) as e:
                results[number] = e.message if isinstance(e, PolyfleetError) else str(e)
            except Exception as e:
                log.exception("a target of benchmark run %s could not be opened", self.run_id)
                results[number] = f"internal error: {e!r}; its traceback is in the server's log"

        threads = [threading.Thread(target=one, args=pair, daemon=True) for pair in enumerate(items)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self._raise_if_stopping()
            time.sleep(POLL_S)
        return [results[number] for number in range(len(items))]

    def _log_target(self, target: FleetTarget) -> None:
        """Log what a target measures when its session responds, and again if its job has another node."""
        node = str(target.facts["node"])
        if target not in self._targets or self._logged_nodes.get(target.id) == node:
            return
        self._logged_nodes[target.id] = node
        self._log_line({"line": "target", "target": target.id, "facts": target.facts, "host": target.host})
        self._log_line({"line": "targets", "targets": [each.view() for each in self._targets]})

    def _raise_if_stopping(self) -> None:
        if reason := self._stop_reason():
            raise RunCancelled(reason)

    def _stop_reason(self) -> str:
        if self._shared.closing.is_set():
            raise _ServerClosing
        return self.cancel_reason

    def _log_line(self, line: Data) -> None:
        if self._shared.closing.is_set():
            raise _ServerClosing  # agents are ending now: the failures that this causes are not results
        if line["line"] == "progress":
            self.progress = {k: v for k, v in line.items() if k != "line"}
        else:
            self._retry(lambda: self._lines.append(self.run_id, line))

    def _retry(self, do: Callable[[], R], check: Callable[[], object] | None = None) -> R:
        """Call `do` until it raises no FleetError: the store or the controller may be unavailable.

        Between tries `check` may raise to give up; by default it does when the run is cancelled. All raise when the
        server closes.
        """
        before = self.waiting
        while True:
            try:
                result = do()
            except FleetError as e:
                self.waiting = e.message
                self._shared.closing.wait(RETRY_S)
                (check or self._raise_if_stopping)()
            else:
                self.waiting = before
                return result

    def _end(self, state: str, reason: str, targets: Sequence[FleetTarget] = ()) -> None:
        """Give the nodes back, then log the end: clients that read the end find all jobs ended as well."""
        self.is_measuring, self.waiting = False, reason
        for target in targets:
            target.end()
        deadline = time.monotonic() + GRACE_S
        for job in {target.job for target in targets}:
            while time.monotonic() < deadline and self._shared.jobs[job].job.state not in TERMINAL:
                time.sleep(0.05)
        ended = {"line": "ended", "state": state, "reason": reason}
        try:
            for job in self._jobs:
                self._retry(partial(cancel_job, job, self._shared), self._stop_reason)
            self._retry(lambda: self._lines.append(self.run_id, ended), self._stop_reason)
        except _ServerClosing:
            log.warning("the end of %s (%s) was not stored; the next server continues the run", self.run_id, state)
        except PolyfleetError as e:
            log.error("the end of %s could not be stored: %s", self.run_id, e)


def outcome(results: Iterable[Data]) -> tuple[str, str]:
    """Final state of a run, and a sentence that counts its unmeasured results ("" if there are none).

    A run has failed if nothing was measured and at least one result failed, was wrong or was lost. Cases that a target
    cannot run, or that had no time left, are not failures.
    """
    counts = Counter(
        result["status"] if result["status"] != MEASURED or result["blocks"] else "skipped" for result in results
    )
    measured = counts.pop(MEASURED, 0)
    if not counts:
        return "SUCCEEDED", ""
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    has_failed = not measured and any(counts[status] for status in ("failed", "wrong", "lost"))
    return (
        "FAILED" if has_failed else "SUCCEEDED",
        f"{measured} of {measured + counts.total()} results were measured: {summary}",
    )


def cancel_job(job: str, shared: RunServices) -> None:
    """Cancel a job of a run unless it has ended. Log other errors, so that the next job can be cancelled.

    Raises FleetError if the job cannot be cancelled now.
    """
    try:
        if shared.jobs[job].job.state not in TERMINAL:
            shared.cancel(job)
    except FleetError:
        raise
    except (PolyfleetError, KeyError) as e:
        log.warning("%s was not cancelled: %s", job, e)


class _ServerClosing(Exception):
    """The server is closing; the next server continues the run."""
