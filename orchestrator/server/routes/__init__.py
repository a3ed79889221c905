"""Routes, one file per noun. Each has a `router`; the service comes from the application's state."""

from typing import Annotated, cast

from fastapi import Depends, Header, Request

from orchestrator.services import service


async def service_of(request: Request) -> service.Service:
    """The service. A coroutine, because FastAPI would call a function in a thread, which is slower than the rest."""
    return cast(service.Service, request.app.state.hub.service)


async def key_of(
    idempotency_key: Annotated[
        str, Header(max_length=200, description="a repeated request with the same key and body counts once")
    ] = "",
) -> str:
    return idempotency_key


Service = Annotated[service.Service, Depends(service_of)]
Key = Annotated[str, Depends(key_of)]
