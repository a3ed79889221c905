"""The server itself: health check, version, shutdown."""

import os
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from cluster.version import VERSION
from orchestrator.home.server_authentication import CHALLENGE
from orchestrator.server.http.response_views import returns
from orchestrator.server.http.responses import json_response
from orchestrator.views.server import LivenessView, StoppingView, VersionView
from workers.protocol.messages import PROTOCOL

router = APIRouter(tags=["server"])


@router.get("/healthz")
@returns(LivenessView)
async def health(
    request: Request,
    challenge: Annotated[str, Query(pattern=CHALLENGE, description="a random number in hexadecimal digits")] = "",
) -> Response:
    """Health check. The only path that needs no token.

    With a `challenge`, the response has `proof`: the HMAC-SHA256 of PORT:CHALLENGE (port 0: the Unix socket) under the
    HMAC-SHA256 of "polyfleet: this listener knows the token" under the token. A client checks it before it sends the
    token to a port.
    """
    proof = {"proof": request.app.state.prove(request.scope["server"][1], challenge)} if challenge else {}
    return json_response({"ok": True} | proof)


@router.get("/v1/version")
@returns(VersionView)
def version(request: Request) -> Response:
    """Version, protocol, process id, home and start time. Clients first compare `version` with their own."""
    state = request.app.state
    return json_response(
        {
            "version": VERSION,
            "protocol": PROTOCOL,
            "pid": os.getpid(),
            "home": str(state.home),
            "started_at": state.started_at,
        }
    )


@router.post("/v1/shutdown", status_code=202)
@returns(StoppingView)
def shutdown(request: Request) -> Response:
    """Stop the server. The fleet and its attempts keep running; the next server takes them over."""
    request.app.state.stop()
    return json_response({"stopping": True}, 202)
