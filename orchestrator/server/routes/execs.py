"""Commands beside the ranks of a running job: `polyfleet exec` and `polyfleet shell`."""

import base64
import binascii
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from cluster.errors import SpecError
from orchestrator.runtime.jobs.exec_relay import ExecRequest
from orchestrator.server.http.exec_streams import exec_threads, run
from orchestrator.server.http.request_bodies import Command, Input, Size
from orchestrator.server.http.response_views import returns, streams_events
from orchestrator.server.http.responses import json_response
from orchestrator.server.routes import Service
from orchestrator.views.logs import EmptyView, ExecEvents, ExecInputView

router = APIRouter(prefix="/v1", tags=["execs"])
ExecId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


@router.post("/jobs/{ref}/exec")
@streams_events(ExecEvents)
async def start(ref: str, body: Command, request: Request) -> Response:
    """Run a command beside a rank of a running job, in its folder, with its variables. Server-sent events: `started`
    {exec, job, attempt, rank, node}, `output` {stream, data in base64} as it arrives, then `end` {code, reason}. A
    command that was stopped has a reason instead of a code. It is stopped when the attempt or this connection ends.
    """
    command = ExecRequest(
        command=tuple(body.command), rank=body.rank, terminal=body.terminal, takes_input=body.input, rows=body.rows,
        columns=body.columns, term=body.term, by=body.by,
    )  # fmt: skip
    return await run(request, ref, command)


@router.post("/execs/{exec_id}/input")
@returns(ExecInputView)
async def give(exec_id: ExecId, body: Input, request: Request, service: Service) -> Response:
    """Send input to the command: {"taken": bytes accepted so far, "closed": it accepts no more}. Send bytes that were
    not accepted again.
    """
    try:
        data = base64.b64decode(body.data, validate=True)
    except (binascii.Error, ValueError):
        raise SpecError("data", "is not base64", "encode the bytes as in RFC 4648") from None
    return json_response(await exec_threads(request).call(service.exec_write, exec_id, body.offset, data, body.end))


@router.post("/execs/{exec_id}/size")
@returns(EmptyView)
async def resize(exec_id: ExecId, body: Size, request: Request, service: Service) -> Response:
    """Set the size of the command's terminal."""
    await exec_threads(request).call(service.exec_resize, exec_id, body.rows, body.columns)
    return json_response({})


@router.post("/execs/{exec_id}/end")
@returns(EmptyView)
async def end(exec_id: ExecId, request: Request, service: Service) -> Response:
    """Stop the command: SIGHUP, and SIGKILL 2 s later. A command that has ended is not changed."""
    await exec_threads(request).call(service.exec_close, exec_id)
    return json_response({})
