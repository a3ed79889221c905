"""Files of jobs, and uploads.

Files are transferred in pieces of 8 MiB, each with its SHA-256, so that any piece can be requested or sent again.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from orchestrator.runtime.files.job_files import FolderRef
from orchestrator.server.http.request_bodies import MAX_INTEGER, FilesPut
from orchestrator.server.http.response_views import returns
from orchestrator.server.http.responses import json_response
from orchestrator.server.http.streams import call_slow
from orchestrator.server.routes import Service
from orchestrator.views.files import (
    DestinationView,
    DiscardedView,
    FilesPage,
    HashesView,
    PieceView,
    PlacedView,
    UploadView,
)

router = APIRouter(prefix="/v1", tags=["files"])
Path = Annotated[str, Query(max_length=4096, description="path in the job's folder, with `/`")]
After = Annotated[str, Query(max_length=8192, description="`after` of the previous page")]
Offset = Annotated[int, Query(ge=0, le=MAX_INTEGER, description="offset of the piece's first byte")]
First = Annotated[int, Query(ge=0, le=MAX_INTEGER, description="index of the first piece, from 0")]
Attempt = Annotated[int, Query(ge=0, le=MAX_INTEGER, description="as in the listing")]
Name = Annotated[str, Query(max_length=255, description="as in the listing")]
Sha = Annotated[str, Query(pattern="^[0-9a-f]{64}$", description="SHA-256 of the piece")]


@router.get("/jobs/{ref}/files")
@returns(FilesPage)
async def files(ref: str, request: Request, service: Service, path: Path = "", after: After = "") -> Response:
    """Entries below `path`, at most 5,000 of each of the job's folders. Repeat with `after` until it is empty.

    `job` is the job's id, `folders` the location of its files: requests for pieces need both.
    """
    return json_response(await call_slow(request, service.files, ref, path, after))


@router.get("/jobs/{ref}/files/content")
@returns(bytes)
async def content(
    ref: str,
    request: Request,
    service: Service,
    path: Path,
    attempt: Attempt,
    node: Name,
    pool: Name,
    offset: Offset = 0,
) -> Response:
    """One piece. Headers contain its SHA-256, and the file's size, version, time and mode."""
    piece = await call_slow(request, service.file_piece, ref, FolderRef(attempt, node, pool), path, offset)
    data = piece.pop("data")
    return Response(bytes(data), media_type="application/octet-stream", headers=_headers(piece))


def _headers(fields: dict[str, Any]) -> dict[str, str]:
    return {f"Polyfleet-{name.replace('_', '-')}": str(value) for name, value in fields.items()}


@router.get("/jobs/{ref}/files/hashes")
@returns(HashesView)
async def hashes(
    ref: str, request: Request, service: Service, path: Path, attempt: Attempt, node: Name, pool: Name, first: First = 0
) -> Response:
    """SHA-256 of some pieces from index `first` on, and the file's version."""
    return json_response(
        await call_slow(request, service.file_hashes, ref, FolderRef(attempt, node, pool), path, first)
    )


@router.get("/jobs/{ref}/files/place")
@returns(DestinationView)
async def place(ref: str, request: Request, service: Service, path: Path = "") -> Response:
    """Where a file that is put is stored: epoch, node, pool and path."""
    return json_response(await call_slow(request, service.file_destination, ref, path))


@router.post("/jobs/{ref}/files")
@returns(PlacedView)
async def put(ref: str, body: FilesPut, request: Request, service: Service) -> Response:
    """Move files of an upload into the job's folder. 409 for a file that exists: always while the job runs, else if it
    differs and `force` is not set.
    """
    folder, names = FolderRef(body.attempt, body.node, body.pool), [[one.uploaded, one.path] for one in body.files]
    return json_response(await call_slow(request, service.files_put, ref, folder, body.upload, names, body.force))


@router.post("/uploads/{upload}")
@returns(UploadView)
async def begin(upload: str, node: Name, request: Request, service: Service) -> Response:
    """Begin or resume an upload on a node. Returns the files that have already been sent, with their sizes."""
    return json_response(await call_slow(request, service.upload_begin, node, upload))


@router.put("/uploads/{upload}/content", status_code=201)
@returns(PieceView)
async def send(
    upload: str,
    request: Request,
    service: Service,
    node: Name,
    path: Path,
    sha256: Sha,
    offset: Offset = 0,
    size_bytes: Annotated[
        int, Query(ge=-1, le=MAX_INTEGER, description="size of the file that this piece completes")
    ] = -1,
    modified_s: Annotated[float, Query(ge=0, le=MAX_INTEGER, allow_inf_nan=False)] = 0.0,
    mode: Annotated[int, Query(ge=0, le=0o777)] = 0o644,
    whole: Annotated[
        str, Query(pattern="^([0-9a-f]{64})?$", description="SHA-256 of the pieces' SHA-256, as text")
    ] = "",
) -> Response:
    """Send one piece, at most 8 MiB, as `application/octet-stream`. Refused if its SHA-256 differs. After the last
    piece the file is read back, and refused if `whole` differs.
    """
    attributes = {"bytes": size_bytes, "modified_s": modified_s, "mode": mode} | ({"whole": whole} if whole else {})
    end = attributes if size_bytes >= 0 else None
    data = await request.body()
    await call_slow(request, service.upload_write, node, upload, path, offset, data, sha256, end)
    return json_response({"path": path, "offset": offset}, 201)


@router.get("/uploads/{upload}/hashes")
@returns(HashesView)
async def sent(upload: str, request: Request, service: Service, node: Name, path: Path, first: First = 0) -> Response:
    """SHA-256 of some pieces of a file that was sent."""
    return json_response(await call_slow(request, service.upload_hashes, node, upload, path, first))


@router.delete("/uploads/{upload}")
@returns(DiscardedView)
async def discard(upload: str, node: Name, request: Request, service: Service) -> Response:
    """Remove files of an upload that were not moved to a job. They are otherwise removed after a week."""
    return json_response(await call_slow(request, service.upload_discard, node, upload))
