"""What happens to all jobs, as it happens."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from orchestrator.server.answers import answer
from orchestrator.server.streams import blocking, events, follow_changes

router = APIRouter(prefix="/v1/changes", tags=["changes"])
After = Annotated[int, Query(ge=0, description="the `last` or `seq` seen so far")]


@router.get("")
async def changes(
    request: Request, after: After = 0, timeout_s: Annotated[float, Query(ge=0, le=30)] = 10.0
) -> Response:
    """Long poll: answers as soon as there are events after `after`, or empty when the time is up."""
    return answer(await blocking(request, request.app.state.service.changes, after, timeout_s))


@router.get("/stream")
async def stream(request: Request, after: After = 0) -> Response:
    """Server-sent events, each `change` {seq, time, job, event, state}."""
    return events(request, follow_changes(request, after))
