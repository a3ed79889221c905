"""Checkpoints in the pools' storage."""

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response

from orchestrator.server.http.operations import Progress, stream_operation
from orchestrator.server.http.request_bodies import MAX_INTEGER, Arrived, CopyBody, ToolBody
from orchestrator.server.http.response_views import returns, streams_events
from orchestrator.server.http.responses import json_response
from orchestrator.server.http.streams import call_slow, events
from orchestrator.server.routes import Key, Service
from orchestrator.services import service as services
from orchestrator.views.checkpoint_results import CopyEvents, ToolEvents
from orchestrator.views.checkpoints import (
    CheckpointDestination,
    CheckpointSummary,
    CheckpointView,
    ChunkView,
    CommittedView,
    IncomingView,
    InterruptedView,
    MovePlan,
)

READ_ONLY_TOOLS = ("verify", "diff")
"""Tools that change nothing: a repeated request runs them again."""
router = APIRouter(prefix="/v1/checkpoints", tags=["checkpoints"])


@router.get("")
@returns(list[CheckpointSummary])
async def checkpoints(request: Request, service: Service, pool: str = "", prefix: str = "") -> Response:
    """Summaries of the checkpoints below `prefix`, in one pool or in all."""
    return json_response(await call_slow(request, service.checkpoints, pool, prefix))


@router.get("/away")
@returns(list[str])
async def away(request: Request, service: Service, pool: str = "") -> Response:
    """A sentence for each storage whose checkpoints are not listed now, because its nodes do not respond."""
    return json_response(await call_slow(request, service.checkpoints_away, pool))


@router.get("/show")
@returns(CheckpointView)
async def show(ref: str, request: Request, service: Service) -> Response:
    """Summary of one checkpoint's manifest: producer, step, tensors, bytes."""
    return json_response(await call_slow(request, service.checkpoint_show, ref))


@router.get("/plan")
@returns(MovePlan)
async def plan(
    ref: str,
    to_kind: str,
    request: Request,
    service: Service,
    count: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
) -> Response:
    """What `count` devices of `to_kind` would keep, convert or refuse, and whether the checkpoint fits."""
    return json_response(await call_slow(request, service.checkpoint_plan, ref, to_kind, count))


@router.post("/copy")
@streams_events(CopyEvents)
async def copy(body: CopyBody, request: Request, key: Key) -> Response:
    """Copy a checkpoint. Events: `progress` {done_bytes, total_bytes}, then `result` or `error`. Closing the connection
    stops the copy.
    """

    def run(service: services.Service, progress: Progress) -> Any:
        return service.checkpoint_copy(body.model_dump(), progress)

    return events(request, stream_operation(request, key, ["copy", body.model_dump()], run))


@router.post("/tools/{verb}")
@streams_events(ToolEvents)
async def tool(verb: str, body: ToolBody, request: Request, key: Key) -> Response:
    """Run a tool (verify, diff, convert, prune, pin, import or export) on a node of the pool. Events as for a copy."""

    def run(service: services.Service, progress: Progress) -> Any:
        return service.checkpoint_tool(verb, body.arguments, progress)

    return events(
        request, stream_operation(request, key if verb not in READ_ONLY_TOOLS else "", [verb, body.arguments], run)
    )


Name = Annotated[str, Query(max_length=255, description="as in the previous response")]
Index = Annotated[int, Query(ge=0, le=MAX_INTEGER, description="index of the chunk of 8 MiB")]


@router.get("/manifest")
@returns(bytes)
async def manifest(ref: str, request: Request, service: Service) -> Response:
    """MANIFEST.json, unchanged. The header Polyfleet-Checkpoint names the checkpoint, for a folder the newest in it."""
    reply = await call_slow(request, service.checkpoint_manifest, ref)
    headers = {"Polyfleet-Checkpoint": quote(reply["checkpoint"])}
    return Response(reply["manifest"], media_type="application/octet-stream", headers=headers)


@router.get("/chunk")
@returns(bytes)
async def chunk(ref: str, file: Name, index: Index, request: Request, service: Service) -> Response:
    """One chunk of a checkpoint's file. `ref` is the checkpoint itself: POOL:PATH/step-…"""
    data = await call_slow(request, service.checkpoint_chunk, ref, file, index)
    return Response(bytes(data), media_type="application/octet-stream")


@router.get("/place")
@returns(CheckpointDestination)
async def place(target: str, request: Request, service: Service) -> Response:
    """The node that writes POOL:FOLDER."""
    return json_response(await call_slow(request, service.checkpoint_destination, target))


@router.put("/incoming")
@returns(IncomingView)
async def incoming(node: Name, folder: str, name: Name, request: Request, service: Service) -> Response:
    """Announce a checkpoint with this manifest (`application/octet-stream`): {"arrived", "missing": [[file, index]],
    "step", "files", "bytes"}. `missing` excludes chunks that have already arrived.
    """
    text = await request.body()
    return json_response(await call_slow(request, service.checkpoint_begin, node, folder, name, text))


@router.put("/incoming/chunk", status_code=201)
@returns(ChunkView)
async def incoming_chunk(
    node: Name, folder: str, name: Name, file: Name, index: Index, request: Request, service: Service
) -> Response:
    """Send one chunk (`application/octet-stream`). Refused if it does not match the manifest."""
    data = await request.body()
    await call_slow(request, service.checkpoint_write, node, folder, name, file, index, data)
    return json_response({"file": file, "index": index}, 201)


@router.delete("/incoming")
@returns(InterruptedView)
async def left(node: Name, folder: str, name: Name, request: Request, service: Service) -> Response:
    """Interrupt a copy. Chunks that have arrived remain for the next try, which need not wait."""
    await call_slow(request, service.checkpoint_interrupt, node, folder, name)
    return json_response({"folder": folder, "name": name})


@router.post("/arrived")
@returns(CommittedView)
async def arrived(body: Arrived, request: Request, service: Service) -> Response:
    """Complete a copy: all chunks are read back and verified, then the checkpoint is committed."""
    return json_response(await call_slow(request, service.checkpoint_commit, body.node, body.folder, body.name))
