"""The FastAPI application: routes, a uniform form of errors, and the guard around all of it."""

import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

from fastapi import APIRouter, FastAPI
from starlette.types import Receive, Scope, Send

from cluster import paths
from cluster.version import VERSION
from orchestrator.home.server_authentication import challenge_response
from orchestrator.server.actions import Action, ActionTable, action_of
from orchestrator.server.guard import Guard
from orchestrator.server.http import responses
from orchestrator.server.http.hub import Hub
from orchestrator.server.http.response_views import add_responses
from orchestrator.server.mount import make_router
from orchestrator.services.service import Service
from orchestrator.verbs import (
    benchmarks,
    changes,
    checkpoints,
    code_archives,
    data,
    execs,
    files,
    fleet,
    jobs,
    nodes,
    schema,
    server,
)
from orchestrator.verbs.declare import Role, Verb, verbs_of

NOUNS = (jobs, execs, files, server, fleet, nodes, changes, code_archives, data, checkpoints, benchmarks, schema)
ROUTERS = tuple(map(make_router, NOUNS))
DOCUMENT = Action("GET", "/openapi.json", Role.VIEWER)
"""The only route that is not a verb: FastAPI makes it."""


class GuardedApp(FastAPI):
    """FastAPI application behind the guard, which is outside of any middleware that FastAPI adds, now or later."""

    def __init__(self, token: str, **options: Any):
        super().__init__(**options)
        self.actions = ActionTable()
        self.actions.add(DOCUMENT)
        self._guard = Guard(super().__call__, token, self.actions)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send)

    def include_verbs(self, router: APIRouter, verbs: Iterable[Verb]) -> None:
        """Add the routes of verbs, and their rows in the guard's table: it refuses requests for any other route."""
        self.include_router(router)
        for verb in verbs:
            self.actions.add(action_of(verb))

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, with the view of each response."""
        if self.openapi_schema is None:
            add_responses(super().openapi(), ROUTERS)
        return cast(dict[str, Any], self.openapi_schema)


def make_app(
    service: Service, token: str, *, home: Path | None = None, stop: Callable[[], None] | None = None
) -> GuardedApp:
    """Build the application. `POST /v1/shutdown` calls `stop`. Without a service, it has only its OpenAPI document."""
    app = GuardedApp(
        token,
        title="Polyfleet",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    app.state.stopping = threading.Event()
    started_at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    prove = partial(challenge_response, token)
    app.state.hub = Hub(service, home or paths.home(), started_at, prove, stop or app.state.stopping.set)
    for noun, router in zip(NOUNS, ROUTERS, strict=True):
        app.include_verbs(router, verbs_of(noun))
    responses.install(app)
    return app
