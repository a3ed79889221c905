"""One benchmark run over the fleet: its jobs are submitted, their nodes waited for, measured and given back."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from cluster.errors import FleetError, PolyfleetError, UserError
from cluster.serialization import from_plain
from orchestrator.benchmark import suite
from orchestrator.benchmark.job_requests import JobRequest
from orchestrator.benchmark.results import MEASURED
from orchestrator.benchmark.round_runner import RoundRunner, RunCancelled, TargetLost
from orchestrator.core.states import TERMINAL
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.benchmark_target import FleetColumn, placed
from orchestrator.runtime.jobs import Jobs
from orchestrator.store.benchmark_lines import BenchmarkLines

log = logging.getLogger(__name__)
GRACE_S = 20.0
"""For sessions to end by themselves."""
AGAIN_S = 1.0
"""Between tries of what the fleet, the controller or the store does not take now."""
LOOK_S = 0.1
Data = dict[str, Any]
Submit = Callable[[Data, str, str], Data]
Cancel = Callable[[str], Data]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Shared:
    """What the runs of a server have in common. `submit` and `cancel` are those of jobs; `closing`: the server ends."""

    lines: BenchmarkLines
    jobs: Jobs
    agents: Agents
    submit: Submit
    cancel: Cancel
    closing: threading.Event


class Run(threading.Thread):
    """From submitting its jobs to giving their nodes back. `begun` is the line that it was stored with."""

    def __init__(self, begun: Data, shared: Shared):
        super().__init__(name=begun["run"], daemon=True)
        self.run_id, self.cancelled, self.waiting = str(begun["run"]), "", "waiting for its nodes"
        self.measuring = False
        self.progress: Data = {}
        self._asked = suite.request(begun["request"])
        self._wanted = [from_plain(JobRequest, job["wanted"]) for job in begun["jobs"]]
        self._specs: list[Data] = [job["spec"] for job in begun["jobs"]]
        self._package = str(begun["package"])
        self._jobs: list[str] = []
        self._columns: list[FleetColumn] = []
        self._told: dict[str, str] = {}
        self._refused = ""
        self._shared, self._lines = shared, shared.lines

    def submit(self) -> None:
        """The jobs that are not submitted yet. Each has a key of its own: submitted again, it is the same job.

        Raises PolyfleetError; what was submitted before stays.
        """
        while (number := len(self._jobs)) < len(self._specs):
            told = self._shared.submit(self._specs[number], self._package, f"{self.run_id}-{number}")
            self._jobs.append(str(told["id"]))

    def refuse(self, reason: str) -> None:
        """Once it is started, it ends with that reason."""
        self._refused = reason

    def run(self) -> None:
        try:
            if self._refused:
                self._end("FAILED", self._refused)
                return
            self._submit_all()
            self._conduct()
        except _LeftError:
            return
        except RunCancelled as e:
            self._end("CANCELLED", str(e))
        except PolyfleetError as e:
            self._end("FAILED", str(e))
        except Exception as e:
            log.exception("benchmark run %s failed", self.run_id)
            self._end("FAILED", f"internal error: {e!r}; its traceback is in the server's log")

    def _submit_all(self) -> None:
        """However long the fleet or the store does not take jobs: the run was stored before."""
        while len(self._jobs) < len(self._specs):
            self._check()
            try:
                self.submit()
            except UserError:
                raise
            except PolyfleetError as e:
                self.waiting = e.message
                self._shared.closing.wait(AGAIN_S)
        self.waiting = "waiting for its nodes"

    def _conduct(self) -> None:
        before = self._again(lambda: self._lines.read(self.run_id))
        done = frozenset(line["case"] for line in before if line["line"] == "case")
        self._told = {line["column"]: line["facts"].get("node", "") for line in before if line["line"] == "column"}
        if not any(line["line"] == "columns" for line in before):
            self._tell({"line": "columns", "columns": [self._expected(n) for n in range(len(self._jobs))]})
        self._columns = self._opened({line["column"] for line in before if line["line"] == "lost"})
        if not self._columns:
            self._end("FAILED", "no column came up")
            return
        for column in self._columns:
            self._tell_place(column)
        self.measuring, self.waiting = True, ""
        conductor = RoundRunner(self._asked, self._columns, self._tell, self._reason_to_end, done)
        conductor.run(suite.groups(self._asked))
        lines = self._again(lambda: self._lines.read(self.run_id))
        state, reason = outcome({line["id"]: line for line in lines if line["line"] == "cell"}.values())
        self._end(state, reason, self._columns)

    def _expected(self, number: int) -> Data:
        """A column as it is known before its job holds a node."""
        wanted = self._wanted[number]
        where = {"pool": ", ".join(wanted.pools), "node": wanted.node}
        return {"column": wanted.name, "job": self._jobs[number], "kind": wanted.kind, **where}

    def _opened(self, lost: set[str]) -> list[FleetColumn]:
        """Columns whose sessions answer, in the order of the jobs. What does not come up is told once."""
        numbers = [number for number, wanted in enumerate(self._wanted) if wanted.name not in lost]
        found: list[FleetColumn] = []
        for number, made in zip(numbers, self._side_by_side(self._columns_of, numbers), strict=True):
            if isinstance(made, str):
                self._tell({"line": "lost", "column": self._wanted[number].name, "reason": made})
            else:
                found += [column for column in made if column.id not in lost]
        opened = []
        for column, failed in zip(found, self._side_by_side(FleetColumn.open, found), strict=True):
            if failed is None:
                opened.append(column)
            else:
                self._tell({"line": "lost", "column": column.id, "reason": failed})
        return opened

    def _columns_of(self, number: int) -> list[FleetColumn]:
        """Once the planner has given the job its node. Raises TargetLost."""
        job, shared = self._jobs[number], self._shared
        names = self._wanted[number].columns(placed(shared.jobs, job))
        return [FleetColumn(name, place, job, shared.jobs, shared.agents, self._tell_place) for place, name in names]

    def _side_by_side(self, work: Callable[[T], R], items: Sequence[T]) -> "list[R | str]":
        """What `work` answers for each item, or why it could not. Raises Cancelled meanwhile."""
        came: dict[int, R | str] = {}

        def one(number: int, item: T) -> None:
            try:
                came[number] = work(item)
            except (TargetLost, PolyfleetError) as e:
                came[number] = e.message if isinstance(e, PolyfleetError) else str(e)
            except Exception as e:
                log.exception("a column of benchmark run %s did not come up", self.run_id)
                came[number] = f"internal error: {e!r}; its traceback is in the server's log"

        threads = [threading.Thread(target=one, args=pair, daemon=True) for pair in enumerate(items)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self._check()
            time.sleep(LOOK_S)
        return [came[number] for number in range(len(items))]

    def _tell_place(self, column: FleetColumn) -> None:
        """What is measured in a column, once its session answers: again where a job started anew has another node."""
        node = str(column.facts["node"])
        if column not in self._columns or self._told.get(column.id) == node:
            return
        self._told[column.id] = node
        self._tell({"line": "column", "column": column.id, "facts": column.facts, "host": column.host})
        self._tell({"line": "columns", "columns": [one.view() for one in self._columns]})

    def _check(self) -> None:
        if reason := self._reason_to_end():
            raise RunCancelled(reason)

    def _reason_to_end(self) -> str:
        if self._shared.closing.is_set():
            raise _LeftError
        return self.cancelled

    def _tell(self, line: Data) -> None:
        if self._shared.closing.is_set():
            raise _LeftError  # agents go away now: what that looks like is no result
        if line["line"] == "progress":
            self.progress = {k: v for k, v in line.items() if k != "line"}
        else:
            self._again(lambda: self._lines.append(self.run_id, line))

    def _again(self, do: Callable[[], R], check: Callable[[], object] | None = None) -> R:
        """Until the store, or the controller, has taken it. `check` raises where nobody waits for that any more; by
        default that is when the run is cancelled, and always when the server closes.
        """
        before = self.waiting
        while True:
            try:
                told = do()
            except FleetError as e:
                self.waiting = e.message
                self._shared.closing.wait(AGAIN_S)
                (check or self._check)()
            else:
                self.waiting = before
                return told

    def _end(self, state: str, reason: str, ending: Sequence[FleetColumn] = ()) -> None:
        """Give the nodes back, then say so: who reads that it ended finds its jobs ended as well."""
        self.measuring, self.waiting = False, reason
        for column in ending:
            column.end()
        deadline = time.monotonic() + GRACE_S
        for job in {column.job for column in ending}:
            while time.monotonic() < deadline and self._shared.jobs[job].job.state not in TERMINAL:
                time.sleep(0.05)
        ended = {"line": "ended", "state": state, "reason": reason}
        try:
            for job in self._jobs:
                self._again(partial(cancelled, job, self._shared), self._reason_to_end)
            self._again(lambda: self._lines.append(self.run_id, ended), self._reason_to_end)
        except _LeftError:
            log.warning("the end of %s (%s) was not stored; the next server goes on with it", self.run_id, state)
        except PolyfleetError as e:
            log.error("the end of %s could not be stored: %s", self.run_id, e)


def outcome(cells: Iterable[Data]) -> tuple[str, str]:
    """State of a run whose cases are over, and how many of its results are none. It has failed where none was measured
    and some could not be; what cannot run there, or had no time left, is no failure.
    """
    counts = Counter(cell["status"] if cell["status"] != MEASURED or cell["blocks"] else "skipped" for cell in cells)
    measured = counts.pop(MEASURED, 0)
    if not counts:
        return "SUCCEEDED", ""
    told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    failed = not measured and any(counts[status] for status in ("failed", "wrong", "lost"))
    return (
        "FAILED" if failed else "SUCCEEDED",
        f"{measured} of {measured + counts.total()} results were measured: {told}",
    )


def cancelled(job: str, shared: Shared) -> None:
    """Cancel a job of a run, where it has not ended; what is wrong with one of them keeps no other. Raises FleetError
    where that cannot be done now.
    """
    try:
        if shared.jobs[job].job.state not in TERMINAL:
            shared.cancel(job)
    except FleetError:
        raise
    except (PolyfleetError, KeyError) as e:
        log.warning("%s was not cancelled: %s", job, e)


class _LeftError(Exception):
    """The server closes; the run goes on with the next."""
