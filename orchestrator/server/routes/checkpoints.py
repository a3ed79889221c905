"""Checkpoints in the pools' storage."""

from fastapi import APIRouter, Request, Response

from orchestrator.server.answers import answer
from orchestrator.server.routes import Service
from orchestrator.server.routes.bodies import CheckpointRef, CopyOrder
from orchestrator.server.streams import events
from orchestrator.server.transfers import copy_events

router = APIRouter(prefix="/v1/checkpoints", tags=["checkpoints"])


@router.get("")
def checkpoints(service: Service, pool: str = "", prefix: str = "") -> Response:
    """Summaries of the checkpoints below `prefix`, of one pool or of all."""
    return answer(service.checkpoints(pool, prefix))


@router.get("/show")
def show(ref: str, service: Service) -> Response:
    """One checkpoint's manifest in short: producer, step, tensors, bytes."""
    return answer(service.checkpoint_show(ref))


@router.get("/plan")
def plan(ref: str, to_kind: str, service: Service) -> Response:
    """What a device of `to_kind` would keep, convert or refuse."""
    return answer(service.checkpoint_plan(ref, to_kind))


@router.post("/verify")
def verify(body: CheckpointRef, service: Service) -> Response:
    """Read every byte and compare with the manifest's hashes."""
    return answer(service.checkpoint_verify(body.ref))


@router.post("/copy")
async def copy(body: CopyOrder, request: Request) -> Response:
    """Events: `progress` {done_bytes, total_bytes}, then `report` or `error`. Closing the connection ends it."""
    return events(request, copy_events(request, body.source, body.target, body.to_kind))
