"""Jobs: submit, look, cancel, migrate, explain, logs."""

from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Query, Request, Response
from pydantic import StringConstraints

from cluster.errors import SpecError, nearest
from orchestrator.core.states import State
from orchestrator.runtime import submissions
from orchestrator.runtime.jobs_page import JobsWanted
from orchestrator.runtime.views import FIELDS
from orchestrator.server.responses import json_response
from orchestrator.server.routes import Key, Service
from orchestrator.server.routes.request_bodies import LARGEST, BulkSubmitBody, MigrateBody, NewJob, SubmitBody
from orchestrator.server.streams import LogStream, cursor_from, events

router = APIRouter(prefix="/v1", tags=["jobs"])
Rank = Annotated[int | None, Query(ge=0, le=LARGEST, description="only this rank")]
Epoch = Annotated[int | None, Query(ge=0, le=LARGEST, description="only this attempt; by default all")]
Tail = Annotated[
    int | None,
    Query(ge=0, le=100_000, description="only the last so many lines there are now, whatever `cursor` says"),
]
Change = Annotated[str, StringConstraints(max_length=200)]
Changes = Annotated[
    tuple[Change, ...],
    Query(alias="if", max_length=16, description="changes of the fleet: `+4 amd:MI300X`, `pool tpu down`, `node a up`"),
]
Cursor = Annotated[str, Query(max_length=4096, description="go on where this `cursor`, as JSON, ended")]


Since = Annotated[float, Query(ge=0, allow_inf_nan=False, description="submitted then or later, seconds since 1970")]
Before = Annotated[int | None, Query(ge=0, le=LARGEST, description="go on where the page before ended: see `Link`")]
Fields = Annotated[str, Query(max_length=1000, description="only these of each job, a,b; by default all")]


@router.post("/jobs", status_code=201)
async def submit(body: SubmitBody, service: Service, request: Request, key: Key) -> Response:
    """Accept a job; once this answers, it is durable. The same key with the same body gives the same answer.

    No fleet need be up: the job is then checked against the devices seen last, and its `reason` says that it waits.
    """
    asked = submissions.Submission(body.spec, body.package, key)
    if asked.quick:
        return json_response(await request.app.state.submissions.ask(asked), 201)
    return json_response(await anyio.to_thread.run_sync(service.submit, body.spec, body.package, key), 201)


@router.post("/jobs/bulk", status_code=201)
def submit_many(body: BulkSubmitBody, service: Service, key: Key) -> Response:
    """Accept up to 1,000 jobs, all of them or none: {"jobs": [{"id", "name"}], "note"}, in the order given."""
    return json_response(service.submit_many([(job.spec, job.package) for job in body.jobs], key), 201)


@router.post("/plan")
def plan(body: NewJob, service: Service) -> Response:
    """What would happen to this spec now: per candidate what fits, what is refused and why. Nothing is stored. The
    folder need not be uploaded: measurements of it are found by its `content_sha`.
    """
    return json_response(service.plan(body.spec, body.content_sha))


@router.post("/offers")
def offers(body: NewJob, service: Service) -> Response:
    """Where this spec could run now: per candidate, pool and kind the wait, the speed and the price, the best first.

    Nothing is stored. The folder need not be uploaded: measurements of it are found by its `content_sha`.
    """
    return json_response(service.offers(body.spec, body.content_sha))


@router.get("/jobs")
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
    """The newest jobs, the newest of them last. Where there are older ones, `Link: <...>; rel="next"` leads to them."""
    chosen = tuple(dict.fromkeys(("id", *_fields(fields)))) if fields else ()
    wanted = JobsWanted(tuple(map(str, state or ())), name, since, before, limit, chosen)
    found = service.jobs(wanted)
    response = json_response(found.rows)
    if found.before is not None:
        older = request.url.include_query_params(before=found.before)
        response.headers["Link"] = f'<{older.path}?{older.query}>; rel="next"'
    return response


def _fields(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in FIELDS]:
        raise SpecError("fields", f"a job has no field {unknown[0]!r}", nearest(unknown[0], FIELDS))
    return names


@router.get("/jobs/{ref}")
def job(ref: str, service: Service) -> Response:
    """One job with all its attempts."""
    return json_response(service.job(ref))


@router.post("/jobs/{ref}/cancel")
def cancel(ref: str, service: Service) -> Response:
    """End it. A job that has already ended stays as it is."""
    return json_response(service.cancel(ref))


@router.post("/jobs/{ref}/migrate")
def migrate(ref: str, body: MigrateBody, service: Service) -> Response:
    """Move a job to other devices: it saves, stops, and goes on there from its checkpoint."""
    return json_response(service.migrate(ref, body.to))


@router.get("/jobs/{ref}/explain")
def explain(ref: str, service: Service, changes: Changes = ()) -> Response:
    """Per candidate and devices: fits, or the sentence that refused it. With `if`: in the fleet as it would be then."""
    return json_response(service.explain(ref, changes))


@router.get("/jobs/{ref}/history")
def history(ref: str, service: Service) -> Response:
    """Every event of the job, oldest first."""
    return json_response(service.history(ref))


@router.get("/jobs/{ref}/reports")
def reports(ref: str, service: Service, after: Annotated[int, Query(ge=0, le=LARGEST)] = 0) -> Response:
    """What the job's code reported with `ctx.report`, from number `after` on."""
    return json_response(service.reports(ref, after))


@router.get("/jobs/{ref}/logs")
async def logs(
    ref: str, request: Request, rank: Rank = None, epoch: Epoch = None, tail: Tail = None, cursor: Cursor = ""
) -> Response:
    """Lines there are now: one page from `cursor` on, or the last `tail`. `ended`: no more will come.

    `job` is its id: ask for the next page with it, since a name means the newest job so called. `away`: a sentence for
    each node whose lines are missing since it did not answer; with `tail`, of attempts that were needed for so many. A
    line that was read before its end has `unfinished`; its rest is a line of the same rank and stream that has
    `continues`.
    """
    log = LogStream(request, ref, rank, epoch, cursor_from(cursor))
    lines = await log.page() if tail is None else await log.tail(tail)
    told = {"job": log.ref, "lines": lines, "cursor": log.cursor, "ended": log.ended}
    first = lines[0]["epoch"] if tail and len(lines) >= tail else 0  # earlier attempts were not needed
    return json_response(told | {"away": await log.away(first)})


@router.get("/jobs/{ref}/logs/stream")
async def stream_logs(
    ref: str, request: Request, rank: Rank = None, epoch: Epoch = None, tail: Tail = None, cursor: Cursor = ""
) -> Response:
    """Server-sent events: `log` {job, lines, cursor} as they come, `end` {state} when the job has ended.

    The first `log` may have no lines. It is the job's id that leads back to the same log, with the cursor.
    """
    log = LogStream(request, ref, rank, epoch, cursor_from(cursor))
    await log.check()
    return events(request, log.follow(tail))
