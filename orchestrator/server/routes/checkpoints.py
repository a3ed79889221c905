"""Checkpoints in the pools' storage."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from orchestrator.server.answers import answer
from orchestrator.server.facade import Facade
from orchestrator.server.routes import Key, Service
from orchestrator.server.routes.bodies import CopyOrder, ToolOrder
from orchestrator.server.streams import events, patient
from orchestrator.server.works import Progress, told_once

READING = ("verify", "diff")
"""They change nothing: asked again, they look again."""
router = APIRouter(prefix="/v1/checkpoints", tags=["checkpoints"])


@router.get("")
async def checkpoints(request: Request, service: Service, pool: str = "", prefix: str = "") -> Response:
    """Summaries of the checkpoints below `prefix`, of one pool or of all."""
    return answer(await patient(request, service.checkpoints, pool, prefix))


@router.get("/show")
async def show(ref: str, request: Request, service: Service) -> Response:
    """One checkpoint's manifest in short: producer, step, tensors, bytes."""
    return answer(await patient(request, service.checkpoint_show, ref))


@router.get("/plan")
async def plan(
    ref: str,
    to_kind: str,
    request: Request,
    service: Service,
    count: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
) -> Response:
    """What `count` devices of `to_kind` would keep, convert or refuse, and whether it fits."""
    return answer(await patient(request, service.checkpoint_plan, ref, to_kind, count))


@router.post("/copy")
async def copy(body: CopyOrder, request: Request, key: Key) -> Response:
    """Events: `progress` {done_bytes, total_bytes}, then `report` or `error`. Closing the connection ends it."""

    def work(service: Facade, tell: Progress) -> Any:
        return service.checkpoint_copy(body.model_dump(), tell)

    return events(request, told_once(request, key, ["copy", body.model_dump()], work))


@router.post("/tools/{verb}")
async def tool(verb: str, body: ToolOrder, request: Request, key: Key) -> Response:
    """verify, diff, convert, prune, pin, import or export, on a node of the pool. Events as for a copy."""

    def work(service: Facade, tell: Progress) -> Any:
        return service.checkpoint_tool(verb, body.arguments, tell)

    return events(request, told_once(request, key if verb not in READING else "", [verb, body.arguments], work))
