"""Files of jobs, and uploads.

Files are transferred in pieces of 8 MiB, each with its SHA-256, so that any piece can be requested or sent again.
"""

from typing import Annotated, Any, cast

from orchestrator.core.jobs.fold import Record
from orchestrator.runtime.files.job_files import FolderRef, JobFileService
from orchestrator.server.http.hub import Hub
from orchestrator.server.http.request_bodies import MAX_INTEGER, FilePut
from orchestrator.services.service import Service
from orchestrator.units import iso
from orchestrator.verbs.declare import Arg, Download, Role, verb
from orchestrator.verbs.jobs import Ref
from orchestrator.views.files import (
    DestinationView,
    DiscardedView,
    FilesPage,
    FileView,
    HashesView,
    PieceView,
    PlacedView,
    UploadView,
)

Path = Annotated[str, Arg("path in the job's folder, with `/`", max_length=4096)]
After = Annotated[str, Arg("`after` of the previous page", max_length=8192)]
Offset = Annotated[int, Arg("offset of the piece's first byte")]
First = Annotated[int, Arg("index of the first piece, from 0")]
Attempt = Annotated[int, Arg("as in the listing")]
Name = Annotated[str, Arg("as in the listing", max_length=255, in_query=True)]
Sha = Annotated[str, Arg("SHA-256 of the piece", pattern="^[0-9a-f]{64}$")]
FileSize = Annotated[int, Arg("size of the file that this piece completes", min=-1)]
ModifiedTime = Annotated[float, Arg(max=MAX_INTEGER)]
Mode = Annotated[int, Arg(max=0o777)]
PiecesSha = Annotated[str, Arg("SHA-256 of the pieces' SHA-256, as text", pattern="^([0-9a-f]{64})?$", alias="whole")]
UploadId = Annotated[str, Arg(pattern="^[0-9a-z-]{8,64}$")]
PutFiles = Annotated[list[FilePut], Arg(min_length=1, max_length=1000)]
PutAttempt = Annotated[int, Arg("from `files/place`, like `node` and `pool`")]
PutName = Annotated[str, Arg(max_length=255)]
Force = Annotated[bool, Arg("overwrite files that differ; never while the job runs")]


@verb("GET /v1/jobs/{ref}/files", least=Role.VIEWER, slow=True)
def list_(hub: Hub, ref: Ref, path: Path = "", after: After = "") -> FilesPage:
    """Entries below `path`, at most 5,000 of each of the job's folders. Repeat with `after` until it is empty.

    `job` is the job's id, `folders` the location of its files: requests for pieces need both.
    """
    page = hub.service.job_files.page(_find_job(hub.service, ref), path, after)
    return cast(FilesPage, page | {"entries": [_file_view(entry) for entry in page["entries"]]})


@verb("GET /v1/jobs/{ref}/files/content", least=Role.VIEWER, slow=True)
def read(hub: Hub, ref: Ref, path: Path, attempt: Attempt, node: Name, pool: Name, offset: Offset = 0) -> Download:
    """One piece of a file, at most 8 MiB. Headers have its SHA-256, and the file's size, version, time and mode."""
    folder = FolderRef(attempt, node, pool)
    piece = hub.service.job_files.piece(_find_job(hub.service, ref), folder, path, offset)
    return Download(piece.pop("data"), _headers(piece))


@verb("GET /v1/jobs/{ref}/files/hashes", least=Role.VIEWER, slow=True)
def hashes(hub: Hub, ref: Ref, path: Path, attempt: Attempt, node: Name, pool: Name, first: First = 0) -> HashesView:
    """SHA-256 of some pieces from index `first` on, and the file's version."""
    folder = FolderRef(attempt, node, pool)
    return hub.service.job_files.hashes(_find_job(hub.service, ref), folder, path, first)


@verb("GET /v1/jobs/{ref}/files/place", least=Role.MEMBER, slow=True)
def destination(hub: Hub, ref: Ref, path: Path = "") -> DestinationView:
    """Where a file that is put is stored: attempt, node, pool and path in the job's folder."""
    return hub.service.job_files.destination(_find_job(hub.service, ref), path)


