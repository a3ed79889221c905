"""Checkpoints in the pools' storage."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from orchestrator.server.answers import answer
from orchestrator.server.facade import Facade
from orchestrator.server.routes import Service
from orchestrator.server.routes.bodies import CheckpointRef, CopyOrder, ToolOrder
from orchestrator.server.streams import events
from orchestrator.server.transfers import Progress, told_events

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
def plan(ref: str, to_kind: str, service: Service, count: Annotated[int, Query(ge=1, le=1_000_000)] = 1) -> Response:
    """What `count` devices of `to_kind` would keep, convert or refuse, and whether it fits."""
    return answer(service.checkpoint_plan(ref, to_kind, count))


@router.post("/verify")
def verify(body: CheckpointRef, service: Service) -> Response:
    """Read every byte and compare with the manifest's hashes."""
    return answer(service.checkpoint_verify(body.ref))


@router.post("/copy")
async def copy(body: CopyOrder, request: Request) -> Response:
    """Events: `progress` {done_bytes, total_bytes}, then `report` or `error`. Closing the connection ends it."""

    def work(service: Facade, tell: Progress) -> Any:
        return service.checkpoint_copy(body.model_dump(), tell)

    return events(request, told_events(request, work))


@router.post("/tools/{verb}")
async def tool(verb: str, body: ToolOrder, request: Request) -> Response:
    """verify, diff, convert, prune, pin, import or export, on a node of the pool. Events as for a copy."""
    return events(
        request, told_events(request, lambda service, tell: service.checkpoint_tool(verb, body.arguments, tell))
    )
