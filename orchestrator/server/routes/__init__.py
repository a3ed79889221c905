"""One file per noun. Each has a `router`; the service comes from the application's state."""

from typing import Annotated, cast

from fastapi import Depends, Request

from orchestrator.server.facade import Facade


def service_of(request: Request) -> Facade:
    return cast(Facade, request.app.state.service)


Service = Annotated[Facade, Depends(service_of)]
