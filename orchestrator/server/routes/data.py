"""Input data of jobs from a client's machine: sent as an upload without a node, stored by content hash."""

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from cluster.errors import NotFound
from orchestrator.server.http.request_bodies import DataSent
from orchestrator.server.http.response_views import returns
from orchestrator.server.http.responses import json_response
from orchestrator.server.http.streams import call_slow
from orchestrator.server.routes import Service
from orchestrator.views.files import DataView

router = APIRouter(prefix="/v1/data", tags=["data"])
Sha = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="SHA-256 of a file, or of a folder's list of hashes")]


@router.head("/{sha}")
@returns(None)
async def has_data(sha: Sha, request: Request, service: Service) -> Response:
    """200 if the server has the data, so that it need not be sent again, else 404."""
    if not await call_slow(request, service.has_data, sha):
        raise NotFound(f"no data {sha[:12]}", "send it: POST /v1/uploads/{upload} with an empty node")
    return Response()


@router.post("/{sha}", status_code=201)
@returns(DataView)
async def keep_data(sha: Sha, body: DataSent, request: Request, service: Service) -> Response:
    """Complete the upload `upload`, sent with an empty node; `single` is its only file, "" for a folder. All data is
    hashed; it is refused if the hash differs.
    """
    return json_response(await call_slow(request, service.keep_data, sha, body.upload, body.single), 201)
