"""Code archives: zip archives of submitted folders, named by their SHA-256."""

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from cluster.errors import NotFound
from orchestrator.server.http.archive_upload import receive_code_archive
from orchestrator.server.http.response_views import returns
from orchestrator.server.http.responses import json_response
from orchestrator.server.routes import Service
from orchestrator.views.files import CodeArchiveView

router = APIRouter(prefix="/v1/code-archives", tags=["code archives"])
Sha = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="SHA-256 of the archive, hexadecimal")]


@router.head("/{sha}")
@returns(None)
def has_code_archive(sha: Sha, service: Service) -> Response:
    """200 if the server has the code archive, so that it need not be sent again, else 404."""
    if not service.has_code_archive(sha):
        raise NotFound(f"no code archive {sha[:12]}", "send it with PUT")
    return Response()


@router.put("/{sha}", status_code=201)
@returns(CodeArchiveView)
async def put_code_archive(sha: Sha, request: Request) -> Response:
    """Store a zip archive (`Content-Type: application/zip`, at most 512 MiB). Refused if its SHA-256 differs."""
    await receive_code_archive(request, sha)
    return json_response({"code_archive": sha}, 201)
