"""Routes, one file per noun. Each has a `router`; the service comes from the application's state."""

from typing import Annotated, cast

from fastapi import Depends, Header, Request

from orchestrator.server.http.service_protocol import ServiceProtocol


async def service_of(request: Request) -> ServiceProtocol:
    """The service. A coroutine, because FastAPI would call a function in a thread, which is slower than the rest."""
    return cast(ServiceProtocol, request.app.state.service)


async def key_of(
    idempotency_key: Annotated[
        str, Header(max_length=200, description="a repeated request with the same key and body counts once")
    ] = "",
) -> str:
    return idempotency_key


Service = Annotated[ServiceProtocol, Depends(service_of)]
Key = Annotated[str, Depends(key_of)]
