"""One download of a job's files from the object store of its pool, in a thread."""

import hashlib
import threading
import time
from pathlib import Path
from typing import Any

from cluster.errors import FleetError, PolyfleetError
from workers.storage.file_upload_records import UploadRecord, UploadRecords, UploadState
from workers.storage.job_files import UPLOADS, JobFiles
from workers.storage.stored_pool_checkpoints import RunTool


class FileDownload:
    """Downloads the newest folder, of attempt `floor` or later, that a node uploaded of a job.

    Files arrive in an upload folder and become the job's by one rename. If it is interrupted, the next try continues.
    """

    def __init__(self, files: JobFiles, records: UploadRecords, run: RunTool, root: Path, node: str, floor: int):
        self._files, self._records, self._run, self._root = files, records, run, root
        self._node, self._floor = node, floor
        self._progress, self._epoch = [0, 0], 0
        self._error: PolyfleetError | None = None
        self._ended, self._ended_s = threading.Event(), 0.0

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    @property
    def is_absent(self) -> bool:
        """Whether the store has no such folder."""
        return self.has_ended and self._error is None and self._epoch == 0

    def is_old(self, floor: int, absent_s: float) -> bool:
        """Whether its result no longer holds."""
        return self.has_ended and (floor != self._floor or time.monotonic() - self._ended_s > absent_s)

    def start(self, uri: str, job: str, node: str) -> None:
        threading.Thread(target=self._download, args=(uri, job, node), name="files", daemon=True).start()

    def wait(self, wait_s: float) -> dict[str, Any]:
        """Wait for the end: {"epoch": None before it, 0 if the store has none, "progress"}. Raises PolyfleetError."""
        if not self._ended.wait(wait_s):
            return {"epoch": None, "progress": self._progress}
        if self._error is not None:
            raise self._error
        return {"epoch": self._epoch, "progress": self._progress}

    def _download(self, uri: str, job: str, node: str) -> None:
        try:
            rows = self._run("stored_files", {"uri": uri})
            epoch = max((row["epoch"] for row in rows if row["node"] == node), default=0)
            if epoch >= self._floor:
                self._fetch(uri, job, node, epoch)
                self._epoch = epoch
        except PolyfleetError as e:
            self._error = e
        except Exception as e:  # the thread's caller waits for it
            self._error = FleetError(f"files of {job} could not be downloaded: {e}", "the node's log has the reason")
        self._ended_s = time.monotonic()
        self._ended.set()

    def _fetch(self, uri: str, job: str, node: str, epoch: int) -> None:
        upload = hashlib.sha256(f"{uri} {epoch} {node}".encode()).hexdigest()[:24]
        self._files.begin(upload)
        source = {"uri": uri, "epoch": epoch, "node": node}
        folder = {"root": str(self._root), "base": f"{UPLOADS}/{upload}"}
        reply = self._run("fetch_files", source | folder, self._on_progress)
        self._records.write(job, UploadRecord(epoch, UploadState.STORED, node, (self._node,), reply["refused"]))
        self._files.adopt_upload(upload, job, epoch)

    def _on_progress(self, done: int, total: int) -> None:
        self._progress = [done, total]
