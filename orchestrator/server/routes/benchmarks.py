"""Benchmark runs over the fleet: begin, look, read what was measured, cancel."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from orchestrator.server.responses import json_response
from orchestrator.server.routes import Key, Service
from orchestrator.server.routes.request_bodies import LARGEST, BenchmarkBody

router = APIRouter(prefix="/v1/benchmarks", tags=["benchmarks"])


@router.post("", status_code=201)
def begin(body: BenchmarkBody, service: Service, key: Key) -> Response:
    """Start a run: a job for each node it measures. Once this answers, it is durable."""
    return json_response(service.benchmark_begin(body.request, body.package, key), 201)


@router.get("")
def runs(service: Service) -> Response:
    """All runs, the newest last."""
    return json_response(service.benchmarks())


@router.get("/{ref}")
def run(ref: str, service: Service) -> Response:
    """One run: its state, its columns, what it is doing. `latest` is the newest."""
    return json_response(service.benchmark(ref))


@router.get("/{ref}/lines")
def lines(ref: str, service: Service, after: Annotated[int, Query(ge=0, le=LARGEST)] = 0) -> Response:
    """What was measured, oldest first, from number `after` on: the lines that reports are made of."""
    return json_response(service.benchmark_lines(ref, after))


@router.post("/{ref}/cancel")
def cancel(ref: str, service: Service) -> Response:
    """End it; what was measured stays. A run that has ended stays as it is."""
    return json_response(service.benchmark_cancel(ref))


@router.post("/{ref}/baseline")
def baseline(ref: str, service: Service) -> Response:
    """Later runs are held against this one."""
    return json_response(service.benchmark_baseline(ref))
