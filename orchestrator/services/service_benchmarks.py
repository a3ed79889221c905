"""Operations of the service for benchmark runs on the fleet."""

from typing import Any

from orchestrator.runtime.benchmarks.benchmarks import Benchmarks
from orchestrator.runtime.health.fleet_ready import SUBMIT_WAIT_S, FleetReadiness


class BenchmarkVerbs:
    """Benchmark methods of Service."""

    readiness: FleetReadiness
    benchmark_runs: Benchmarks

    def benchmark_begin(self, request: dict[str, Any], code_archive: str, key: str) -> dict[str, Any]:
        """Start a run. The same key returns the same run, even if the fleet has changed since."""
        self.readiness.wait_until_ready(SUBMIT_WAIT_S)
        return self.benchmark_runs.start(request, code_archive, key)

    def benchmarks(self) -> list[dict[str, Any]]:
        return self.benchmark_runs.views()

    def benchmark(self, ref: str) -> dict[str, Any]:
        return self.benchmark_runs.view(ref)

    def benchmark_lines(self, ref: str, after: int) -> list[dict[str, Any]]:
        return self.benchmark_runs.lines(ref, after)

    def benchmark_cancel(self, ref: str) -> dict[str, Any]:
        return self.benchmark_runs.cancel(ref)

    def benchmark_baseline(self, ref: str) -> dict[str, Any]:
        return self.benchmark_runs.make_baseline(ref)
