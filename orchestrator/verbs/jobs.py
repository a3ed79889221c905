"""Jobs: submit, list, show, cancel, migrate, rename, explain, and read their events, metrics and logs."""

from typing import Annotated, Any, cast

import anyio.to_thread
from pydantic import StringConstraints

from cluster.errors import SpecError, UserError, nearest
from orchestrator.core.controller.messages import MigrateRequested, RenameRequested
from orchestrator.limits import MAX_BULK_JOBS
from orchestrator.runtime.jobs.jobs import JobsQuery
from orchestrator.server.http.hub import Hub
from orchestrator.server.http.log_streams import LogStream, cursor_from
from orchestrator.server.http.request_bodies import BulkJob, Spec
from orchestrator.services.submissions import Submission
from orchestrator.services.views import FIELDS, metrics_view
from orchestrator.spec import job_spec_fields
from orchestrator.spec.resource_syntax import accelerators
from orchestrator.verbs.declare import JSON, Arg, Events, Key, Page, RequestBody, Role, verb
from orchestrator.views.jobs import AcceptedView, JobEvent, JobState, JobStoryView, JobView, ReportView
from orchestrator.views.logs import LogEvents, LogPageView
from orchestrator.views.plans import ExplanationView, JobExplanation, OffersView

SHA256_OR_EMPTY = "^([0-9a-f]{64})?$"
Ref = Annotated[str, Arg("job id, unique id prefix, or job name (the newest of that name)")]
CodeArchive = Annotated[str, Arg("SHA-256 of an uploaded code archive, or empty", pattern=SHA256_OR_EMPTY)]
ContentSha = Annotated[str, Arg("SHA-256 of the folder's content, or empty", pattern=SHA256_OR_EMPTY)]
BulkJobs = Annotated[list[BulkJob], Arg("jobs, each as for `POST /v1/jobs`", min_length=1, max_length=MAX_BULK_JOBS)]
States = Annotated[list[JobState] | None, Arg("only jobs in these states")]
Name = Annotated[str, Arg("only jobs of this name", max_length=200)]
Since = Annotated[float, Arg("only jobs submitted at or after this Unix time, seconds")]
Before = Annotated[int | None, Arg("continue after the previous page: see `Link`")]
Limit = Annotated[int, Arg("maximum number of jobs", min=1, max=10_000)]
Fields = Annotated[str, Arg("comma-separated fields of each job (default: all)", max_length=1000)]
Target = Annotated[str, Arg("a pool, a kind such as `tpu:v5e`, or a back end", min_length=1, max_length=200)]
NewName = Annotated[job_spec_fields.Name, Arg("new name, written as `name` in a job file", min_length=1)]
Change = Annotated[str, StringConstraints(max_length=200)]
Changes = Annotated[
    tuple[Change, ...],
    Arg("changes of the fleet: `+4 amd:MI300X`, `pool tpu down`, `node a up`", max_length=16, alias="if"),
]
Rank = Annotated[int | None, Arg("only this rank")]
Attempt = Annotated[int | None, Arg("only this attempt; by default all")]
Tail = Annotated[
    int | None, Arg("only this number of lines from the end of the log, regardless of `cursor`", max=100_000)
]
Cursor = Annotated[str, Arg("`cursor` of the previous page, as JSON", max_length=4096, is_json=True)]
BULK_BODY = RequestBody(JSON, 16 << 20)


@verb("POST /v1/jobs", least=Role.MEMBER, status=201)
async def submit(hub: Hub, spec: Spec, code_archive: CodeArchive = "", *, key: Key) -> JobView:
    """Submit a job; it is durable when this responds. The same key with the same body returns the same response.

    If no fleet is up, the job is checked against the last reported devices, and its `reason` says that it waits.
    """
    submission = Submission(spec, code_archive, key)
    if submission.is_quick:
        return await hub.submissions.submit(submission)
    accept = hub.service.submissions.submit
    return await anyio.to_thread.run_sync(accept, spec, code_archive, key)


@verb("POST /v1/jobs/bulk", least=Role.MEMBER, status=201, body=BULK_BODY)
def submit_many(hub: Hub, jobs: BulkJobs, *, key: Key) -> AcceptedView:
    """Submit up to 1,000 jobs, all or none. The response has them in the order of the request."""
    pairs = [(job.spec, job.code_archive) for job in jobs]
    return hub.service.submissions.submit_all(pairs, key)


@verb("POST /v1/plan", least=Role.VIEWER, idempotent=True)
def plan(hub: Hub, spec: Spec, content_sha: ContentSha = "") -> ExplanationView:
    """What the planner would do with this spec now: for each candidate, which devices fit and why others do not. Stores
    nothing. The folder need not be uploaded: measurements of it are looked up by its `content_sha`.
    """
    return hub.service.explanations.plan(spec, content_sha)


@verb("POST /v1/offers", least=Role.VIEWER, idempotent=True)
def offers(hub: Hub, spec: Spec, content_sha: ContentSha = "") -> OffersView:
    """Where this spec could run now: wait, speed and price for each candidate, pool and kind, best first.

    Stores nothing. The folder need not be uploaded: measurements of it are looked up by its `content_sha`.
    """
    return hub.service.explanations.offers(spec, content_sha)


@verb("GET /v1/jobs", least=Role.VIEWER)
def list_(
    hub: Hub,
    state: States = None,
    name: Name = "",
    since: Since = 0.0,
    before: Before = None,
    limit: Limit = 100,
    fields: Fields = "",
) -> Page[JobView]:
    """The newest jobs, the newest last. If there are older ones, `Link: <...>; rel="next"` is their page."""
    service, selected = hub.service, _selected(fields)
    query = JobsQuery(tuple(state or ()), name, since, before, limit)
    records, older = service.jobs_table.select(query)
    return Page([service.job_views.fields(record, selected) for record in records], older)


