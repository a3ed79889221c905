"""The server itself: health, version, shutdown."""

import os
from typing import Annotated, cast

from cluster.version import VERSION
from orchestrator.home.server_authentication import CHALLENGE
from orchestrator.server.http.hub import Hub
from orchestrator.verbs.declare import Arg, Caller, Role, verb
from orchestrator.views.server import HealthView, LivenessView, StoppingView, VersionView
from workers.protocol.messages import PROTOCOL

Challenge = Annotated[str, Arg("a random number in hexadecimal digits", pattern=CHALLENGE)]


@verb("GET /healthz", least=None)
async def ping(hub: Hub, caller: Caller, challenge: Challenge = "") -> LivenessView:
    """Health check. The only path that needs no token.

    With a `challenge`, the response has `proof`: the HMAC-SHA256 of PORT:CHALLENGE (port 0: the Unix socket) under the
    HMAC-SHA256 of "polyfleet: this listener knows the token" under the token. A client checks it before it sends the
    token to a port.
    """
    return {"ok": True, "proof": hub.prove(caller.port, challenge)} if challenge else {"ok": True}


@verb("GET /v1/health", least=Role.VIEWER)
def health(hub: Hub) -> HealthView:
    """State of the server: age of the controller's last turn, waiting calls, silence of nodes, state of the store."""
    service = hub.service
    return cast(HealthView, service.health_collector.view() | {"jobs": service.store.jobs.counts()})


@verb("GET /v1/version", least=Role.VIEWER)
def version(hub: Hub) -> VersionView:
    """Version, protocol, process id, home and start time. Clients first compare `version` with their own."""
    return {
        "version": VERSION,
        "protocol": PROTOCOL,
        "pid": os.getpid(),
        "home": str(hub.home),
        "started_at": hub.started_at,
    }


@verb("POST /v1/shutdown", least=Role.ADMIN, status=202, idempotent=True)
def shutdown(hub: Hub) -> StoppingView:
    """Stop the server. The fleet and its attempts keep running; the next server takes them over."""
    hub.stop()
    return {"stopping": True}
