"""What the server does with the files of jobs on request: listed, read and written by the agents that see them.

A listing names where its files lie, a Spot of them; clients give it back with each piece they ask for, so that nobody
looks for the job's folder again for every piece.
"""

from dataclasses import dataclass
from typing import Any

from cluster.errors import NotFound, UserError
from cluster.folder_access import plain
from orchestrator.core.attempts import ran
from orchestrator.core.fold import Record
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.file_locations import FilePlaces, Found

COMMIT_S = 3600.0
PIECE_S = 120.0
MOST_NAMES = 1000


@dataclass(frozen=True, slots=True)
class Spot:
    """A folder of a job as one node reads it, in the storage of `pool`."""

    epoch: int
    node: str
    pool: str

    def path(self, job: str) -> str:
        return f"{job}/output-{self.epoch}"


class JobFiles:
    """Every method may raise FleetError (no node has them now) or NotFound."""

    def __init__(self, agents: Agents):
        self._agents = agents
        self._places = FilePlaces(agents)

    def page(self, record: Record, path: str, after: str) -> dict[str, Any]:
        """{"job", "running", "folders": [{"prefix", "epoch", "node", "pool"}], "entries", "after", "notes"}

        Paths begin with the prefix of their folder, which is "" but for a job on several nodes that share no storage.
        """
        job, found = record.job.id, self._found(record)
        folders = _prefixed(found)
        told = {"job": job, "running": record.live is not None, "folders": folders, "notes": _notes(found)}
        wanted, inside = _chosen(folders, plain(path))
        entries: list[dict[str, Any]] = []
        number, _, cursor = after.partition(" ")
        first = int(number) if number.isdigit() else 0
        for index, folder in enumerate(wanted[first:], first):
            page = self._page(job, folder, inside, cursor)
            entries += page["entries"]
            cursor = page["after"]
            if cursor:
                return told | {"entries": entries, "after": f"{index} {cursor}"}
        if path and not folders:
            raise NotFound(
                f"{job} has no files", "it has written none into $POLYFLEET_OUTPUT_DIR, or they were removed"
            )
        return told | {"entries": entries, "after": ""}

    def _page(self, job: str, folder: dict[str, Any], inside: str, cursor: str) -> dict[str, Any]:
        """Of one folder, its paths with the prefix."""
        base = f"{job}/output-{folder['epoch']}"
        page: dict[str, Any] = self._agents.call(
            folder["node"], "list_files", base, inside, cursor, folder["pool"], timeout_s=PIECE_S
        )
        for entry in page["entries"]:
            entry["path"] = folder["prefix"] + entry["path"]
        return page

    def _found(self, record: Record) -> Found:
        """Raises FleetError where the files are on nodes that are away."""
        found = self._places.find(record.job.id, ran(record.attempts))
        if not found.folders and found.away:
            raise self._places.is_away(record.job.id, found.away)
        return found

    def piece(self, record: Record, spot: Spot, path: str, offset: int) -> dict[str, Any]:
        """{"data", "sha256", "bytes", "version", "modified_s", "mode"}"""
        told: dict[str, Any] = self._agents.call(
            spot.node, "file_piece", spot.path(record.job.id), plain(path), offset, spot.pool, timeout_s=PIECE_S
        )
        return told

    def hashes(self, record: Record, spot: Spot, path: str, first: int) -> dict[str, Any]:
        """{"version", "sha256": of some pieces from `first` on}"""
        told: dict[str, Any] = self._agents.call(
            spot.node, "file_hashes", spot.path(record.job.id), plain(path), first, spot.pool, timeout_s=PIECE_S
        )
        return told

    def place(self, record: Record, path: str) -> dict[str, Any]:
        """Where a file that is put goes: {"epoch", "node", "pool", "path", "running"}, `path` without a node's prefix.

        Raises UserError for a job that never ran: there is no node yet whose folder it would be.
        """
        if not any(one.started for one in ran(record.attempts)):
            raise UserError(f"{record.job.id} has not run yet, so it has no folder", "put the files once it runs")
        found = self._found(record)
        running = record.live is not None
        if not found.folders:
            return self._made(record) | {"path": plain(path), "running": running}
        folders, inside = _chosen(_prefixed(found), plain(path))
        folder = folders[0]
        node = self._writer(folder["node"], folder["pool"])
        return {"epoch": folder["epoch"], "node": node, "pool": folder["pool"], "path": inside, "running": running}

    def _made(self, record: Record) -> dict[str, Any]:
        """A folder for a job that left none, where it ran last."""
        last = next(one for one in ran(record.attempts) if one.started)
        node = self._writer(last.nodes[0], last.pool)
        self._agents.call(node, "make_files", record.job.id, last.epoch)
        return {"epoch": last.epoch, "node": node, "pool": last.pool}

    def _writer(self, reader: str, pool: str) -> str:
        """A node writes its own pool's storage only. Raises FleetError."""
        node = self._agents.get(reader)
        if node is not None and node.facts is not None and node.facts.pool == pool:
            return reader
        raise self._places.is_away(f"pool {pool}", [reader])

    def put(self, record: Record, spot: Spot, upload: str, names: list[list[str]], force: bool) -> list[str]:
        """Files of an upload at their places; see workers/job_files.py. Raises Conflict."""
        if len(names) > MOST_NAMES:
            raise UserError(
                f"{len(names)} files at a time, at most {MOST_NAMES} are put", "put them in several requests"
            )
        plain_names = [[plain(old), plain(new)] for old, new in names]
        running, job = record.live is not None, record.job.id
        placed: list[str] = self._agents.call(
            spot.node, "put_files", upload, plain_names, job, spot.epoch, running, force, timeout_s=COMMIT_S
        )
        return placed

    # -- uploads, for jobs and for imports

    def begin(self, node: str, upload: str) -> dict[str, int]:
        """What an earlier try of it left: bytes by path."""
        left: dict[str, int] = self._agents.call(node, "begin_upload", upload)
        return left

    def upload_hashes(self, node: str, upload: str, path: str, first: int) -> dict[str, Any]:
        told: dict[str, Any] = self._agents.call(node, "file_hashes", f".uploads/{upload}", path, first, "")
        return told

    def write(self, node: str, upload: str, path: str, offset: int, data: bytes, sha256: str, end: Any) -> None:
        limit_s = COMMIT_S if end else PIECE_S  # a file that is whole is read back
        self._agents.call(node, "write_piece", upload, path, offset, data, sha256, end, timeout_s=limit_s)

    def discard(self, node: str, upload: str) -> None:
        self._agents.call(node, "discard_upload", upload)


def _prefixed(found: Found) -> list[dict[str, Any]]:
    several = len(found.folders) > 1
    return [
        {"prefix": f"node-{f.node_rank}/" if several else "", "epoch": f.epoch, "node": f.node, "pool": f.pool}
        for f in found.folders
    ]


def _chosen(folders: list[dict[str, Any]], path: str) -> tuple[list[dict[str, Any]], str]:
    """Those that `path` may lie in, and the path in them. Raises NotFound for a prefix that none has."""
    if len(folders) < 2 or not path:
        return folders, path
    first, _, inside = path.partition("/")
    chosen = [folder for folder in folders if folder["prefix"] == f"{first}/"]
    if not chosen:
        names = ", ".join(folder["prefix"] for folder in folders)
        raise NotFound(f"{path!r} names no node", f"its nodes share no storage: begin with one of {names}")
    return chosen, inside


def _notes(found: Found) -> list[str]:
    return [f"files on node {name} are not shown: it is away" for name in found.away]
