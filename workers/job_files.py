"""Folders of jobs in a pool's storage: what their ranks wrote into $POLYFLEET_OUTPUT_DIR, kept after the attempt.

    JOB/output-N/       what attempt N writes; the newest N counts, and nobody else's is looked at
    .uploads/ID/        what arrives from a client or another node: it counts once it was renamed to its place

Attempt N + 1 begins with what attempt N left: the same folder under a new name where N is known to have ended, else a
copy. So a process of N that is still alive somewhere, as on a node that was frozen, finds no folder at its path any
more, and a file that it holds open is no file of the job.
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.errors import Conflict, NotFound, UserError
from cluster.folder_access import Tree, digest, digest_of
from cluster.identity import storage_identity
from cluster.paths import write_durably
from workers.attempt import folder_removal
from workers.attempt.output_folder import folder_of, size_bytes
from workers.pool_storage import PoolStorage

OUTPUT = re.compile(r"output-([0-9]{1,12})", re.ASCII)
UPLOAD = re.compile(r"[0-9a-z-]{8,64}", re.ASCII)
UPLOADS = ".uploads"
UPLOAD_AGE_S = 7 * 86400
"""What an upload that was cut left is kept for its next try, for a week."""


class JobFiles:
    """Of one pool's storage. Arguments come from the server, names in trees from anybody."""

    def __init__(self, storage: PoolStorage):
        self._storage = storage

    def identity(self) -> str:
        """Names the storage: nodes that tell the same one share it."""
        return storage_identity(self._storage.root) or str(self._storage.root)

    def newest(self, job: str) -> dict[str, Any]:
        """{"epoch": 0 for none, "storage"}"""
        return {"epoch": max(self._epochs(job), default=0), "storage": self.identity()}

    def _epochs(self, job: str) -> list[int]:
        try:
            folder = self._storage.resolve(job)
        except (NotFound, UserError):
            return []
        found = [(OUTPUT.fullmatch(entry.name), entry) for entry in os.scandir(folder)]
        return [int(match[1]) for match, entry in found if match and entry.is_dir(follow_symlinks=False)]

    def rename(self, job: str, epoch: int, to_epoch: int) -> None:
        """What attempt `epoch` left is what attempt `to_epoch` begins with. Done before, it is not done again."""
        folder = self._storage.resolve(job)
        old, new = folder_of(folder, epoch), folder_of(folder, to_epoch)
        if new.is_dir():
            return
        try:
            old.rename(new)
        except FileNotFoundError:
            raise NotFound(f"{job} has no files of attempt {epoch} here", "they were removed meanwhile") from None

    def arrive(self, upload: str, job: str, epoch: int) -> None:
        """An upload is what attempt `epoch` begins with: at once, whole. Done before, it is not done again."""
        new = folder_of(self._storage.make(job), epoch)
        if new.is_dir():
            return
        source = self._storage.resolve(_upload(upload))
        write_durably(source)
        source.rename(new)
        write_durably(new.parent)

    def put(self, upload: str, names: list[list[str]], job: str, epoch: int, running: bool, force: bool) -> list[str]:
        """Give files of an upload, [[its path there, the path in the job's folder]], their places, each at once.

        Those that are there already: none is written over while the job runs, nor one that differs, unless `force`.
        Raises Conflict before the first is placed.
        """
        source, target = Tree(self._storage.root, _upload(upload)), self.tree(job, epoch)
        pairs = [(str(old), str(new)) for old, new in names]
        there = [new for old, new in pairs if target.exists(new) and not _equal(source, old, target, new)]
        if there and running:
            told = f"{there[0]!r} is a file of a running job, which may be using it"
            raise Conflict(told, "give another name, or wait until the job has ended")
        if there and not force:
            raise Conflict(f"{there[0]!r} is there already and differs ({len(there)} such files)", "add --force")
        for old, new in pairs:
            self._place(source, old, target, new, over=not running)
        return [new for _, new in pairs]

    def _place(self, source: Tree, old: str, target: Tree, new: str, *, over: bool) -> None:
        if source.look(old)["type"] == "folder":
            target.make(new)
        elif target.exists(new) and _equal(source, old, target, new):
            source.remove(old)
        else:
            source.move(old, target, new, over=over)

    def tree(self, job: str, epoch: int) -> Tree:
        """Raises NotFound where the job has none of that attempt."""
        folder = self._storage.resolve(f"{job}/output-{epoch}")
        return Tree(self._storage.root, folder.relative_to(self._storage.root).as_posix())

    def remove(self, job: str, epoch: int) -> None:
        """What attempt `epoch`, or one before it, left here. The job's folder goes once nothing else is in it."""
        with suppress(NotFound, UserError):
            folder = self._storage.resolve(job)
            for number in self._epochs(job):
                if number <= epoch:
                    folder_removal.remove(folder_of(folder, number), self._storage.make(UPLOADS))
            with suppress(OSError):
                folder.rmdir()

    def remove_empty(self, job: str, epoch: int) -> None:
        """Of an attempt on several nodes, all of which have ended."""
        with suppress(NotFound, UserError, OSError):
            folder_of(self._storage.resolve(job), epoch).rmdir()

    def sizes(self) -> dict[str, int]:
        """Bytes of each job's folder that is here."""
        found = {entry.name: max(self._epochs(entry.name), default=0) for entry in os.scandir(self._storage.root)}
        return {
            job: size_bytes(str(self._storage.root / job / f"output-{epoch}")) for job, epoch in found.items() if epoch
        }

    # -- uploads

    def begin(self, upload: str) -> dict[str, int]:
        """Files that an earlier try of the same upload left, with their sizes. Leftovers of others go after a week."""
        self._forget_old()
        path = _upload(upload)
        folder = self._storage.make(path)
        os.utime(folder)
        entries = Tree(self._storage.root, path).all_entries()
        return {entry["path"]: entry["bytes"] for entry in entries if entry["type"] == "file"}

    def write(
        self, upload: str, path: str, offset: int, data: bytes, sha256: str, end: "dict[str, Any] | None"
    ) -> None:
        """One piece; with `end` ({"bytes", "modified_s", "mode"}) the file is whole: where that tells the "whole" hash
        (cluster.folder_access.digest_of), all of it is read back. Raises UserError where it is not what was sent.
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
            raise UserError(f"{path!r} does not read back as it was sent", "put it again; is another put under way?")

    def write_others(self, upload: str, entries: list[dict[str, Any]]) -> None:
        """Folders and links, which have no content."""
        tree = self._tree_of(upload)
        for entry in entries:
            if entry["type"] == "folder":
                tree.make(entry["path"])
            else:
                with suppress(Conflict):
                    tree.link(entry["path"], entry["target"])

    def keep_only(self, upload: str, paths: list[str]) -> None:
        """Files that an earlier try has sent and that its source no longer has."""
        tree, wanted = self._tree_of(upload), set(paths)
        for entry in list(tree.all_entries()):
            if entry["type"] != "folder" and entry["path"] not in wanted:
                tree.remove(entry["path"])

    def discard(self, upload: str) -> None:
        with suppress(NotFound):
            folder_removal.remove(self._storage.resolve(_upload(upload)))

    def _tree_of(self, upload: str) -> Tree:
        self._storage.resolve(_upload(upload))
        return Tree(self._storage.root, _upload(upload))

    def _forget_old(self) -> None:
        with suppress(OSError):
            for entry in list(os.scandir(self._storage.root / UPLOADS)):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > UPLOAD_AGE_S:
                    folder_removal.remove(Path(entry.path))


def _upload(name: str) -> str:
    if not UPLOAD.fullmatch(name):
        raise UserError(f"{name[:80]!r} is not an upload's id", "use 8 to 64 of 0-9, a-z and -")
    return f"{UPLOADS}/{name}"


def _equal(source: Tree, old: str, target: Tree, new: str) -> bool:
    """Whether both are the same file, or folders."""
    one, other = source.look(old), target.look(new)
    if one["type"] != other["type"] or one["type"] == "folder":
        return one["type"] == other["type"]
    if one["type"] != "file":
        return one["target"] == other["target"]
    return one["bytes"] == other["bytes"] and source.hashes(old)[1] == target.hashes(new)[1]
