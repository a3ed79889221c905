"""What the service offers for files of jobs, and for data that goes with them.

Piece by piece, so that none is whole in memory, and any may be asked for again.
"""

from typing import Any

from orchestrator.core.fold import Record
from orchestrator.job_files import JobFiles, Spot
from orchestrator.runtime.data_store import DataStore
from orchestrator.runtime.fleet_ready import FleetSeen
from orchestrator.runtime.jobs import Jobs


class FileVerbs:
    """A part of Service."""

    jobs_table: Jobs
    _fleet: FleetSeen
    _files: JobFiles
    data: DataStore

    def _known(self, ref: str) -> Record:
        """The job, once the fleet has shown its nodes: a server that has just started knows none."""
        self._fleet.settle()
        return self.jobs_table.find(ref)

    def _settled_files(self) -> JobFiles:
        self._fleet.settle()
        return self._files

    def files(self, ref: str, path: str, after: str) -> dict[str, Any]:
        """A page of what lies below `path` in the job's folder, and where."""
        return self._files.page(self._known(ref), path, after)

    def file_piece(self, ref: str, spot: Spot, path: str, offset: int) -> dict[str, Any]:
        return self._files.piece(self._known(ref), spot, path, offset)

    def file_hashes(self, ref: str, spot: Spot, path: str, first: int) -> dict[str, Any]:
        return self._files.hashes(self._known(ref), spot, path, first)

    def file_place(self, ref: str, path: str) -> dict[str, Any]:
        return self._files.place(self._known(ref), path)

    def files_put(self, ref: str, spot: Spot, upload: str, names: list[list[str]], force: bool) -> dict[str, Any]:
        return {"placed": self._files.put(self._known(ref), spot, upload, names, force)}

    def upload_begin(self, node: str, upload: str) -> dict[str, Any]:
        """On a node, or for "" on this server: data that goes with a job."""
        return {"there": self._settled_files().begin(node, upload) if node else self.data.begin(upload)}

    def upload_write(
        self, node: str, upload: str, path: str, offset: int, data: bytes, sha256: str, end: dict[str, Any] | None
    ) -> None:
        if node:
            self._settled_files().write(node, upload, path, offset, data, sha256, end)
        else:
            self.data.write(upload, path, offset, data, sha256, end)

    def upload_hashes(self, node: str, upload: str, path: str, first: int) -> dict[str, Any]:
        if not node:
            return self.data.hashes(upload, path, first)
        return self._settled_files().upload_hashes(node, upload, path, first)

    def upload_discard(self, node: str, upload: str) -> dict[str, Any]:
        if node:
            self._settled_files().discard(node, upload)
        else:
            self.data.discard(upload)
        return {"upload": upload}

    # -- data of jobs

    def has_data(self, sha256: str) -> bool:
        return self.data.has(sha256)

    def keep_data(self, sha256: str, upload: str, single: str) -> dict[str, Any]:
        """What was sent to this server is all there. Raises UserError where it is not what it is called."""
        found = self.data.keep(upload, sha256, single)
        return {"sha256": found.sha256, "bytes": found.bytes, "files": found.files}
