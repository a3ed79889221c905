"""Jobs: submit, show, cancel, migrate, explain, logs."""

from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Query, Request, Response
from pydantic import StringConstraints

from cluster.errors import SpecError, nearest
from orchestrator.core.states import State
from orchestrator.runtime.jobs.jobs import JobsQuery
from orchestrator.server.http.request_bodies import MAX_INTEGER, BulkSubmitBody, MigrateBody, NewJob, SubmitBody
from orchestrator.server.http.response_views import returns, streams_events
from orchestrator.server.http.responses import json_response
from orchestrator.server.http.streams import LogStream, cursor_from, events, streams
from orchestrator.server.routes import Key, Service
from orchestrator.services import submissions
from orchestrator.services.views import FIELDS
from orchestrator.views.jobs import AcceptedView, JobEvent, JobView, ReportView
from orchestrator.views.logs import LogEvents, LogPageView
from orchestrator.views.plans import ExplanationView, JobExplanation, OffersView

router = APIRouter(prefix="/v1", tags=["jobs"])
Rank = Annotated[int | None, Query(ge=0, le=MAX_INTEGER, description="only this rank")]
Attempt = Annotated[int | None, Query(ge=0, le=MAX_INTEGER, description="only this attempt; by default all")]
Tail = Annotated[
    int | None,
    Query(ge=0, le=100_000, description="only this number of lines from the end of the log, regardless of `cursor`"),
]
Change = Annotated[str, StringConstraints(max_length=200)]
Changes = Annotated[
    tuple[Change, ...],
    Query(alias="if", max_length=16, description="changes of the fleet: `+4 amd:MI300X`, `pool tpu down`, `node a up`"),
]
Cursor = Annotated[str, Query(max_length=4096, description="`cursor` of the previous page, as JSON")]


Since = Annotated[
    float, Query(ge=0, allow_inf_nan=False, description="only jobs submitted at or after this Unix time, seconds")
]
Before = Annotated[int | None, Query(ge=0, le=MAX_INTEGER, description="continue after the previous page: see `Link`")]
Fields = Annotated[str, Query(max_length=1000, description="comma-separated fields of each job (default: all)")]


@router.post("/jobs", status_code=201)
@returns(JobView)
async def submit(body: SubmitBody, service: Service, request: Request, key: Key) -> Response:
    """Submit a job; it is durable when this responds. The same key with the same body returns the same response.

    If no fleet is up, the job is checked against the last reported devices, and its `reason` says that it waits.
    """
    submission = submissions.Submission(body.spec, body.code_archive, key)
    if submission.is_quick:
        return json_response(await request.app.state.hub.submissions.submit(submission), 201)
    return json_response(await anyio.to_thread.run_sync(service.submit, body.spec, body.code_archive, key), 201)


@router.post("/jobs/bulk", status_code=201)
@returns(AcceptedView)
def submit_many(body: BulkSubmitBody, service: Service, key: Key) -> Response:
    """Submit up to 1,000 jobs, all or none: {"jobs": [{"id", "name"}], "note"}, in the order of the request."""
    return json_response(service.submit_many([(job.spec, job.code_archive) for job in body.jobs], key), 201)


@router.post("/plan")
@returns(ExplanationView)
def plan(body: NewJob, service: Service) -> Response:
    """What the planner would do with this spec now: for each candidate, which devices fit and why others do not. Stores
    nothing. The folder need not be uploaded: measurements of it are looked up by its `content_sha`.
    """
    return json_response(service.plan(body.spec, body.content_sha))


@router.post("/offers")
@returns(OffersView)
def offers(body: NewJob, service: Service) -> Response:
    """Where this spec could run now: wait, speed and price for each candidate, pool and kind, best first.

    Stores nothing. The folder need not be uploaded: measurements of it are looked up by its `content_sha`.
    """
    return json_response(service.offers(body.spec, body.content_sha))


