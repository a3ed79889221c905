"""Files of jobs in a pool whose `storage` is an object store: uploaded when their attempt has ended, and downloaded.

As for checkpoints, jobs write to the node's disk without the store's credentials; child processes of the agent transfer
the files. Below `uri`, `.files/JOB` has the files of a job (workers/checkpoint/transfer/stored_files.py).
"""

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cluster.errors import Conflict, PolyfleetError
from cluster.host import file_lock
from cluster.input import checkpoint_location
from cluster.paths import home, private_dir
from workers.storage.file_upload_records import UploadRecord, UploadRecords, UploadState
from workers.storage.job_file_download import FileDownload
from workers.storage.job_files import JobFiles
from workers.storage.pool_storage import PoolStorage
from workers.storage.stored_pool_checkpoints import RunTool, run_in_pool_environment, tested_schemes
from workers.storage.upload_loop import UploadLoop

log = logging.getLogger(__name__)

ABSENT_S = 60.0
"""Time for which a job without files in the store is not looked up again."""
PREFIX = ".files"


class JobFileMirror(UploadLoop):
    """Uploads folders of ended attempts to the store below `uri`, downloads them from it, and removes them there.

    `ended` returns the newest (job, epoch) of each job that ran on this node, if it has ended here.
    """

    def __init__(
        self,
        storage: PoolStorage,
        node: str,
        uri: str,
        ended: Callable[[], Iterable[tuple[str, int]]] = lambda: (),
        run: RunTool = run_in_pool_environment,
    ):
        super().__init__("files of jobs")
        self.uri = str(checkpoint_location.parse_uri(uri, "storage", tested_schemes()))
        self._storage, self._node, self._ended, self._run = storage, node, ended, run
        self._files, self._records = JobFiles(storage), UploadRecords(storage.root, self.uri)
        recorded = self._records.all()
        self._due = {job for job, record in recorded.items() if record.state == UploadState.DUE}
        self._removals = {job: r.epoch for job, r in recorded.items() if r.state == UploadState.REMOVING}
        self._changes: Counter[str] = Counter()
        self._done: set[tuple[str, int]] = set()
        self._downloads: dict[tuple[str, str], FileDownload] = {}
        self._lock = threading.RLock()

    # -- uploads

    def upload_due(self) -> float:
        """Upload each folder that is due, and remove what is due to be removed. What fails is tried again later.

        Returns the seconds that the search on this node took.
        """
        started_s, request = time.monotonic(), self._request
        due = self._due_folders()
        search_s, problems = time.monotonic() - started_s, list[str]()
        self._set_pending(len(due), request)
        for job, epoch in due:
            problem = self._try(job, partial(self._upload, job, epoch), "uploaded to")
            is_gone = bool(problem) and self._newest(job) != epoch  # the next attempt has renamed or moved it
            self._pending -= is_gone or not problem
            problems += [problem] if problem and not is_gone else []
        if self._removals:
            problems.append(self._try("", self._remove_stored, "removed from"))
        self._problem = next(filter(None, problems), "")
        return search_s

    def _try(self, key: str, action: Callable[[], None], verb: str) -> str:
        """Run an action unless it failed a short time ago. Returns why it failed, or ""."""
        if not self._may_try(key):
            return self._problem
        try:
            action()
        except (PolyfleetError, OSError) as e:
            problem = self._problem_text(str(e), verb)
            log.warning("%s %s", key, problem)
            self._postpone(key)
            return problem
        self._retry_s.pop(key, None)
        return ""

    def _due_folders(self) -> list[tuple[str, int]]:
        """(job, epoch) of folders that are not in the store as they are here."""
        with self._lock:
            marked = list(self._due)
        ended = [attempt for attempt in self._ended() if attempt not in self._done and attempt[0] not in marked]
        rows = [(job, self._newest(job)) for job in marked]
        for job, epoch in rows:
            record = self._records.read(job)
            if record is None or record.epoch != epoch:  # another attempt has renamed or moved it
                self._due.discard(job)
        rows = [row for row in rows if row[0] in self._due]
        return rows + [attempt for attempt in ended if self._has_files(*attempt)]

    def _has_files(self, job: str, epoch: int) -> bool:
        """Whether the folder of an ended attempt has to be uploaded."""
        record = self._records.read(job)
        is_stored = record is not None and record.is_stored(epoch, self._node)
        if not is_stored and self._newest(job) == epoch and self._files.tree(job, epoch).entries("", "", 1)[0]:
            return True
        self._done.add((job, epoch))
        return False

    def _newest(self, job: str) -> int:
        return int(self._files.newest(job)["epoch"])

    def _upload(self, job: str, epoch: int) -> None:
        with file_lock.exclusive(self._lock_path(), lambda: None):  # other agents may share this folder
            record, changes = self._records.read(job), self._changes[job]
            if record is not None and record.is_stored(epoch, self._node):
                return
            current = record if record is not None and record.epoch == epoch else None
            origin = current.origin if current else self._node
            nodes = tuple(dict.fromkeys((*(current.nodes if current else ()), self._node)))
            target = {"uri": self._uri(job), "epoch": epoch, "node": origin}
            folder = {"root": str(self._storage.root), "base": f"{job}/output-{epoch}"}
            missing = self._run("put_files", target | folder)["refused"]
        if missing:
            log.warning("%s: %s", job, missing)
        with self._lock:
            if self._changes[job] == changes:
                self._records.write(job, UploadRecord(epoch, UploadState.STORED, origin, nodes, missing))
                self._due.discard(job)
                self._done.add((job, epoch))

    def mark_changed(self, job: str, epoch: int) -> None:
        """Have the folder of an attempt that has ended uploaded: a client has changed it."""
        with self._lock:
            record = self._records.read(job)
            if record is None or record.epoch != epoch:
                record = UploadRecord(epoch, UploadState.DUE, self._node, (self._node,))
            self._changes[job] += 1
            self._records.write(job, replace(record, state=UploadState.DUE))
            self._removals.pop(job, None)
            self._due.add(job)
        self.search_now()

    def _lock_path(self) -> Path:
        name = hashlib.sha256(f"{self._storage.root} files".encode()).hexdigest()[:16]
        return private_dir(home() / "upload-locks") / name

    def _uri(self, job: str = "") -> str:
        path = f"{self.uri}/{PREFIX}/{job}" if job else f"{self.uri}/{PREFIX}"
        return str(checkpoint_location.parse_uri(path, "path", tested_schemes()))

    # -- removal

    def remove(self, job: str, epoch: int) -> None:
        """Have what the store has of a job, up to attempt `epoch`, removed. Does not wait."""
        with self._lock:
            self._due.discard(job)
            self._removals[job] = max(epoch, self._removals.get(job, 0))
            self._records.write(job, UploadRecord(self._removals[job], UploadState.REMOVING, self._node))
        self._wake.set()

    def _remove_stored(self) -> None:
        removals = dict(self._removals)
        self._run("remove_stored_files", {"uri": self._uri(), "epochs": removals})
        with self._lock:
            for job, epoch in removals.items():
                if self._removals.get(job) == epoch:
                    del self._removals[job]
                    self._records.remove(job)

    # -- downloads

    def origin(self, job: str, epoch: int) -> dict[str, str]:
        """{"origin": node that wrote the folder of an attempt, if it was downloaded, "missing": what was not}."""
        record = self._records.read(job)
        if record is None or record.epoch != epoch or record.state == UploadState.REMOVING or not record.is_downloaded:
            return {"origin": "", "missing": ""}
        return {"origin": record.origin, "missing": record.missing}

    def restore(self, job: str, node: str, floor: int, wait_s: float) -> dict[str, Any]:
        """Download what `node` uploaded of a job's attempts from `floor` on, and wait for it up to `wait_s`.

        Returns {"epoch": None until it is here, 0 if the store has none, "progress": [done, total bytes]}. The download
        continues after `wait_s`. Raises FleetError, and Conflict if another folder of the job is here.
        """
        with self._lock:
            download = self._downloads.get((job, node))
            if download is None or download.is_old(floor, ABSENT_S):
                newest = int(self._files.newest(job)["epoch"])
                others = [d for key, d in self._downloads.items() if key[0] == job and key != (job, node)]
                is_occupied = newest >= floor and self.origin(job, newest)["origin"] != node
                if is_occupied or not all(other.has_ended for other in others):
                    raise Conflict(
                        f"node {self._node} has other files of {job}", "send the request to another node of its pool"
                    )
                if newest >= floor or (node == self._node and self._left_none(job, floor)):
                    return {"epoch": newest if newest >= floor else 0, "progress": [0, 0]}
                download = FileDownload(self._files, self._records, self._run, self._storage.root, self._node, floor)
                self._downloads[job, node] = download
                download.start(self._uri(job), job, node)
        try:
            return download.wait(wait_s)
        finally:
            if download.has_ended and not download.is_absent:
                with self._lock:
                    self._downloads.pop((job, node), None)

    def _left_none(self, job: str, floor: int) -> bool:
        """Whether attempts of the job from `floor` on have ended here and left no files, so that none were uploaded."""
        record = self._records.read(job)
        has_none = record is None or record.epoch < floor
        return has_none and any(name == job and epoch >= floor for name, epoch in self._ended())
