"""Events of all jobs, as they happen."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from orchestrator.server.http.request_bodies import MAX_INTEGER
from orchestrator.server.http.response_views import returns, streams_events
from orchestrator.server.http.responses import json_response
from orchestrator.server.http.streams import events, follow_changes, streams
from orchestrator.views.jobs import ChangeEvents, ChangesPage

router = APIRouter(prefix="/v1/changes", tags=["changes"])
After = Annotated[int, Query(ge=0, le=MAX_INTEGER, description="number of the last event received: `last` or `seq`")]


@router.get("")
@returns(ChangesPage)
async def changes(
    request: Request, after: After = 0, timeout_s: Annotated[float, Query(ge=0, le=30, allow_inf_nan=False)] = 10.0
) -> Response:
    """Long poll: responds as soon as there are events after number `after`, or with none after `timeout_s`. Continue
    with `last`; it may increase without an event, because events are removed with old jobs.
    """
    return json_response(await streams(request).changes(after, timeout_s))


@router.get("/stream")
@streams_events(ChangeEvents)
async def stream(request: Request, after: After = 0) -> Response:
    """Server-sent events: `change` {seq, time, job, event, state}."""
    return events(request, follow_changes(request, after))
