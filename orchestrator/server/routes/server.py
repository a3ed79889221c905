"""The server itself: alive, which version, end."""

import os

from fastapi import APIRouter, Request, Response

from cluster.version import VERSION
from orchestrator.server.answers import answer
from workers.messages import PROTOCOL

router = APIRouter(tags=["server"])


@router.get("/healthz")
def health() -> Response:
    """That it answers, and nothing else. The only path that needs no token."""
    return answer({"ok": True})


@router.get("/v1/version")
def version(request: Request) -> Response:
    """Version, protocol, process id, home and start time. Clients compare `version` with their own first."""
    state = request.app.state
    return answer(
        {
            "version": VERSION,
            "protocol": PROTOCOL,
            "pid": os.getpid(),
            "home": str(state.home),
            "started_at": state.started_at,
        }
    )


@router.post("/v1/shutdown", status_code=202)
def shutdown(request: Request) -> Response:
    """End the server. The fleet and its attempts go on; the next server takes them up again."""
    request.app.state.stop()
    return answer({"stopping": True}, 202)
