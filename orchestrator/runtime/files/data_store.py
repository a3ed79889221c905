"""Data that clients uploaded with jobs, stored by content in the server's home while it is used."""

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.errors import NotFound, SpecError, UserError
from cluster.host.content_cache import ContentCache
from cluster.host.content_hash import Content
from cluster.host.last_used import IDLE_S
from cluster.input.folder_access import FolderTree, digest, digest_of, normalize_path
from cluster.input.folder_entries import FolderEntry
from orchestrator.views.files import HashesView

UPLOAD = re.compile(r"[0-9a-z-]{8,64}", re.ASCII)
UPLOADS = "uploads"
UPLOAD_AGE_S = 7 * 86400
HASHES_AT_ONCE = 32


class DataStore:
    """Content store in `folder`, which is created on first use. Unfinished uploads are in uploads/ID."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._contents = ContentCache(folder)

    def is_stored(self, sha256: str) -> bool:
        """Check whether the content is stored. This counts as use, because a submission follows."""
        return self._contents.find(sha256) is not None

    def size_bytes(self, sha256: str) -> int:
        """Size of stored content. Raises NotFound."""
        if (content := self._contents.find(sha256)) is None:
            raise NotFound(f"data {sha256[:12]}… is no longer on this server", "submit the job again")
        return content.bytes

    def files(self, sha256: str) -> tuple[FolderTree, list[FolderEntry], str]:
        """Return (tree, its file entries, file name); the name is "" if the content is a folder."""
        content = self._folder / sha256 / "content"
        if content.is_file():
            return FolderTree(content.parent), [FolderTree(content.parent).entry("content")], "content"
        return (
            FolderTree(content),
            [entry for entry in FolderTree(content).all_entries() if entry["type"] == "file"],
            "",
        )

    def store(self, upload: str, sha256: str, single: str) -> Content:
        """Store a complete upload, or its `single` file, as content. Raises UserError if the digest differs."""
        if (existing := self._contents.find(sha256)) is not None:
            self.discard(upload)
            return existing
        folder, single = self._upload(upload), normalize_path(single, "single") if single else ""
        if not folder.is_dir():
            raise NotFound(f"no upload {upload}", "send the data first")
        content = self._contents.add(folder / single if single else folder, sha256)
        self.discard(upload)
        if content.sha256 != sha256:
            raise UserError(f"the data has the SHA-256 {content.sha256}, not {sha256}", "send it again")
        return content

    def remove_unused(self, named: Callable[[], set[str]]) -> None:
        self._contents.remove_unused(named(), IDLE_S)
        with suppress(OSError):
            for entry in list(os.scandir(self._folder / UPLOADS)):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > UPLOAD_AGE_S:
                    self.discard(entry.name)

    # -- uploads, as nodes have them (workers/storage/job_files.py)

    def begin(self, upload: str) -> dict[str, int]:
        """Start or resume an upload; return the bytes that have arrived, by path."""
        self._upload(upload).mkdir(mode=0o700, parents=True, exist_ok=True)
        return {e["path"]: e["bytes"] for e in self._tree(upload).all_entries() if e["type"] == "file"}

    def write(
        self, upload: str, path: str, offset: int, data: bytes, sha256: str, end: "dict[str, Any] | None"
    ) -> None:
        """Write one piece; with `end`, finish the file and check it. Raises UserError if the data is damaged."""
        tree = self._tree(upload)
        if digest(data) != sha256:
            raise UserError(f"{path!r}: the piece at byte {offset} arrived damaged", "send it again")
        if data or not end:
            tree.write(path, offset, data)
        if end:
            tree.finish(path, int(end["bytes"]), float(end["modified_s"]), int(end["mode"]))
        if end and "whole" in end and digest_of(tree.hashes(path)[1]) != end["whole"]:
            tree.remove(path)
            raise UserError(f"{path!r} was not stored as it was sent", "send it again, with one upload at a time")

    def hashes(self, upload: str, path: str, first: int) -> HashesView:
        version, hashes = self._tree(upload).hashes(path, first, HASHES_AT_ONCE)
        return {"version": version, "sha256": hashes}

    def discard(self, upload: str) -> None:
        self._contents.discard(self._upload(upload))

    def _upload(self, upload: str) -> Path:
        if not UPLOAD.fullmatch(upload):
            raise UserError(f"{upload[:80]!r} is not an upload's id", "use 8 to 64 of 0-9, a-z and -")
        return self._folder / UPLOADS / upload

    def _tree(self, upload: str) -> FolderTree:
        self._upload(upload)
        return FolderTree(self._folder, f"{UPLOADS}/{upload}")


def not_uploaded(field: str, uri: str) -> SpecError:
    message = f"{uri} is a path on the submitting machine, and the server does not have its content"
    return SpecError(field, message, "submit the job with `polyfleet submit` or from Python, which upload the data")
