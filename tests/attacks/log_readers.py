"""What the tests of logs share: attempts of a real node, and the server's reader of logs, without Ray."""

import runpy
from pathlib import Path
from types import SimpleNamespace

from orchestrator.core.jobs.fold import Attempt, Record
from orchestrator.core.model import Candidate, Job
from orchestrator.core.states import State
from orchestrator.runtime.jobs.log_copies import LogCopies
from orchestrator.runtime.jobs.logs import JobLogs

Node = runpy.run_path(str(Path(__file__).parents[1] / "workers" / "attempt" / "conftest.py"))["Node"]


class Direct:
    """The agents of a fleet, called without Ray in between. `asked` has every call."""

    def __init__(self, **attempts):
        self._attempts, self.asked = attempts, []

    def get(self, node):
        return SimpleNamespace(ready=True, lost="")

    def away_reason(self, node):
        return ""

    def call(self, node, method, *arguments):
        self.asked.append((node, method, *arguments))
        methods = {"logs": self._attempts[node].log, "log_tail_range": self._attempts[node].log_tail}
        return methods[method](*arguments)


def record(job="j", epochs=1, ranks=1, task="run", state=State.SUCCEEDED):
    placed = (("n0/cpu", tuple(range(ranks))),)
    attempts = tuple(Attempt(n, 0, "cpu", "cpu", placed, 0.0, ended_s=1.0) for n in range(1, epochs + 1))
    return Record(Job(job, job, task, (Candidate(("cpu",)),), state=state), attempts=attempts)


def reader(agents, kept=Path("/nowhere/kept")):
    """The server's, with the logs that it has kept itself in a folder."""
    return JobLogs(agents, LogCopies(kept, agents))


def pages(logs, record, limit_bytes=1 << 20, cursor=None):
    """Every page from `cursor` on, up to the first one without lines."""
    cursor = cursor or {}
    while (page := logs.read(record, None, None, cursor, limit_bytes))["lines"]:
        yield page
        cursor = page["cursor"]


def lines(logs, record, **more):
    return [line for page in pages(logs, record, **more) for line in page["lines"]]


__all__ = ["Direct", "Node", "lines", "pages", "reader", "record"]