@verb("GET /v1/jobs/{ref}", least=Role.VIEWER)
def show(hub: Hub, ref: Ref) -> JobView:
    """One job with all its attempts."""
    return hub.service.job_views.view(hub.service.jobs_table.find(ref))


@verb("POST /v1/jobs/{ref}/cancel", least=Role.MEMBER)
def cancel(hub: Hub, ref: Ref) -> JobView:
    """Cancel a job. A job that has ended is not changed."""
    return show(hub, hub.service.cancel(ref))


@verb("POST /v1/jobs/{ref}/migrate", least=Role.MEMBER)
def migrate(hub: Hub, ref: Ref, to: Target) -> JobView:
    """Move a job to other devices: it saves a checkpoint, stops, and continues there from its checkpoint."""
    job, is_pool = hub.service.jobs_table.find(ref).job.id, to in hub.service.readiness.pools()
    request = MigrateRequested(job, pool=to) if is_pool else MigrateRequested(job, kinds=_kinds(to))
    hub.service.runtime.post_and_wait(request)
    return show(hub, job)


@verb("POST /v1/jobs/{ref}/rename", least=Role.MEMBER)
def rename(hub: Hub, ref: Ref, name: NewName) -> JobView:
    """Give a job another name. A job that has ended keeps its own."""
    job = hub.service.jobs_table.find(ref).job.id
    hub.service.runtime.post_and_wait(RenameRequested(job, name))
    return show(hub, job)


@verb("GET /v1/jobs/{ref}/explain", least=Role.VIEWER)
def explain(hub: Hub, ref: Ref, changes: Changes = ()) -> JobExplanation:
    """Explain where a job can run: for each candidate and group of devices, that it fits or why not. With `if`: for the
    fleet with these changes.
    """
    return hub.service.explanations.explain(ref, changes)


@verb("GET /v1/jobs/{ref}/history", least=Role.VIEWER)
def history(hub: Hub, ref: Ref) -> list[JobEvent]:
    """All events of the job, oldest first."""
    events = hub.service.store.events_of(hub.service.jobs_table.find(ref).job.id)
    return [hub.service.job_views.event(event) for event in events]


@verb("GET /v1/jobs/{ref}/story", least=Role.VIEWER)
def story(hub: Hub, ref: Ref) -> JobStoryView:
    """The stored events of a job, and the steps that led to its present state. A step is a message to the server with
    the changes of the job's attempts and the commands that followed from it. The server has the newest 10,000 lines of
    steps of all jobs in memory.
    """
    job = hub.service.jobs_table.find(ref).job.id
    return {"job": job, "events": history(hub, job), "steps": hub.service.job_views.story(job)}


@verb("GET /v1/jobs/{ref}/reports", least=Role.VIEWER)
def reports(hub: Hub, ref: Ref, after: int = 0) -> list[ReportView]:
    """Values that the job's code reported with `ctx.report`, after number `after`."""
    rows = hub.service.store.metrics.read(hub.service.jobs_table.find(ref).job.id, after)
    return [metrics_view(row) for row in rows]


@verb("GET /v1/jobs/{ref}/logs", least=Role.VIEWER)
async def logs(
    hub: Hub, ref: Ref, rank: Rank = None, attempt: Attempt = None, tail: Tail = None, cursor: Cursor = ""
) -> LogPageView:
    """Lines of a log that exist now: a page from `cursor` on, or the last `tail` lines. `ended`: no more will follow.

    `job` is the job's id: use it for the next page, since a name means the newest job with it. `away`: a sentence for
    each node whose lines are missing because it did not respond; with `tail`, only for attempts that are needed for
    that number of lines. A line that was read before its end has `unfinished`; its rest is another line of the same
    rank and stream, which has `continues`.
    """
    log = LogStream(hub.streams, ref, rank, attempt, cursor_from(cursor))
    lines = await log.page() if tail is None else await log.tail(tail)
    page: dict[str, Any] = {"job": log.ref, "lines": lines, "cursor": log.cursor, "ended": log.ended}
    first = lines[0]["attempt"] if tail and len(lines) >= tail else 0  # earlier attempts are not needed
    return cast(LogPageView, page | {"away": await log.away(first)})


@verb(
    "GET /v1/jobs/{ref}/logs/stream",
    least=Role.VIEWER,
    resume={"ref": "job", "cursor": "cursor", "tail": ""},
)
async def follow(
    hub: Hub, ref: Ref, rank: Rank = None, attempt: Attempt = None, tail: Tail = None, cursor: Cursor = ""
) -> Events[LogEvents]:
    """Stream a log: server-sent events `log` as lines arrive, and `end` when the job has ended.

    The first `log` may have no lines. To reconnect to the same log, use its job id and the last cursor.
    """
    log = LogStream(hub.streams, ref, rank, attempt, cursor_from(cursor))
    await log.check()
    return Events(log.follow(tail))


def _selected(fields: str) -> tuple[str, ...]:
    """Fields of a job to list: those named in a request and the id, or all. Raises SpecError for an unknown one."""
    if not fields:
        return FIELDS
    names = [name.strip() for name in fields.split(",")]
    if unknown := [name for name in names if name not in FIELDS]:
        raise SpecError("fields", f"a job has no field {unknown[0]!r}", nearest(unknown[0], FIELDS))
    return tuple(dict.fromkeys(("id", *names)))


def _kinds(text: str) -> tuple[str, ...]:
    """Kinds of devices that a kind or back end names. Raises SpecError."""
    try:
        return accelerators(text)[0].kinds
    except UserError as e:
        raise SpecError("to", e.message, e.remedy) from None
