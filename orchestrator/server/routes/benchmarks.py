"""Benchmark runs on the fleet: start, show, read results, cancel."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from orchestrator.server.http.request_bodies import MAX_INTEGER, BenchmarkBody
from orchestrator.server.http.response_views import returns
from orchestrator.server.http.responses import json_response
from orchestrator.server.routes import Key, Service
from orchestrator.views.benchmark_lines import BenchmarkLine
from orchestrator.views.benchmarks import RunView

router = APIRouter(prefix="/v1/benchmarks", tags=["benchmarks"])


@router.post("", status_code=201)
@returns(RunView)
def begin(body: BenchmarkBody, service: Service, key: Key) -> Response:
    """Start a run: a job for each node that it measures. It is durable when this responds."""
    return json_response(service.benchmark_begin(body.request, body.code_archive, key), 201)


@router.get("")
@returns(list[RunView])
def runs(service: Service) -> Response:
    """All runs, the newest last."""
    return json_response(service.benchmarks())


@router.get("/{ref}")
@returns(RunView)
def run(ref: str, service: Service) -> Response:
    """One run: its state, the devices that it measures, its current step. `latest` is the newest run."""
    return json_response(service.benchmark(ref))


@router.get("/{ref}/lines")
@returns(list[BenchmarkLine])
def lines(ref: str, service: Service, after: Annotated[int, Query(ge=0, le=MAX_INTEGER)] = 0) -> Response:
    """Result lines after number `after`, oldest first."""
    return json_response(service.benchmark_lines(ref, after))


@router.post("/{ref}/cancel")
@returns(RunView)
def cancel(ref: str, service: Service) -> Response:
    """Stop a run. Results measured so far remain. A run that has ended is not changed."""
    return json_response(service.benchmark_cancel(ref))


@router.post("/{ref}/baseline")
@returns(RunView)
def baseline(ref: str, service: Service) -> Response:
    """Make this run the baseline with which later runs are compared."""
    return json_response(service.benchmark_baseline(ref))
