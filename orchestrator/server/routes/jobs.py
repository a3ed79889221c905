"""Jobs: submit, look, cancel, explain, logs."""

from typing import Annotated
from uuid import uuid4

from fastapi import APIRouter, Header, Query, Request, Response

from orchestrator.core.states import State
from orchestrator.server.answers import answer
from orchestrator.server.routes import Service
from orchestrator.server.routes.bodies import Question, Submission
from orchestrator.server.streams import Logs, cursor_from, events

router = APIRouter(prefix="/v1", tags=["jobs"])
Rank = Annotated[int | None, Query(ge=0, description="only this rank")]
Epoch = Annotated[int | None, Query(ge=0, description="only this attempt; by default all")]
Tail = Annotated[
    int | None,
    Query(ge=0, le=100_000, description="only the last so many lines there are now, whatever `cursor` says"),
]
Cursor = Annotated[str, Query(max_length=4096, description="go on where this `cursor`, as JSON, ended")]


@router.post("/jobs", status_code=201)
def submit(
    body: Submission, service: Service, idempotency_key: Annotated[str, Header(max_length=200)] = ""
) -> Response:
    """Accept a job; once this answers, it is durable. The same key with the same body gives the same job."""
    return answer(service.submit(body.spec, body.package, idempotency_key or uuid4().hex), 201)


@router.post("/plan")
def plan(body: Question, service: Service) -> Response:
    """What would happen to this spec now: per candidate what fits, what is refused and why. Nothing is stored."""
    return answer(service.plan(body.spec))


@router.get("/jobs")
def jobs(
    service: Service,
    state: Annotated[list[State] | None, Query(description="only jobs in these states")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
) -> Response:
    """The newest jobs, the newest of them last."""
    return answer(service.jobs([str(s) for s in state] if state else None, limit))


@router.get("/jobs/{ref}")
def job(ref: str, service: Service) -> Response:
    """One job with all its attempts."""
    return answer(service.job(ref))


@router.post("/jobs/{ref}/cancel")
def cancel(ref: str, service: Service) -> Response:
    """End it. A job that has already ended stays as it is."""
    return answer(service.cancel(ref))


@router.get("/jobs/{ref}/explain")
def explain(ref: str, service: Service) -> Response:
    """Per candidate and devices: fits, or the sentence that refused it."""
    return answer(service.explain(ref))


@router.get("/jobs/{ref}/history")
def history(ref: str, service: Service) -> Response:
    """Every event of the job, oldest first."""
    return answer(service.history(ref))


@router.get("/jobs/{ref}/reports")
def reports(ref: str, service: Service, after: Annotated[int, Query(ge=0)] = 0) -> Response:
    """What the job's code reported with `ctx.report`, from number `after` on."""
    return answer(service.reports(ref, after))


@router.get("/jobs/{ref}/logs")
async def logs(
    ref: str, request: Request, rank: Rank = None, epoch: Epoch = None, tail: Tail = None, cursor: Cursor = ""
) -> Response:
    """Lines there are now: one page from `cursor` on, or the last `tail`. `ended`: no more will come."""
    log = Logs(request, ref, rank, epoch, cursor_from(cursor))
    lines = await log.page() if tail is None else await log.tail(tail)
    return answer({"lines": lines, "cursor": log.cursor, "ended": log.ended})


@router.get("/jobs/{ref}/logs/stream")
async def stream_logs(
    ref: str, request: Request, rank: Rank = None, epoch: Epoch = None, tail: Tail = None, cursor: Cursor = ""
) -> Response:
    """Server-sent events: `log` {lines, cursor} as they come, `end` {state} when the job has ended and all is sent."""
    log = Logs(request, ref, rank, epoch, cursor_from(cursor))
    await log.check()
    return events(request, log.follow(tail))
