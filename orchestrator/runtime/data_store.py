"""Data that clients sent with their jobs, kept in the home by content until no open job names it."""

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.content_cache import Contents
from cluster.content_hash import Content
from cluster.errors import NotFound, SpecError, UserError
from cluster.folder_access import Tree, digest, digest_of, plain
from cluster.folder_entries import Entry
from cluster.last_used import IDLE_S

UPLOAD = re.compile(r"[0-9a-z-]{8,64}", re.ASCII)
UPLOADS = "uploads"
UPLOAD_AGE_S = 7 * 86400
HASHES_AT_ONCE = 32


class DataStore:
    """Below `folder`, which is made on first use. What arrives lies in uploads/ID, in pieces with a hash each."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._contents = Contents(folder)

    def has(self, sha256: str) -> bool:
        """Asking counts as use: a submission follows."""
        return self._contents.find(sha256) is not None

    def size_bytes(self, sha256: str) -> int:
        """Raises NotFound."""
        if (found := self._contents.find(sha256)) is None:
            raise NotFound(f"data {sha256[:12]}… is not on this server any more", "submit the job again")
        return found.bytes

    def files(self, sha256: str) -> tuple[Tree, list[Entry], str]:
        """The tree in which it lies, its files, and the name of a single one, "" of a folder."""
        content = self._folder / sha256 / "content"
        if content.is_file():
            return Tree(content.parent), [Tree(content.parent).look("content")], "content"
        return Tree(content), [entry for entry in Tree(content).all_entries() if entry["type"] == "file"], ""

    def keep(self, upload: str, sha256: str, single: str) -> Content:
        """An upload is all there, or a `single` file in it. Raises UserError where it is not what it is called."""
        if (known := self._contents.find(sha256)) is not None:
            self.discard(upload)
            return known
        folder, single = self._upload(upload), plain(single, "single") if single else ""
        if not folder.is_dir():
            raise NotFound(f"no upload {upload}", "send the data first")
        found = self._contents.keep(folder / single if single else folder, sha256)
        self.discard(upload)
        if found.sha256 != sha256:
            raise UserError(f"what was sent is {found.sha256}, and is called {sha256}", "send it again")
        return found

    def remove_unused(self, named: Callable[[], set[str]]) -> None:
        self._contents.remove_unused(named(), IDLE_S)
        with suppress(OSError):
            for entry in list(os.scandir(self._folder / UPLOADS)):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > UPLOAD_AGE_S:
                    self.discard(entry.name)

    # -- uploads, as nodes have them (workers/job_files.py)

    def begin(self, upload: str) -> dict[str, int]:
        """What an earlier try of it left: bytes by path."""
        self._upload(upload).mkdir(mode=0o700, parents=True, exist_ok=True)
        return {e["path"]: e["bytes"] for e in self._tree(upload).all_entries() if e["type"] == "file"}

    def write(
        self, upload: str, path: str, offset: int, data: bytes, sha256: str, end: "dict[str, Any] | None"
    ) -> None:
        """One piece; with `end` the file is whole, and read back. Raises UserError where it is not what was sent."""
        tree = self._tree(upload)
        if digest(data) != sha256:
            raise UserError(f"{path!r}: the piece at byte {offset} arrived damaged", "send it again")
        if data or not end:
            tree.write(path, offset, data)
        if end:
            tree.finish(path, int(end["bytes"]), float(end["modified_s"]), int(end["mode"]))
        if end and "whole" in end and digest_of(tree.hashes(path)[1]) != end["whole"]:
            tree.remove(path)
            raise UserError(f"{path!r} does not read back as it was sent", "send it again, once at a time")

    def hashes(self, upload: str, path: str, first: int) -> dict[str, Any]:
        version, hashes = self._tree(upload).hashes(path, first, HASHES_AT_ONCE)
        return {"version": version, "sha256": hashes}

    def discard(self, upload: str) -> None:
        self._contents.drop(self._upload(upload))

    def _upload(self, upload: str) -> Path:
        if not UPLOAD.fullmatch(upload):
            raise UserError(f"{upload[:80]!r} is not an upload's id", "use 8 to 64 of 0-9, a-z and -")
        return self._folder / UPLOADS / upload

    def _tree(self, upload: str) -> Tree:
        self._upload(upload)
        return Tree(self._folder, f"{UPLOADS}/{upload}")


def missing(field: str, uri: str) -> SpecError:
    told = f"{uri} is a path of the machine that submits, and the server has not got its content"
    return SpecError(field, told, "submit it with `polyfleet submit` or from Python, which send it")
