"""The FastAPI application: routes, one error shape, and the guard around all of it."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from fastapi import FastAPI

from cluster import paths
from cluster.version import VERSION
from orchestrator.server import answers
from orchestrator.server.facade import Facade
from orchestrator.server.guard import Guard
from orchestrator.server.routes import changes, checkpoints, fleet, jobs, packages, schema, server


def make_app(
    service: Facade, token: str, *, home: Path | None = None, stop: Callable[[], None] | None = None
) -> FastAPI:
    """`service` is anything with the facade's methods. `stop` is called by `POST /v1/shutdown`."""
    app = FastAPI(
        title="Polyfleet",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    app.state.service = service
    app.state.home = home or paths.home()
    app.state.started_at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    app.state.stopping = threading.Event()
    app.state.stream_threads = None
    app.state.stop = stop or app.state.stopping.set
    for part in (server, fleet, jobs, changes, packages, checkpoints, schema):
        app.include_router(part.router)
    answers.install(app)
    app.add_middleware(Guard, token=token)
    return app
