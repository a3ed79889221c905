"""Benchmarks from Python: `o.benchmarks`. `run` of these methods is a run's id, a unique prefix of it, or `latest`."""

from collections.abc import Callable
from typing import Any

from orchestrator.client.client import Client
from orchestrator.show import benchmark as show
from orchestrator.show.notebook_views import KeyValueView, TableView
from orchestrator.submission import benchmark_client

Progress = Callable[[str], None]


def _quiet(message: str) -> None:
    """Discard progress messages: the default when the caller passes no callback."""


class Benchmarks:
    def __init__(self, client: Client):
        self._client = client

    def run(
        self,
        *cases: str,
        entry: str = "",
        working_dir: str = "",
        progress: Progress = _quiet,
        **options: Any,
    ) -> KeyValueView:
        """Measure cases, or the model that `entry` creates, on one device of every kind, and wait for the results.

        `options` are fields of orchestrator.benchmark.suite.BenchmarkRequest: pools, kinds, precisions, levels,
        rounds, …. Interrupting this call does not stop the run; `o.benchmarks.cancel(run)` does.
        """
        request = options | ({"entry": entry} if entry else {"cases": [*cases] or ["all"]})
        run = benchmark_client.start_run(self._client, request, working_dir)["run"]
        benchmark_client.wait_for_run(self._client, run, progress)
        return self.report(run)

    def report(self, run: str = "latest") -> KeyValueView:
        """Results of a run as a table; the object itself contains the numbers as plain data."""
        from orchestrator.benchmark.results import summarize

        return KeyValueView(summarize(benchmark_client.fetch_lines(self._client, run)), show.report)

    def list(self) -> TableView:
        """All runs, the newest last."""
        return TableView(self._client.benchmarks.list(), show.runs)

    def show(self, run: str = "latest") -> KeyValueView:
        """One run: its state, what it measures, its current step."""
        return KeyValueView(self._client.benchmarks.show(run), show.view)

    def cancel(self, run: str, *, key: str = "") -> KeyValueView:
        """Stop a run. Results measured so far remain."""
        return KeyValueView(self._client.benchmarks.cancel(run, key=key), show.view)

    def baseline(self, run: str, *, key: str = "") -> KeyValueView:
        """Make a run the baseline with which later runs are compared."""
        return KeyValueView(self._client.benchmarks.baseline(run, key=key), show.view)
