"""Python interface of Polyfleet: most commands of the CLI. docs/guides/python.md lists them.

from orchestrator import Orchestrator, TrainJob

with Orchestrator.connect() as o:
    job = o.submit(TrainJob(entry="train.py", working_dir=".", resources={"accelerators": "cpu:1"}))
    print(job.wait().logs())
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from orchestrator.checkpoint_api import Checkpoints
from orchestrator.client import client as http
from orchestrator.client.inventory import backend_rows
from orchestrator.show import benchmark as show_benchmark
from orchestrator.show import fleet as show_fleet
from orchestrator.show import jobs as show_jobs
from orchestrator.show.notebook_views import KeyValueView, TableView, schema_fields
from orchestrator.show.table import TableStack
from orchestrator.spec.job_spec import JobSpec, get_schema
from orchestrator.submission import submission
from orchestrator.submission.jobs import JobHandle
from orchestrator.views.jobs import JobState

Data = dict[str, Any]
Progress = Callable[[str], None]


def _quiet(message: str) -> None:
    """Discard progress messages: the default when the caller passes no callback."""


class Orchestrator:
    """A connection to the server of this home. Results are plain lists and dicts that a notebook shows as tables."""

    def __init__(self, client: http.Client):
        self._client = client
        self.checkpoints = Checkpoints(client)

    @classmethod
    def connect(
        cls, home: Path | None = None, *, start: bool = True, progress: Progress | None = None
    ) -> "Orchestrator":
        """Connect to the server of `home` (default: POLYFLEET_HOME, else ~/.polyfleet). Start it if none runs, unless
        `start` is false.
        """
        return cls(http.connect(home, start=start, progress=progress))

    @classmethod
    def up(
        cls, file: Path | None = None, *, demo: bool = False, address: str = "", progress: Progress | None = None
    ) -> "Orchestrator":
        """Start a fleet on this machine (see `polyfleet up --help`) and connect. `progress` receives all messages."""
        from orchestrator.client import lifecycle

        lifecycle.up(progress or _quiet, file, demo=demo, address=address)
        return cls.connect(progress=progress)

    def down(self, progress: Progress = _quiet) -> list[str]:
        """Stop the server and the embedded fleet, and close this connection."""
        from orchestrator.client import lifecycle

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
        return KeyValueView(self._client.fleet.show(), show_fleet.fleet)

    def inventory(self) -> TableView:
        """Every node with its devices."""
        return TableView(self._client.nodes.list(), show_fleet.devices)

    def backends(self) -> TableView:
        """Every back end: the fleet's devices for it, or why there are none."""
        return TableView(backend_rows(self._client.nodes.list()), show_fleet.backends)

    def doctor(self) -> TableView:
        """Problems of the fleet, each with its remedy."""
        return TableView(self._client.fleet.doctor(), show_fleet.findings)

    def submit(self, job: JobSpec | Data, *, key: str = "") -> JobHandle:
        """Submit a job; it is stored durably before this returns. Repeating a call with the same `key` returns the same
        job. A relative working_dir starts at the current folder.
        """
        return JobHandle(self._client, submission.submit(self._client, job, key)["id"])

    def submit_many(self, jobs: Sequence[JobSpec | Data], *, key: str = "") -> list[JobHandle]:
        """Submit all jobs or none, at most 1,000. A working folder that several jobs share is sent once."""
        return [JobHandle(self._client, job_id) for job_id in submission.submit_many(self._client, jobs, key)]

    def plan(self, job: JobSpec | Data) -> KeyValueView:
        """Describe what the scheduler would do with `job` now, without submitting it."""
        return KeyValueView(submission.plan(self._client, job), show_jobs.plan)

    def offer(self, job: JobSpec | Data) -> KeyValueView:
        """List where `job` could run now, with wait, speed and price, best first, without submitting it."""
        return KeyValueView(submission.offers(self._client, job), show_jobs.offers)

    def jobs(
        self, states: Sequence[JobState] | None = None, limit: int = 100, *, name: str = "", since_s: float = 0.0
    ) -> TableView:
        """The newest `limit` jobs, the newest last. `since_s`: only jobs submitted since this Unix time in seconds."""
        return TableView(self._client.jobs.list(state=states, limit=limit, name=name, since=since_s), show_jobs.jobs)

    def job(self, ref: str) -> JobHandle:
        """Return a job by its id, a unique prefix of the id, or its name (the newest job with that name)."""
        return JobHandle(self._client, self._client.jobs.show(ref)["id"])

    def explain(self, ref: str, *changes: str) -> KeyValueView:
        return self.job(ref).explain(*changes)

    def cancel(self, ref: str) -> JobHandle:
        return self.job(ref).cancel()

    def migrate(self, ref: str, to: str) -> JobHandle:
        """Move a job to a pool, a kind or a back end. It saves, stops and continues there from its newest checkpoint,
        or starts again if it has none; `view["continues"]` says which.
        """
        return JobHandle(self._client, self._client.jobs.migrate(ref, to)["id"])

    def rename(self, ref: str, name: str) -> JobHandle:
        """Give a job another name. A job that has ended keeps its own."""
        return JobHandle(self._client, self._client.jobs.rename(ref, name)["id"])

    def drain(self, node: str, *, now: bool = False, reason: str = "") -> KeyValueView:
        """Stop placing jobs on a node. With `now`, its attempts also save a checkpoint and move to other nodes."""
        return KeyValueView(self._client.nodes.drain(node, now=now, reason=reason), show_fleet.node_state)

    def resume(self, node: str) -> KeyValueView:
        """Place jobs on a node again."""
        return KeyValueView(self._client.nodes.resume(node), show_fleet.node_state)

    def benchmark(
        self,
        *cases: str,
        entry: str = "",
        working_dir: str = "",
        progress: Progress = _quiet,
        **options: Any,
    ) -> KeyValueView:
        """Measure cases, or the model that `entry` creates, on one device of every kind, and wait for the results.

        `options` are fields of orchestrator.benchmark.suite.BenchmarkRequest: pools, kinds, precisions, levels,
        rounds, …. Interrupting this call does not stop the run; `o.cancel_benchmark(run)` does.
        """
        from orchestrator.submission import benchmark_client as run_client

        request = options | ({"entry": entry} if entry else {"cases": list(cases) or ["all"]})
        run = run_client.start_run(self._client, request, working_dir)["run"]
        run_client.wait_for_run(self._client, run, progress)
        return self.benchmark_report(run)

    def benchmark_report(self, run: str = "latest") -> KeyValueView:
        """Results of a run as a table; the object itself contains the numbers as plain data."""
        from orchestrator.benchmark.results import summarize
        from orchestrator.submission.benchmark_client import fetch_lines

        return KeyValueView(summarize(fetch_lines(self._client, run)), show_benchmark.report)

    def benchmark_runs(self) -> TableView:
        return TableView(self._client.benchmarks.list(), show_benchmark.runs)

    def cancel_benchmark(self, run: str) -> KeyValueView:
        return KeyValueView(self._client.benchmarks.cancel(run), show_benchmark.view)

    def schema(self, kind: str) -> KeyValueView:
        """JSON Schema of a `job` or a `fleet` file. Printed, it is a table of the file's fields."""
        return KeyValueView(get_schema(kind), schema_fields)

    def __repr__(self) -> str:
        return f"<Orchestrator at {self._client.url}>"

    def __rich__(self) -> TableStack:
        return TableStack((show_fleet.fleet(self.fleet()), "", show_jobs.jobs(self.jobs(limit=10))))

    def _repr_html_(self) -> str:
        return self.__rich__().html()
