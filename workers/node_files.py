"""What an agent answers about the files of its node: packages of jobs, its pool's storage, checkpoints and the files of
jobs in it.
"""

from typing import Any

from cluster.errors import FleetError, NotFound
from cluster.folder_access import MOST_LISTED, PIECE_BYTES, Tree, digest
from workers.checkpoint_tools import CheckpointTools
from workers.checkpoint_uploads import IDLE_S, CheckpointUploads
from workers.code_archives import NodeCodeArchives
from workers.data_cache import DataCache
from workers.discovery.node_facts import NodeIdentity
from workers.job_files import JobFiles
from workers.pool_checkpoints import PoolCheckpoints
from workers.pool_storage import PoolStorage

HASHES_AT_ONCE = 32
"""Pieces that one call reads: a slow disk takes some seconds."""


class NodeFiles:
    """Its public methods are calls of the agent: arguments and results are plain data."""

    def __init__(self, place: NodeIdentity):
        self._place = place
        self._storage = PoolStorage(place.storage)
        self._packages = NodeCodeArchives(place.node_dir / "packages")
        self._checkpoints = PoolCheckpoints(self._storage, place.pool)
        self._incoming = CheckpointUploads(self._storage, place.pool)
        self._job_files = JobFiles(self._storage)
        self._data = DataCache(place.storage)
        self._tools = CheckpointTools(self._storage, place.pool, self._readable)

    def has_package(self, sha: str) -> bool:
        return self._packages.has(sha)

    def put_package(self, sha: str, offset: int, data: bytes, last: bool) -> None:
        """One piece of a submitted archive; after the last one it is checked. Raises Conflict, UserError."""
        self._packages.put(sha, offset, data, last)

    def idle_packages(self) -> list[str]:
        """Those that nobody used for an hour."""
        return self._packages.idle()

    def remove_packages(self, names: list[str]) -> None:
        """Those of them that are still idle: no job names them any more."""
        self._packages.remove(map(str, names))

    def read_file(self, path: str, offset: int, limit_bytes: int, pool: str = "") -> bytes:
        return self._readable(pool).read(path, offset, limit_bytes)

    def _readable(self, pool: str) -> PoolStorage:
        """Its own pool's storage (also for ""), or that of a neighbour on the same machine. Raises NotFound."""
        if pool in ("", self._place.pool):
            return self._storage
        if pool not in self._place.neighbours:
            raise NotFound(f"pool {pool!r} cannot be read from node {self._place.node}", "ask a node of that pool")
        return PoolStorage(self._place.neighbours[pool])

    def begin_checkpoint(self, folder: str, name: str, manifest: bytes, idle_s: float = IDLE_S) -> dict[str, Any]:
        """A checkpoint of that manifest is to arrive in `folder`: which chunks are missing here."""
        return self._incoming.begin(folder, name, manifest, idle_s)

    def write_chunk(self, folder: str, name: str, file: str, index: int, data: bytes) -> int:
        return self._incoming.write(folder, name, file, index, data)

    def commit_checkpoint(self, folder: str, name: str) -> None:
        self._incoming.commit(folder, name)

    def leave_checkpoint(self, folder: str, name: str) -> None:
        self._incoming.leave(folder, name)

    def start_tool(self, verb: str, arguments: dict[str, Any]) -> str:
        return self._tools.start(verb, arguments)

    def tool_news(self, number: str, seen: int, timeout_s: float) -> dict[str, Any]:
        return self._tools.news(number, seen, timeout_s)

    def stop_tool(self, number: str) -> None:
        self._tools.stop(number)

    def checkpoints(self, prefix: str) -> list[dict[str, Any]]:
        return self._checkpoints.list(prefix)

    def resolve_checkpoint(self, path: str, pool: str = "") -> dict[str, Any]:
        """Which checkpoint is meant: `path` itself, or the newest of a folder of them. No tensor is read."""
        return self._stored(pool).step(path)

    def describe_checkpoint(self, path: str, pool: str = "") -> dict[str, Any]:
        return self._stored(pool).describe(path)

    def verify_checkpoint(self, path: str, pool: str = "") -> dict[str, Any]:
        """Every byte; what is damaged is marked as such. Raises CheckpointError."""
        return self._stored(pool).verify(path)

    def hold_checkpoint(self, path: str, pool: str = "") -> None:
        """It is being copied: see workers/checkpoint/disk/pins.py."""
        from workers.checkpoint.disk.pins import hold

        try:
            hold(self._readable(pool).resolve(path))
        except OSError as e:
            raise FleetError(f"checkpoint {path!r} cannot be held while it is copied: {e.strerror}") from None

    def damaged_checkpoints(self) -> list[dict[str, str]]:
        return self._checkpoints.damaged()

    def _stored(self, pool: str) -> PoolCheckpoints:
        return PoolCheckpoints(self._readable(pool), pool or self._place.pool)

    def plan_checkpoint(self, path: str, kind: str, count: int) -> dict[str, Any]:
        return self._checkpoints.plan(path, kind, count)

    # -- files of jobs

    def files_of(self, job: str, pool: str = "") -> dict[str, Any]:
        """{"epoch": of the attempt whose folder of files is the newest here, 0 for none; "storage": its name}"""
        return JobFiles(self._readable(pool)).newest(job)

    def list_files(self, folder: str, path: str, after: str, pool: str = "") -> dict[str, Any]:
        """{"entries", "after": "" or what to go on with}: see cluster/folder_access.py."""
        entries, more = self._tree(folder, pool).entries(path, after, MOST_LISTED)
        return {"entries": entries, "after": more}

    def file_piece(self, folder: str, path: str, offset: int, pool: str = "") -> dict[str, Any]:
        piece = self._tree(folder, pool).read(path, offset, PIECE_BYTES)
        told = {"bytes": piece.size_bytes, "version": piece.version, "modified_s": piece.modified_s, "mode": piece.mode}
        return {"data": piece.data, "sha256": digest(piece.data), **told}

    def file_hashes(self, folder: str, path: str, first: int, pool: str = "") -> dict[str, Any]:
        """{"version", "sha256": of some pieces from `first` on; none at the end}"""
        version, hashes = self._tree(folder, pool).hashes(path, first, HASHES_AT_ONCE)
        return {"version": version, "sha256": hashes}

    def _tree(self, folder: str, pool: str) -> Tree:
        """`folder` is no link, and exists."""
        storage = self._readable(pool)
        storage.resolve(folder)
        return Tree(storage.root, folder)

    def begin_upload(self, upload: str) -> dict[str, int]:
        return self._job_files.begin(upload)

    def write_piece(
        self, upload: str, path: str, offset: int, data: bytes, sha256: str, end: dict[str, Any] | None
    ) -> int:
        self._job_files.write(upload, path, offset, data, sha256, end)
        return len(data)

    def take_piece(self, upload: str, path: str, offset: int, piece: dict[str, Any], last: bool) -> str:
        """What `file_piece` of another node told; with the `last` one the file is whole. Its version."""
        self._job_files.write(upload, path, offset, piece["data"], piece["sha256"], piece if last else None)
        return str(piece["version"])

    def write_others(self, upload: str, entries: list[dict[str, Any]]) -> None:
        self._job_files.write_others(upload, entries)

    def keep_only(self, upload: str, paths: list[str]) -> None:
        self._job_files.keep_only(upload, paths)

    def discard_upload(self, upload: str) -> None:
        self._job_files.discard(upload)

    def rename_files(self, job: str, epoch: int, to_epoch: int) -> None:
        self._job_files.rename(job, epoch, to_epoch)

    def files_arrived(self, upload: str, job: str, epoch: int) -> None:
        self._job_files.arrive(upload, job, epoch)

    def put_files(
        self, upload: str, names: list[list[str]], job: str, epoch: int, running: bool, force: bool
    ) -> list[str]:
        """Raises Conflict; see JobFiles.put."""
        return self._job_files.put(upload, names, job, epoch, running, force)

    def make_files(self, job: str, epoch: int) -> None:
        """The folder of an attempt that left none."""
        self._storage.make(f"{job}/output-{int(epoch)}")

    def remove_files(self, job: str, epoch: int) -> None:
        self._job_files.remove(job, epoch)

    def files_sizes(self) -> dict[str, int]:
        """Bytes of each job's folder in this pool's storage."""
        return self._job_files.sizes()

    # -- data of jobs

    def find_data(self, sha256: str) -> int | None:
        """Bytes of data in this node's cache; None where it is not there."""
        return self._data.find(sha256)

    def data_found_at(self, key: str) -> str:
        """SHA-256 of what is cached from a version of a source; "" for nothing."""
        return self._data.found_at(key)

    def make_data_room(self, needed_bytes: int) -> None:
        self._data.make_room(int(needed_bytes))

    def keep_data(self, upload: str, inner: str, expected: str, came_from: str) -> dict[str, Any]:
        """{"sha256", "bytes"} of what has arrived, which is kept where it is what was `expected`, or that is ""."""
        found = self._data.keep(upload, inner, expected, came_from)
        self._job_files.discard(upload)
        return {"sha256": found.sha256, "bytes": found.bytes}
