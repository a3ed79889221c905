"""Handle requests for files of jobs: agents that can reach the files list, read and write them for the server.

A listing contains the location of each folder (attempt, node, pool). Clients send it with each request for a piece, so
that the server need not search for the job's folder for every piece.
"""

import time
from dataclasses import dataclass
from typing import Any

from cluster.errors import FleetError, NotFound, UserError
from cluster.input.folder_access import normalize_path
from orchestrator.core.controller.attempts import previous_attempts
from orchestrator.core.jobs.fold import Record
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.files.file_locations import FileLocator, LocatedFiles
from orchestrator.views.files import DestinationView, HashesView

COMMIT_S = 3600.0
PIECE_S = 120.0
MAX_NAMES = 1000
DOWNLOAD_WAIT_S = 20.0
"""Time for which a request waits while a node downloads files from an object store."""


@dataclass(frozen=True, slots=True)
class FolderRef:
    """Folder of an attempt (`epoch`) of a job, read through one node, in the storage of `pool`."""

    epoch: int
    node: str
    pool: str

    def path(self, job: str) -> str:
        return f"{job}/output-{self.epoch}"


class JobFileService:
    """Access to the files of jobs. Every method may raise FleetError (no node can reach them now) or NotFound."""

    def __init__(self, agents: Agents, download_wait_s: float = DOWNLOAD_WAIT_S):
        self._agents, self._download_wait_s = agents, download_wait_s
        self._locations = FileLocator(agents)

    def page(self, record: Record, path: str, after: str) -> dict[str, Any]:
        """One page of a listing.

        {"job", "running", "folders": [{"prefix", "attempt", "node", "pool"}], "entries", "after", "notes"}

        Paths begin with the prefix of their folder, which is "" unless the job ran on several nodes without a shared
        storage.
        """
        job, located = record.job.id, self._find_folders(record)
        folders = _with_prefixes(located)
        page_fields = {
            "job": job,
            "running": record.live_attempt is not None,
            "folders": folders,
            "notes": _notes(located),
        }
        chosen, inside = _choose_folders(folders, normalize_path(path))
        entries: list[dict[str, Any]] = []
        number, _, cursor = after.partition(" ")
        first = int(number) if number.isdigit() else 0
        for index, folder in enumerate(chosen[first:], first):
            page = self._page(job, folder, inside, cursor)
            entries += page["entries"]
            cursor = page["after"]
            if cursor:
                return page_fields | {"entries": entries, "after": f"{index} {cursor}"}
        if path and not folders:
            raise NotFound(
                f"{job} has no files", "the job has written none to $POLYFLEET_OUTPUT_DIR, or they were removed"
            )
        return page_fields | {"entries": entries, "after": ""}

    def _page(self, job: str, folder: dict[str, Any], inside: str, cursor: str) -> dict[str, Any]:
        """One page of one folder; paths get its prefix."""
        base = f"{job}/output-{folder['attempt']}"
        page: dict[str, Any] = self._agents.call(
            folder["node"], "list_files", base, inside, cursor, folder["pool"], timeout_s=PIECE_S
        )
        for entry in page["entries"]:
            entry["path"] = folder["prefix"] + entry["path"]
        return page

    def _find_folders(self, record: Record) -> LocatedFiles:
        """Find the job's folders.

        Raises FleetError if the files are only on nodes that are away, or are still being downloaded.
        """
        job, deadline_s = record.job.id, time.monotonic() + self._download_wait_s

        def on_progress(node: str, done_bytes: int, total_bytes: int) -> None:
            if time.monotonic() >= deadline_s:
                done = f"{done_bytes / 2**20:,.1f} of {total_bytes / 2**20:,.1f} MiB" if total_bytes else "no reply yet"
                raise FleetError(
                    f"node {node} is still downloading the files of {job} from the object store of its pool ({done})",
                    "run the command again: the download continues",
                )

        located = self._locations.find_or_download(job, previous_attempts(record.attempts), on_progress)
        if not located.folders and located.away:
            raise self._locations.away_error(record.job.id, located.away)
        return located

    def piece(self, record: Record, folder: FolderRef, path: str, offset: int) -> dict[str, Any]:
        """Read one piece: {"data", "sha256", "bytes", "version", "modified_s", "mode"}."""
        reply: dict[str, Any] = self._agents.call(
            folder.node,
            "file_piece",
            folder.path(record.job.id),
            normalize_path(path),
            offset,
            folder.pool,
            timeout_s=PIECE_S,
        )
        return reply

    def hashes(self, record: Record, folder: FolderRef, path: str, first: int) -> HashesView:
        """Hashes of pieces: {"version", "sha256": of some pieces from index `first` on}."""
        reply: HashesView = self._agents.call(
            folder.node,
            "file_hashes",
            folder.path(record.job.id),
            normalize_path(path),
            first,
            folder.pool,
            timeout_s=PIECE_S,
        )
        return reply

    def destination(self, record: Record, path: str) -> DestinationView:
        """Return where a file is stored; `path` is without node prefix.

        Raises UserError for a job that never ran: no node has a folder of it yet.
        """
        if not any(one.started for one in previous_attempts(record.attempts)):
            raise UserError(f"{record.job.id} has not run yet, so it has no folder", "put the files when it runs")
        located = self._find_folders(record)
        running = record.live_attempt is not None
        if not located.folders:
            created = self._create_folder(record)
            return {
                "attempt": created.epoch,
                "node": created.node,
                "pool": created.pool,
                "path": normalize_path(path),
                "running": running,
            }
        folders, inside = _choose_folders(_with_prefixes(located), normalize_path(path))
        folder = folders[0]
        node = self._writer(folder["node"], folder["pool"])
        return {"attempt": folder["attempt"], "node": node, "pool": folder["pool"], "path": inside, "running": running}

    def _create_folder(self, record: Record) -> FolderRef:
        """Create a folder for a job that has none, on the node where it ran last."""
        last = next(one for one in previous_attempts(record.attempts) if one.started)
        node = self._writer(last.nodes[0], last.pool)
        self._agents.call(node, "make_files", record.job.id, last.epoch)
        return FolderRef(last.epoch, node, last.pool)

    def _writer(self, reader: str, pool: str) -> str:
        """The node, if it can write: a node writes only to its own pool's storage. Raises FleetError."""
        node = self._agents.get(reader)
        if node is not None and node.facts is not None and node.facts.pool == pool:
            return reader
        raise self._locations.away_error(f"pool {pool}", [reader])

    def put(self, record: Record, folder: FolderRef, upload: str, names: list[list[str]], force: bool) -> list[str]:
        """Move files of an upload to their final paths; see workers/storage/job_files.py. Raises Conflict."""
        if len(names) > MAX_NAMES:
            raise UserError(
                f"{len(names)} files in one request; the maximum is {MAX_NAMES}", "put them in several requests"
            )
        plain_names = [[normalize_path(old), normalize_path(new)] for old, new in names]
        running, job = record.live_attempt is not None, record.job.id
        placed: list[str] = self._agents.call(
            folder.node, "put_files", upload, plain_names, job, folder.epoch, running, force, timeout_s=COMMIT_S
        )
        return placed

    # -- uploads, for jobs and for imports

    def begin(self, node: str, upload: str) -> dict[str, int]:
        """Begin an upload. Returns the files of an earlier try: bytes by path."""
        sizes: dict[str, int] = self._agents.call(node, "begin_upload", upload)
        return sizes

    def upload_hashes(self, node: str, upload: str, path: str, first: int) -> HashesView:
        reply: HashesView = self._agents.call(node, "file_hashes", f".uploads/{upload}", path, first, "")
        return reply

    def write(self, node: str, upload: str, path: str, offset: int, data: bytes, sha256: str, end: Any) -> None:
        limit_s = COMMIT_S if end else PIECE_S  # a complete file is read back, which takes longer
        self._agents.call(node, "write_piece", upload, path, offset, data, sha256, end, timeout_s=limit_s)

    def discard(self, node: str, upload: str) -> None:
        self._agents.call(node, "discard_upload", upload)


def _with_prefixes(located: LocatedFiles) -> list[dict[str, Any]]:
    several = len(located.folders) > 1
    return [
        {"prefix": f"node-{f.node_rank}/" if several else "", "attempt": f.epoch, "node": f.node, "pool": f.pool}
        for f in located.folders
    ]


def _choose_folders(folders: list[dict[str, Any]], path: str) -> tuple[list[dict[str, Any]], str]:
    """Folders that may contain `path`, and the path within them. Raises NotFound for a prefix that no folder has."""
    if len(folders) < 2 or not path:
        return folders, path
    first, _, inside = path.partition("/")
    chosen = [folder for folder in folders if folder["prefix"] == f"{first}/"]
    if not chosen:
        names = ", ".join(folder["prefix"] for folder in folders)
        raise NotFound(
            f"{path!r} does not begin with a node", f"the job's nodes share no storage: begin with one of {names}"
        )
    return chosen, inside


def _notes(located: LocatedFiles) -> list[str]:
    away = [f"files on node {name} are missing: it is away" for name in located.away]
    return away + [folder.missing for folder in located.folders if folder.missing]
