"""Benchmark runs on the fleet: start, list, show, read results, cancel."""

from typing import Annotated

from orchestrator.runtime.health.fleet_ready import SUBMIT_WAIT_S
from orchestrator.server.http.hub import Hub
from orchestrator.server.http.request_bodies import Spec
from orchestrator.verbs.declare import Arg, Key, Role, verb
from orchestrator.verbs.jobs import CodeArchive
from orchestrator.views.benchmark_lines import BenchmarkLine
from orchestrator.views.benchmarks import RunView

Ref = Annotated[str, Arg("id of a run, a unique prefix of it, or `latest`")]
RequestSpec = Annotated[Spec, Arg("what to measure: cases, precisions, levels, pools, kinds, rounds, …")]


@verb("POST /v1/benchmarks", least=Role.MEMBER, status=201)
def start(hub: Hub, request: RequestSpec, code_archive: CodeArchive = "", *, key: Key) -> RunView:
    """Start a run: a job for each node that it measures. It is durable when this responds."""
    hub.service.readiness.wait_until_ready(SUBMIT_WAIT_S)
    return hub.service.benchmark_runs.start(request, code_archive, key)


@verb("GET /v1/benchmarks", least=Role.VIEWER)
def list_(hub: Hub) -> list[RunView]:
    """All runs, the newest last."""
    return hub.service.benchmark_runs.views()


@verb("GET /v1/benchmarks/{ref}", least=Role.VIEWER)
def show(hub: Hub, ref: Ref) -> RunView:
    """One run: its state, the devices that it measures, its current step. `latest` is the newest run."""
    return hub.service.benchmark_runs.view(ref)


@verb("GET /v1/benchmarks/{ref}/lines", least=Role.VIEWER)
def lines(hub: Hub, ref: Ref, after: int = 0) -> list[BenchmarkLine]:
    """Result lines after number `after`, oldest first."""
    return hub.service.benchmark_runs.lines(ref, after)


@verb("POST /v1/benchmarks/{ref}/cancel", least=Role.MEMBER)
def cancel(hub: Hub, ref: Ref) -> RunView:
    """Stop a run. Results measured so far remain. A run that has ended is not changed."""
    return hub.service.benchmark_runs.cancel(ref)


@verb("POST /v1/benchmarks/{ref}/baseline", least=Role.MEMBER)
def baseline(hub: Hub, ref: Ref) -> RunView:
    """Make this run the baseline with which later runs are compared."""
    return hub.service.benchmark_runs.make_baseline(ref)