@verb("POST /v1/jobs/{ref}/files", least=Role.MEMBER, slow=True)
def put(
    hub: Hub,
    ref: Ref,
    upload: UploadId,
    files: PutFiles,
    attempt: PutAttempt,
    node: PutName,
    pool: PutName,
    force: Force = False,
) -> PlacedView:
    """Move files of an upload into the job's folder. 409 for a file that exists: always while the job runs, else if it
    differs and `force` is not set.
    """
    record, folder = _find_job(hub.service, ref), FolderRef(attempt, node, pool)
    names = [[file.uploaded, file.path] for file in files]
    return {"placed": hub.service.job_files.put(record, folder, upload, names, force)}


# -- uploads: to a node, or, if `node` is "", to this server: input data of a job


@verb("POST /v1/uploads/{upload}", least=Role.MEMBER, idempotent=True, slow=True)
def begin_upload(hub: Hub, upload: str, node: Name) -> UploadView:
    """Begin or resume an upload on a node. Returns the files that have already been sent, with their sizes."""
    service = hub.service
    return {"there": _node_files(service).begin(node, upload) if node else service.data.begin(upload)}


@verb("PUT /v1/uploads/{upload}/content", least=Role.MEMBER, status=201, slow=True)
def send_piece(
    hub: Hub,
    upload: str,
    node: Name,
    path: Path,
    sha256: Sha,
    offset: Offset = 0,
    size_bytes: FileSize = -1,
    modified_s: ModifiedTime = 0.0,
    mode: Mode = 0o644,
    pieces_sha256: PiecesSha = "",
    *,
    data: bytes,
) -> PieceView:
    """Send one piece, at most 8 MiB, as `application/octet-stream`. Refused if its SHA-256 differs. After the last
    piece the file is read back, and refused if `whole` differs.
    """
    attributes: dict[str, Any] = {"bytes": size_bytes, "modified_s": modified_s, "mode": mode}
    if pieces_sha256:
        attributes["whole"] = pieces_sha256
    end = attributes if size_bytes >= 0 else None
    if node:
        _node_files(hub.service).write(node, upload, path, offset, data, sha256, end)
    else:
        hub.service.data.write(upload, path, offset, data, sha256, end)
    return {"path": path, "offset": offset}


@verb("GET /v1/uploads/{upload}/hashes", least=Role.MEMBER, slow=True)
def upload_hashes(hub: Hub, upload: str, node: Name, path: Path, first: First = 0) -> HashesView:
    """SHA-256 of some pieces of a file that was sent."""
    service = hub.service
    if node:
        return _node_files(service).upload_hashes(node, upload, path, first)
    return service.data.hashes(upload, path, first)


@verb("DELETE /v1/uploads/{upload}", least=Role.MEMBER, slow=True)
def discard_upload(hub: Hub, upload: str, node: Name) -> DiscardedView:
    """Remove files of an upload that were not moved to a job. They are otherwise removed after a week."""
    if node:
        _node_files(hub.service).discard(node, upload)
    else:
        hub.service.data.discard(upload)
    return {"upload": upload}


def _headers(fields: dict[str, Any]) -> dict[str, str]:
    return {f"Polyfleet-{name.replace('_', '-')}": str(value) for name, value in fields.items()}


def _find_job(service: Service, ref: str) -> Record:
    """Find a job after waiting for the fleet's nodes: a server that has just started does not know them yet."""
    service.readiness.wait_until_ready()
    return service.jobs_table.find(ref)


def _node_files(service: Service) -> JobFileService:
    """Files on nodes, after waiting for the fleet's nodes."""
    service.readiness.wait_until_ready()
    return service.job_files


def _file_view(entry: dict[str, Any]) -> FileView:
    """The view of an entry that an agent lists."""
    view = {k: v for k, v in entry.items() if k != "modified_s"}
    return cast(FileView, view | {"modified_at": iso(entry["modified_s"])})
