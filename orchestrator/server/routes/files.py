"""Files of jobs, and what is sent for them.

In pieces of 8 MiB, each with its SHA-256, so that any of them may be asked for or sent again.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from orchestrator.job_files import Spot
from orchestrator.server.responses import json_response
from orchestrator.server.routes import Service
from orchestrator.server.routes.request_bodies import LARGEST, FilesPut
from orchestrator.server.streams import patient

router = APIRouter(prefix="/v1", tags=["files"])
Path = Annotated[str, Query(max_length=4096, description="in the job's folder, with `/`")]
After = Annotated[str, Query(max_length=8192, description="go on where the page before ended: its `after`")]
Offset = Annotated[int, Query(ge=0, le=LARGEST, description="of the piece's first byte")]
First = Annotated[int, Query(ge=0, le=LARGEST, description="the first piece, counted from 0")]
Epoch = Annotated[int, Query(ge=0, le=LARGEST, description="as the listing tells")]
Name = Annotated[str, Query(max_length=255, description="as the listing tells")]
Sha = Annotated[str, Query(pattern="^[0-9a-f]{64}$", description="of the piece")]


@router.get("/jobs/{ref}/files")
async def files(ref: str, request: Request, service: Service, path: Path = "", after: After = "") -> Response:
    """What lies below `path`, at most 5,000 entries of each of its folders; go on with `after` while there is one.

    `job` is its id, `folders` says where the files lie: ask for pieces with both.
    """
    return json_response(await patient(request, service.files, ref, path, after))


@router.get("/jobs/{ref}/files/content")
async def content(
    ref: str, request: Request, service: Service, path: Path, epoch: Epoch, node: Name, pool: Name, offset: Offset = 0
) -> Response:
    """One piece. Headers tell its SHA-256, and of the file its size, version, time and mode."""
    told = await patient(request, service.file_piece, ref, Spot(epoch, node, pool), path, offset)
    data = told.pop("data")
    return Response(bytes(data), media_type="application/octet-stream", headers=_headers(told))


def _headers(told: dict[str, Any]) -> dict[str, str]:
    return {f"Polyfleet-{name.replace('_', '-')}": str(value) for name, value in told.items()}


@router.get("/jobs/{ref}/files/hashes")
async def hashes(
    ref: str, request: Request, service: Service, path: Path, epoch: Epoch, node: Name, pool: Name, first: First = 0
) -> Response:
    """The SHA-256 of some pieces from `first` on, and the file's version."""
    return json_response(await patient(request, service.file_hashes, ref, Spot(epoch, node, pool), path, first))


@router.get("/jobs/{ref}/files/place")
async def place(ref: str, request: Request, service: Service, path: Path = "") -> Response:
    """Where a file that is put goes: epoch, node, pool, and the path there."""
    return json_response(await patient(request, service.file_place, ref, path))


@router.post("/jobs/{ref}/files")
async def put(ref: str, body: FilesPut, request: Request, service: Service) -> Response:
    """Give files of an upload their places in the job's folder. 409 for one that is there: while the job runs, or where
    it differs, without `force`.
    """
    spot, names = Spot(body.epoch, body.node, body.pool), [[one.uploaded, one.path] for one in body.files]
    return json_response(await patient(request, service.files_put, ref, spot, body.upload, names, body.force))


@router.post("/uploads/{upload}")
async def begin(upload: str, node: Name, request: Request, service: Service) -> Response:
    """Begin an upload on a node, or go on with one: the files that are there, with their sizes."""
    return json_response(await patient(request, service.upload_begin, node, upload))


@router.put("/uploads/{upload}/content", status_code=201)
async def send(
    upload: str,
    request: Request,
    service: Service,
    node: Name,
    path: Path,
    sha256: Sha,
    offset: Offset = 0,
    size_bytes: Annotated[int, Query(ge=-1, le=LARGEST, description="of a file that is whole with this piece")] = -1,
    modified_s: Annotated[float, Query(ge=0, le=LARGEST, allow_inf_nan=False)] = 0.0,
    mode: Annotated[int, Query(ge=0, le=0o777)] = 0o644,
    whole: Annotated[str, Query(pattern="^([0-9a-f]{64})?$", description="of all pieces' SHA-256, as text")] = "",
) -> Response:
    """One piece, at most 8 MiB, as `application/octet-stream`. Refused where its SHA-256 is another; with the last one
    the file is read back, and refused where `whole` is another.
    """
    told = {"bytes": size_bytes, "modified_s": modified_s, "mode": mode} | ({"whole": whole} if whole else {})
    end = told if size_bytes >= 0 else None
    data = await request.body()
    await patient(request, service.upload_write, node, upload, path, offset, data, sha256, end)
    return json_response({"path": path, "offset": offset}, 201)


@router.get("/uploads/{upload}/hashes")
async def sent(upload: str, request: Request, service: Service, node: Name, path: Path, first: First = 0) -> Response:
    """The SHA-256 of some pieces of a file that was sent."""
    return json_response(await patient(request, service.upload_hashes, node, upload, path, first))


@router.delete("/uploads/{upload}")
async def discard(upload: str, node: Name, request: Request, service: Service) -> Response:
    """What was sent, and nobody placed, is removed. Else it goes after a week."""
    return json_response(await patient(request, service.upload_discard, node, upload))