@router.get("/jobs")
@returns(list[JobView])
def jobs(
    request: Request,
    service: Service,
    state: Annotated[list[State] | None, Query(description="only jobs in these states")] = None,
    name: Annotated[str, Query(max_length=200, description="only jobs of this name")] = "",
    since: Since = 0.0,
    before: Before = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    fields: Fields = "",
) -> Response:
    """The newest jobs, the newest last. If there are older ones, `Link: <...>; rel="next"` is their page."""
    selected = tuple(dict.fromkeys(("id", *_fields(fields)))) if fields else ()
    query = JobsQuery(tuple(map(str, state or ())), name, since, before, limit, selected)
    page = service.jobs(query)
    response = json_response(page.rows)
    if page.before is not None:
        older = request.url.include_query_params(before=page.before)
        response.headers["Link"] = f'<{older.path}?{older.query}>; rel="next"'
    return response


def _fields(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in FIELDS]:
        raise SpecError("fields", f"a job has no field {unknown[0]!r}", nearest(unknown[0], FIELDS))
    return names


@router.get("/jobs/{ref}")
@returns(JobView)
def job(ref: str, service: Service) -> Response:
    """One job with all its attempts."""
    return json_response(service.job(ref))


@router.post("/jobs/{ref}/cancel")
@returns(JobView)
def cancel(ref: str, service: Service) -> Response:
    """Cancel a job. A job that has ended is not changed."""
    return json_response(service.cancel(ref))


@router.post("/jobs/{ref}/migrate")
@returns(JobView)
def migrate(ref: str, body: MigrateBody, service: Service) -> Response:
    """Move a job to other devices: it saves a checkpoint, stops, and continues there from its checkpoint."""
    return json_response(service.migrate(ref, body.to))


@router.get("/jobs/{ref}/explain")
@returns(JobExplanation)
def explain(ref: str, service: Service, changes: Changes = ()) -> Response:
    """For each candidate and group of devices: fits, or why not. With `if`: for the fleet with these changes."""
    return json_response(service.explain(ref, changes))


@router.get("/jobs/{ref}/history")
@returns(list[JobEvent])
def history(ref: str, service: Service) -> Response:
    """All events of the job, oldest first."""
    return json_response(service.history(ref))


@router.get("/jobs/{ref}/reports")
@returns(list[ReportView])
def reports(ref: str, service: Service, after: Annotated[int, Query(ge=0, le=MAX_INTEGER)] = 0) -> Response:
    """Values that the job's code reported with `ctx.report`, after number `after`."""
    return json_response(service.reports(ref, after))


@router.get("/jobs/{ref}/logs")
@returns(LogPageView)
async def logs(
    ref: str, request: Request, rank: Rank = None, attempt: Attempt = None, tail: Tail = None, cursor: Cursor = ""
) -> Response:
    """Lines that exist now: one page from `cursor` on, or the last `tail` lines. `ended`: no more lines will follow.

    `job` is the job's id: use it for the next page, since a name means the newest job with it. `away`: a sentence for
    each node whose lines are missing because it did not respond; with `tail`, only for attempts that are needed for
    that number of lines. A line that was read before its end has `unfinished`; its rest is another line of the same
    rank and stream, which has `continues`.
    """
    log = LogStream(streams(request), ref, rank, attempt, cursor_from(cursor))
    lines = await log.page() if tail is None else await log.tail(tail)
    result = {"job": log.ref, "lines": lines, "cursor": log.cursor, "ended": log.ended}
    first = lines[0]["attempt"] if tail and len(lines) >= tail else 0  # earlier attempts are not needed
    return json_response(result | {"away": await log.away(first)})


@router.get("/jobs/{ref}/logs/stream")
@streams_events(LogEvents)
async def stream_logs(
    ref: str, request: Request, rank: Rank = None, attempt: Attempt = None, tail: Tail = None, cursor: Cursor = ""
) -> Response:
    """Server-sent events: `log` {job, lines, cursor} as lines arrive, `end` {state} when the job has ended.

    The first `log` may have no lines. To reconnect to the same log, use its job id and the last cursor.
    """
    log = LogStream(streams(request), ref, rank, attempt, cursor_from(cursor))
    await log.check()
    return events(request, log.follow(tail))
