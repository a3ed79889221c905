"""Polyfleet from Python: most verbs of the CLI. docs/guides/python.md lists them.

from orchestrator import Orchestrator, TrainJob

with Orchestrator.connect() as o:
    job = o.submit(TrainJob(entry="train.py", working_dir=".", resources={"accelerators": "cpu:1"}))
    print(job.wait().logs())
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from orchestrator import client as http
from orchestrator import submission
from orchestrator.checkpoint_api import Checkpoints
from orchestrator.inventory import backend_rows
from orchestrator.job_spec import JobSpec
from orchestrator.jobs import JobHandle
from orchestrator.schemas import get_schema
from orchestrator.show import benchmark as show_benchmark
from orchestrator.show import fleet as show_fleet
from orchestrator.show import jobs as show_jobs
from orchestrator.show.notebook_views import KeyValueView, TableView
from orchestrator.show.table import TableStack

Data = dict[str, Any]
Progress = Callable[[str], None]


def _quiet(message: str) -> None:
    """Progress nobody asked to see."""


class Orchestrator:
    """A connection to this home's server. Answers are plain lists and dicts that show themselves as tables."""

    def __init__(self, client: http.Client):
        self._client = client
        self.checkpoints = Checkpoints(client)

    @classmethod
    def connect(
        cls, home: Path | None = None, *, start: bool = True, progress: Progress | None = None
    ) -> "Orchestrator":
        """Finds the server of `home` (POLYFLEET_HOME, else ~/.polyfleet), or starts it unless `start` is false."""
        return cls(http.connect(home, start=start, progress=progress))

    @classmethod
    def up(
        cls, file: Path | None = None, *, demo: bool = False, address: str = "", progress: Progress | None = None
    ) -> "Orchestrator":
        """Bring a fleet up on this machine (see `polyfleet up --help`) and connect. `progress` gets all messages."""
        from orchestrator import lifecycle

        lifecycle.up(progress or _quiet, file, demo=demo, address=address)
        return cls.connect(progress=progress)

    def down(self, progress: Progress = _quiet) -> list[str]:
        """Stop server and embedded fleet; this connection ends with them."""
        from orchestrator import lifecycle

        self.close()
        return lifecycle.down(progress)

    def __enter__(self) -> "Orchestrator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def fleet(self) -> KeyValueView:
        """Pools with their kinds, nodes and devices."""
        return KeyValueView(self._client.fleet(), show_fleet.fleet)

    def inventory(self) -> TableView:
        """Every node with its devices."""
        return TableView(self._client.nodes(), show_fleet.devices)

    def backends(self) -> TableView:
        """Every back end: what the fleet has of it, or why it has none."""
        return TableView(backend_rows(self._client.nodes()), show_fleet.backends)

    def doctor(self) -> TableView:
        """What is wrong with the fleet, and what to do."""
        return TableView(self._client.doctor(), show_fleet.findings)

    def submit(self, job: JobSpec | Data, *, key: str = "") -> JobHandle:
        """Durable when it returns. The same `key` gives the same job; working_dir counts from the current folder."""
        return JobHandle(self._client, submission.submit(self._client, job, key)["id"])

    def submit_many(self, jobs: Sequence[JobSpec | Data], *, key: str = "") -> list[JobHandle]:
        """All of them or none, at most 1,000; a folder that several name is sent once."""
        return [JobHandle(self._client, job_id) for job_id in submission.submit_many(self._client, jobs, key)]

    def plan(self, job: JobSpec | Data) -> KeyValueView:
        """What would happen to `job` now; nothing is submitted."""
        return KeyValueView(submission.plan(self._client, job), show_jobs.plan)

    def offer(self, job: JobSpec | Data) -> KeyValueView:
        """Where `job` could run now, with wait, speed and price, the best first; nothing is submitted."""
        return KeyValueView(submission.offers(self._client, job), show_jobs.offers)

    def jobs(
        self, states: list[str] | None = None, limit: int = 100, *, name: str = "", since_s: float = 0.0
    ) -> TableView:
        """The newest `limit` jobs, the newest last. `since_s`: submitted then or later, seconds since 1970."""
        return TableView(self._client.jobs(states, limit, name=name, since_s=since_s), show_jobs.jobs)

    def job(self, ref: str) -> JobHandle:
        """By id, a unique prefix of one, or the name of the newest job so called."""
        return JobHandle(self._client, self._client.job(ref)["id"])

    def explain(self, ref: str, *changes: str) -> KeyValueView:
        return self.job(ref).explain(*changes)

    def cancel(self, ref: str) -> JobHandle:
        return self.job(ref).cancel()

    def migrate(self, ref: str, to: str) -> JobHandle:
        """Move a job to a pool, a kind or a back end: it saves, stops, and goes on there from its newest
        checkpoint, or starts anew where none is known: `view["continues"]` says which.
        """
        return JobHandle(self._client, self._client.migrate(ref, to)["id"])

    def drain(self, node: str, *, now: bool = False, reason: str = "") -> Data:
        """Place nothing on a node any more; with `now` its attempts save and move as well."""
        return self._client.node_drain(node, now, reason)

    def resume(self, node: str) -> Data:
        """Place jobs on a node again."""
        return self._client.node_resume(node)

    def benchmark(
        self,
        *cases: str,
        entry: str = "",
        working_dir: str = "",
        progress: Progress = _quiet,
        **options: Any,
    ) -> KeyValueView:
        """Measure cases, or the model that `entry` makes, on one device of every kind, and wait for the results.

        `options` are fields of orchestrator.benchmark.suite.BenchmarkRequest: pools, kinds, precisions, levels,
        rounds, …. A run that is interrupted here goes on; `o.cancel_benchmark(run)` ends it.
        """
        from orchestrator.benchmark import run_client

        asked = options | ({"entry": entry} if entry else {"cases": list(cases) or ["all"]})
        run = run_client.start_run(self._client, asked, working_dir)["run"]
        run_client.wait_for_run(self._client, run, progress)
        return self.benchmark_report(run)

    def benchmark_report(self, run: str = "latest") -> KeyValueView:
        """What a run measured, as a table; the numbers are in it as plain data."""
        from orchestrator.benchmark.results import summarize

        return KeyValueView(summarize(self._client.benchmark_lines(run)), show_benchmark.report)

    def benchmark_runs(self) -> TableView:
        return TableView(self._client.benchmarks(), show_benchmark.runs)

    def cancel_benchmark(self, run: str) -> KeyValueView:
        return KeyValueView(self._client.benchmark_cancel(run), show_benchmark.view)

    def schema(self, kind: str) -> Data:
        """JSON Schema of a `job` or a `fleet` file."""
        return get_schema(kind)

    def __repr__(self) -> str:
        return f"<Orchestrator at {self._client.url}>"

    def __rich__(self) -> TableStack:
        return TableStack((show_fleet.fleet(self.fleet()), "", show_jobs.jobs(self.jobs(limit=10))))

    def _repr_html_(self) -> str:
        return self.__rich__().html()
