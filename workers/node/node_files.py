"""RPC methods of an agent for files of its node: code archives, checkpoints, files and data of jobs."""

from typing import Any

from cluster.errors import NotFound
from cluster.input.folder_access import MAX_LISTED_FILES, PIECE_BYTES, FolderTree, digest
from workers.node.node_facts import NodeIdentity
from workers.storage.checkpoint_mirror import CheckpointMirror
from workers.storage.checkpoint_tools import CheckpointTools
from workers.storage.checkpoint_uploads import IDLE_TIMEOUT_S, CheckpointUploads
from workers.storage.code_archives import NodeCodeArchives
from workers.storage.data_cache import DataCache
from workers.storage.job_file_mirror import JobFileMirror
from workers.storage.job_files import JobFiles
from workers.storage.pool_checkpoints import PoolCheckpoints
from workers.storage.pool_storage import PoolStorage
from workers.storage.upload_loop import UploadLoop

HASHES_AT_ONCE = 32
"""Pieces that one call hashes: a slow disk takes some seconds."""


class NodeFiles:
    """RPC methods for files. Arguments and results are plain data."""

    def __init__(self, identity: NodeIdentity):
        self._identity = identity
        self._storage = PoolStorage(identity.storage)
        self._code_archives = NodeCodeArchives(identity.node_dir / "packages")
        self._mirror = self._make_mirror(identity)
        self._file_mirror = self._make_file_mirror(identity)
        self._checkpoints = self._mirror or PoolCheckpoints(self._storage, identity.pool)
        self._uploads = CheckpointUploads(self._storage, identity.pool)
        self._job_files = JobFiles(self._storage)
        self._data = DataCache(identity.storage)
        self._tools = CheckpointTools(self._storage, identity.pool, self._readable)

    def _make_mirror(self, identity: NodeIdentity) -> CheckpointMirror | None:
        uri = identity.object_store
        return CheckpointMirror(self._storage, identity.pool, uri, self._checkpoints_to_keep) if uri else None

    def _make_file_mirror(self, identity: NodeIdentity) -> JobFileMirror | None:
        uri = identity.object_store
        return JobFileMirror(self._storage, identity.node, uri, self._ended_attempts) if uri else None

    @property
    def _mirrors(self) -> list[UploadLoop]:
        return [mirror for mirror in (self._mirror, self._file_mirror) if mirror is not None]

    def _ended_attempts(self) -> list[tuple[str, int]]:
        """The newest (job, epoch) of each job that ran on this node, if it has ended here."""
        return []

    def _checkpoints_to_keep(self, job: str) -> int | None:
        """How many checkpoints a job of this node keeps; None if the node does not know the job."""
        return None

    def has_code_archive(self, sha: str) -> bool:
        return self._code_archives.has(sha)

    def arrived_code_archive(self, sha: str) -> dict[str, Any]:
        """Return how much of a code archive has arrived: {"bytes", "sha256" of these bytes}."""
        return self._code_archives.arrived(sha)

    def put_code_archive_part(self, sha: str, offset: int, data: bytes, last: bool) -> None:
        """Append a piece of a code archive; after the last one check it. Raises Conflict, UserError."""
        self._code_archives.put(sha, offset, data, last)

    def idle_code_archives(self) -> list[str]:
        """Return the code archives that were not used for an hour."""
        return self._code_archives.idle()

    def remove_code_archives(self, names: list[str]) -> None:
        """Remove those of the code archives that are still idle: no job refers to them any more."""
        self._code_archives.remove(map(str, names))

    def read_file(self, path: str, offset: int, limit_bytes: int, pool: str = "") -> bytes:
        return self._readable(pool).read(path, offset, limit_bytes)

    def _readable(self, pool: str) -> PoolStorage:
        """Storage of the node's own pool (also for ""), or of another pool on this machine. Raises NotFound."""
        if pool in ("", self._identity.pool):
            return self._storage
        if pool not in self._identity.neighbours:
            raise NotFound(
                f"pool {pool!r} cannot be read from node {self._identity.node}",
                "send the request to a node of that pool",
            )
        return PoolStorage(self._identity.neighbours[pool])

    def begin_checkpoint_upload(
        self, folder: str, name: str, manifest: bytes, idle_s: float = IDLE_TIMEOUT_S
    ) -> dict[str, Any]:
        """Begin to receive a checkpoint in `folder`, by its manifest.

        Returns the chunks that are missing here.
        """
        return self._uploads.begin(folder, name, manifest, idle_s)

    def write_checkpoint_chunk(self, folder: str, name: str, file: str, index: int, data: bytes) -> int:
        return self._uploads.write(folder, name, file, index, data)

    def commit_checkpoint_upload(self, folder: str, name: str) -> None:
        self._uploads.commit(folder, name)

    def close_checkpoint_upload(self, folder: str, name: str) -> None:
        self._uploads.close(folder, name)

    def start_tool(self, verb: str, arguments: dict[str, Any]) -> str:
        return self._tools.start(verb, arguments)

    def poll_tool(self, number: str, cursor: int, timeout_s: float) -> dict[str, Any]:
        return self._tools.poll(number, cursor, timeout_s)

    def stop_tool(self, number: str) -> None:
        self._tools.stop(number)

    def checkpoints(self, prefix: str) -> list[dict[str, Any]]:
        return self._checkpoints.list(prefix)

    def resolve_checkpoint(self, path: str, pool: str = "") -> dict[str, Any]:
        """Resolve `path`: a checkpoint, or a folder of them, whose newest one counts. Reads no tensors."""
        return self._checkpoints_of(pool).resolve(path)

    def describe_checkpoint(self, path: str, pool: str = "") -> dict[str, Any]:
        return self._checkpoints_of(pool).describe(path)

    def verify_checkpoint(self, path: str, pool: str = "") -> dict[str, Any]:
        """Check every byte, and mark a damaged checkpoint. Raises CheckpointError."""
        return self._checkpoints_of(pool).verify(path)

    def hold_checkpoint(self, path: str, pool: str = "") -> None:
        """Protect a checkpoint from deletion while it is copied."""
        self._checkpoints_of(pool).hold(path)

    def pin_checkpoint_copy(self, path: str, remove: bool) -> None:
        """Pin or unpin the node's copy of a checkpoint that is pinned or unpinned in the pool's object store."""
        if self._mirror is not None:
            self._mirror.pin_copy(path, remove)

    def remove_old_copies(self, folder: str, oldest: str, stored: list[str]) -> list[str]:
        """Remove the node's copies of checkpoints that were deleted in the pool's object store."""
        return list(self._mirror.remove_old_copies(folder, oldest, stored)) if self._mirror is not None else []

    def damaged_checkpoints(self) -> list[dict[str, str]]:
        return self._checkpoints.damaged()

    def _checkpoints_of(self, pool: str) -> PoolCheckpoints:
        if pool in ("", self._identity.pool):
            return self._checkpoints
        return PoolCheckpoints(self._readable(pool), pool)

    def plan_checkpoint(self, path: str, kind: str, count: int) -> dict[str, Any]:
        return self._checkpoints.plan(path, kind, count)

    # -- files of jobs

    def files_of(self, job: str, pool: str = "") -> dict[str, Any]:
        """Return the newest epoch with a folder of files here: {"epoch": 0 for none, "storage": its identity}.

        If the folder was downloaded from the pool's object store, "origin" is the node that wrote it, and "missing" a
        sentence on files that the store does not have.
        """
        newest, is_own = JobFiles(self._readable(pool)).newest(job), pool in ("", self._identity.pool)
        if self._file_mirror is None or not is_own:
            return newest | {"origin": "", "missing": ""}
        return newest | self._file_mirror.origin(job, newest["epoch"])

    def restore_files(self, job: str, node: str, floor: int, wait_s: float) -> dict[str, Any]:
        """Download what a node uploaded of a job to the pool's object store; see JobFileMirror.restore."""
        if self._file_mirror is None:
            return {"epoch": 0, "progress": [0, 0]}
        return self._file_mirror.restore(job, node, int(floor), float(wait_s))

    def list_files(self, folder: str, path: str, after: str, pool: str = "") -> dict[str, Any]:
        """List a folder: {"entries", "after": where to continue, or ""}. See cluster/input/folder_access.py."""
        entries, next_after = self._tree(folder, pool).entries(path, after, MAX_LISTED_FILES)
        return {"entries": entries, "after": next_after}

    def file_piece(self, folder: str, path: str, offset: int, pool: str = "") -> dict[str, Any]:
        piece = self._tree(folder, pool).read(path, offset, PIECE_BYTES)
        fields = {
            "bytes": piece.size_bytes,
            "version": piece.version,
            "modified_s": piece.modified_s,
            "mode": piece.mode,
        }
        return {"data": piece.data, "sha256": digest(piece.data), **fields}

    def file_hashes(self, folder: str, path: str, first: int, pool: str = "") -> dict[str, Any]:
        """Hash some pieces of a file from number `first` on: {"version", "sha256": [], empty at the end}."""
        version, hashes = self._tree(folder, pool).hashes(path, first, HASHES_AT_ONCE)
        return {"version": version, "sha256": hashes}

    def _tree(self, folder: str, pool: str) -> FolderTree:
        """Open a folder. Raises unless it exists and is not a link."""
        storage = self._readable(pool)
        storage.resolve(folder)
        return FolderTree(storage.root, folder)

    def begin_upload(self, upload: str) -> dict[str, int]:
        return self._job_files.begin(upload)

    def write_piece(
        self, upload: str, path: str, offset: int, data: bytes, sha256: str, end: dict[str, Any] | None
    ) -> int:
        self._job_files.write(upload, path, offset, data, sha256, end)
        return len(data)

    def take_piece(self, upload: str, path: str, offset: int, piece: dict[str, Any], last: bool) -> str:
        """Write a piece from `file_piece` of another node; the `last` completes the file. Returns its version."""
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
        self._job_files.adopt_upload(upload, job, epoch)

    def put_files(
        self, upload: str, names: list[list[str]], job: str, epoch: int, running: bool, force: bool
    ) -> list[str]:
        """Move files of an upload into the job's folder; see JobFiles.put. Raises Conflict."""
        paths = self._job_files.put(upload, names, job, epoch, running, force)
        if self._file_mirror is not None and not running:
            self._file_mirror.mark_changed(job, epoch)
        return paths

    def make_files(self, job: str, epoch: int) -> None:
        """Create an empty folder of files for an attempt."""
        self._storage.make_folder(f"{job}/output-{int(epoch)}")

    def remove_files(self, job: str, epoch: int) -> None:
        """Remove the files of attempts up to `epoch` from this node's storage."""
        self._job_files.remove(job, epoch)

    def remove_stored_files(self, job: str, epoch: int) -> None:
        """Remove the files of attempts up to `epoch` from the pool's object store, later and in the background."""
        if self._file_mirror is not None:
            self._file_mirror.remove(job, int(epoch))

    def files_sizes(self) -> dict[str, int]:
        """Return the bytes of each job's folder in this pool's storage."""
        return self._job_files.sizes()

    # -- data of jobs

    def find_data(self, sha256: str) -> int | None:
        """Return the bytes of data in this node's cache; None if it is not there."""
        return self._data.find(sha256)

    def cached_data_sha256(self, key: str) -> str:
        """Return the SHA-256 of data that is cached from a version of a source; "" if there is none."""
        return self._data.sha256_of(key)

    def free_data_space(self, needed_bytes: int) -> None:
        self._data.free_space(int(needed_bytes))

    def keep_data(self, upload: str, inner: str, expected: str, key: str) -> dict[str, Any]:
        """Move data of an upload into the cache, if its hash is `expected` or that is "": {"sha256", "bytes"}."""
        content = self._data.add_upload(upload, inner, expected, key)
        self._job_files.discard(upload)
        return {"sha256": content.sha256, "bytes": content.bytes}
