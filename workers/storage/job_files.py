"""Output folders of jobs in a pool's storage: what their ranks wrote into $POLYFLEET_OUTPUT_DIR.

    JOB/output-N/       files of attempt N; only the newest N is used
    .uploads/ID/        files that arrive from a client or another node; used once they are renamed to their final path

Attempt N + 1 starts with the files of attempt N: the same folder under a new name if N has certainly ended, else a
copy. A process of N that still runs, such as on a node that was frozen, then has no folder at its path any more, and a
file that it has open is not a file of the job.
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.errors import Conflict, NotFound, UserError
from cluster.fleet.identity import storage_identity
from cluster.input.folder_access import FolderTree, digest, digest_of
from cluster.paths import write_durably
from workers.protocol.output_folder import output_path, size_bytes
from workers.storage import folder_removal
from workers.storage.pool_storage import PoolStorage

OUTPUT = re.compile(r"output-([0-9]{1,12})", re.ASCII)
UPLOAD = re.compile(r"[0-9a-z-]{8,64}", re.ASCII)
UPLOADS = ".uploads"
MAX_UPLOAD_AGE_S = 7 * 86400
"""Age at which files of an interrupted upload are deleted: a week. Until then its next try continues with them."""


class JobFiles:
    """Folders of jobs in one pool's storage.

    Arguments come from the server, but names in trees are untrusted.
    """

    def __init__(self, storage: PoolStorage):
        self._storage = storage

    def identity(self) -> str:
        """Return the identity of the storage, which is the same on all nodes that share it."""
        return storage_identity(self._storage.root) or str(self._storage.root)

    def newest(self, job: str) -> dict[str, Any]:
        """Return the newest epoch that has a folder of the job here: {"epoch": 0 for none, "storage"}."""
        return {"epoch": max(self._epochs(job), default=0), "storage": self.identity()}

    def _epochs(self, job: str) -> list[int]:
        try:
            folder = self._storage.resolve(job)
        except (NotFound, UserError):
            return []
        matches = [(OUTPUT.fullmatch(entry.name), entry) for entry in os.scandir(folder)]
        return [int(match[1]) for match, entry in matches if match and entry.is_dir(follow_symlinks=False)]

    def rename(self, job: str, epoch: int, to_epoch: int) -> None:
        """Let attempt `to_epoch` start with the folder of attempt `epoch`. Idempotent."""
        folder = self._storage.resolve(job)
        old, new = output_path(folder, epoch), output_path(folder, to_epoch)
        if new.is_dir():
            return
        try:
            old.rename(new)
        except FileNotFoundError:
            raise NotFound(
                f"{job} has no files of attempt {epoch} on this node", "they were removed after the attempt had ended"
            ) from None

    def adopt_upload(self, upload: str, job: str, epoch: int) -> None:
        """Let attempt `epoch` start with a complete upload, by one rename. Idempotent."""
        new = output_path(self._storage.make_folder(job), epoch)
        if new.is_dir():
            return
        source = self._storage.resolve(_upload_path(upload))
        write_durably(source)
        source.rename(new)
        write_durably(new.parent)

    def put(self, upload: str, names: list[list[str]], job: str, epoch: int, running: bool, force: bool) -> list[str]:
        """Move files of an upload into the job's folder, each by a rename. Returns their paths there.

        `names`: [[path in the upload, path in the job's folder]]. Existing files are not replaced while the job runs,
        and files that differ only with `force`. Raises Conflict before the first file is moved.
        """
        source, target = FolderTree(self._storage.root, _upload_path(upload)), self.tree(job, epoch)
        pairs = [(str(old), str(new)) for old, new in names]
        existing = [new for old, new in pairs if target.exists(new) and not _are_equal(source, old, target, new)]
        if existing and running:
            message = f"{existing[0]!r} is a file of a running job, which may be using it"
            raise Conflict(message, "choose another name, or wait until the job has ended")
        if existing and not force:
            raise Conflict(
                f"{existing[0]!r} exists already and differs ({len(existing)} such files)", "add --force to replace it"
            )
        for old, new in pairs:
            self._move(source, old, target, new, overwrite=not running)
        return [new for _, new in pairs]

    def _move(self, source: FolderTree, old: str, target: FolderTree, new: str, *, overwrite: bool) -> None:
        if source.entry(old)["type"] == "folder":
            target.create_folder(new)
        elif target.exists(new) and _are_equal(source, old, target, new):
            source.remove(old)
        else:
            source.move(old, target, new, overwrite=overwrite)

    def tree(self, job: str, epoch: int) -> FolderTree:
        """Return the folder of an attempt. Raises NotFound if there is none."""
        folder = self._storage.resolve(f"{job}/output-{epoch}")
        return FolderTree(self._storage.root, folder.relative_to(self._storage.root).as_posix())

    def remove(self, job: str, epoch: int) -> None:
        """Remove folders of attempts up to `epoch`, and the job's folder if it is empty then."""
        with suppress(NotFound, UserError):
            folder = self._storage.resolve(job)
            for number in self._epochs(job):
                if number <= epoch:
                    folder_removal.remove(output_path(folder, number), self._storage.make_folder(UPLOADS))
            with suppress(OSError):
                folder.rmdir()

    def remove_empty(self, job: str, epoch: int) -> None:
        """Remove an attempt's folder if it is empty, after the attempt has ended on all of its nodes."""
        with suppress(NotFound, UserError, OSError):
            output_path(self._storage.resolve(job), epoch).rmdir()

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the newest folder of each job."""
        newest = {entry.name: max(self._epochs(entry.name), default=0) for entry in os.scandir(self._storage.root)}
        return {
            job: size_bytes(str(self._storage.root / job / f"output-{epoch}")) for job, epoch in newest.items() if epoch
        }

    # -- uploads

    def begin(self, upload: str) -> dict[str, int]:
        """Begin or continue an upload.

        Returns sizes of files that have arrived. Removes other uploads after a week.
        """
        self._remove_old_uploads()
        path = _upload_path(upload)
        folder = self._storage.make_folder(path)
        os.utime(folder)
        entries = FolderTree(self._storage.root, path).all_entries()
        return {entry["path"]: entry["bytes"] for entry in entries if entry["type"] == "file"}

    def write(
        self, upload: str, path: str, offset: int, data: bytes, sha256: str, end: "dict[str, Any] | None"
    ) -> None:
        """Write one piece of a file. Raises UserError if data arrived damaged.

        `end`, {"bytes", "modified_s", "mode"}, completes the file. If it has a hash of the "whole" file
        (cluster.input.folder_access.digest_of), the file is read back and compared.
        """
        if digest(data) != sha256:
            raise UserError(f"{path!r}: the piece at byte {offset} arrived damaged", "send it again")
        tree = self._tree_of(upload)
        if data or not end:
            tree.write(path, offset, data)
        if end:
            tree.finish(path, int(end["bytes"]), float(end["modified_s"]), int(end["mode"]))
        if end and "whole" in end and digest_of(tree.hashes(path)[1]) != end["whole"]:
            tree.remove(path)
            raise UserError(
                f"{path!r} differs from what was sent",
                "check that no other put to this path is running, then put it again",
            )

    def write_others(self, upload: str, entries: list[dict[str, Any]]) -> None:
        """Create folders and links, which have no content."""
        tree = self._tree_of(upload)
        for entry in entries:
            if entry["type"] == "folder":
                tree.create_folder(entry["path"])
            else:
                with suppress(Conflict):
                    tree.link(entry["path"], entry["target"])

    def keep_only(self, upload: str, paths: list[str]) -> None:
        """Remove files that an earlier try has sent but that the source no longer has."""
        tree, expected = self._tree_of(upload), set(paths)
        for entry in list(tree.all_entries()):
            if entry["type"] != "folder" and entry["path"] not in expected:
                tree.remove(entry["path"])

    def discard(self, upload: str) -> None:
        with suppress(NotFound):
            folder_removal.remove(self._storage.resolve(_upload_path(upload)))

    def _tree_of(self, upload: str) -> FolderTree:
        self._storage.resolve(_upload_path(upload))
        return FolderTree(self._storage.root, _upload_path(upload))

    def _remove_old_uploads(self) -> None:
        with suppress(OSError):
            for entry in list(os.scandir(self._storage.root / UPLOADS)):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > MAX_UPLOAD_AGE_S:
                    folder_removal.remove(Path(entry.path))


def _upload_path(name: str) -> str:
    if not UPLOAD.fullmatch(name):
        raise UserError(f"{name[:80]!r} is not an upload's id", "use 8 to 64 of 0-9, a-z and -")
    return f"{UPLOADS}/{name}"


def _are_equal(source: FolderTree, old: str, target: FolderTree, new: str) -> bool:
    """Return whether both are equal files or links, or both are folders."""
    old_entry, new_entry = source.entry(old), target.entry(new)
    if old_entry["type"] != new_entry["type"] or old_entry["type"] == "folder":
        return old_entry["type"] == new_entry["type"]
    if old_entry["type"] != "file":
        return old_entry["target"] == new_entry["target"]
    return old_entry["bytes"] == new_entry["bytes"] and source.hashes(old)[1] == target.hashes(new)[1]
