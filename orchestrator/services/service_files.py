"""Operations of the service for files of jobs, and for input data of jobs.

Files are sent in pieces, so that none is completely in memory and any piece can be requested again.
"""

from typing import Any

from orchestrator.core.jobs.fold import Record
from orchestrator.runtime.files.data_store import DataStore
from orchestrator.runtime.files.job_files import FolderRef, JobFileService
from orchestrator.runtime.health.fleet_ready import FleetReadiness
from orchestrator.runtime.jobs.jobs import Jobs


class FileVerbs:
    """File and data methods of Service."""

    jobs_table: Jobs
    readiness: FleetReadiness
    job_files: JobFileService
    data: DataStore

    def _find_job(self, ref: str) -> Record:
        """Find a job after waiting for the fleet's nodes: a server that has just started does not know them yet."""
        self.readiness.wait_until_ready()
        return self.jobs_table.find(ref)

    def _settled_files(self) -> JobFileService:
        self.readiness.wait_until_ready()
        return self.job_files

    def files(self, ref: str, path: str, after: str) -> dict[str, Any]:
        """One page of the files below `path` in the job's folder, and their location."""
        return self.job_files.page(self._find_job(ref), path, after)

    def file_piece(self, ref: str, folder: FolderRef, path: str, offset: int) -> dict[str, Any]:
        return self.job_files.piece(self._find_job(ref), folder, path, offset)

    def file_hashes(self, ref: str, folder: FolderRef, path: str, first: int) -> dict[str, Any]:
        return self.job_files.hashes(self._find_job(ref), folder, path, first)

    def file_destination(self, ref: str, path: str) -> dict[str, Any]:
        return self.job_files.destination(self._find_job(ref), path)

    def files_put(
        self, ref: str, folder: FolderRef, upload: str, names: list[list[str]], force: bool
    ) -> dict[str, Any]:
        return {"placed": self.job_files.put(self._find_job(ref), folder, upload, names, force)}

    def upload_begin(self, node: str, upload: str) -> dict[str, Any]:
        """Begin an upload to a node, or, if `node` is "", to this server: input data of a job."""
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
        return self.data.is_stored(sha256)

    def keep_data(self, sha256: str, upload: str, single: str) -> dict[str, Any]:
        """Complete an upload of data to this server. Raises UserError if its hash is not `sha256`."""
        stored = self.data.store(upload, sha256, single)
        return {"sha256": stored.sha256, "bytes": stored.bytes, "files": stored.files}
