"""Submitted folders on a node: zip archives by the SHA-256 of their bytes, checked before any file is written.

An archive comes from a user, so nothing in it is believed: see cluster/archives.py. While unpacking no more bytes are
written than were announced.
"""

import hashlib
import os
import re
import shutil
import stat
import threading
import zipfile
from pathlib import Path, PurePosixPath
from typing import IO

from cluster import archives
from cluster.archives import LARGEST_ARCHIVE_BYTES
from cluster.errors import Conflict, NotFound, UserError
from cluster.paths import private_dir

DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
INCOMING = ".incoming-"


class Packages:
    """Archives under `folder`; safe to use from several threads."""

    def __init__(self, folder: Path):
        self._folder = private_dir(folder)
        self._lock = threading.Lock()
        for left in self._folder.glob(f"{INCOMING}*"):  # of an agent that was killed: its upload begins anew
            left.unlink(missing_ok=True)

    def has(self, sha: str) -> bool:
        return self._path(sha).is_file()

    def put(self, sha: str, offset: int, data: bytes, last: bool) -> None:
        """Append one piece. After the last one the digest is checked, and what the archive says it holds.

        Raises Conflict when a piece does not follow the one before, UserError for a wrong digest or a hostile archive.
        """
        with self._lock:
            if self.has(sha):
                return
            part = self._folder / f"{INCOMING}{sha}"
            self._append(part, offset, data)
            if last:
                self._commit(part, sha)

    def _append(self, part: Path, offset: int, data: bytes) -> None:
        have = part.stat().st_size if part.exists() else 0
        if offset not in (0, have):
            raise Conflict(
                f"piece at byte {offset} of an upload that has {have}", "send the archive again from its start"
            )
        if offset + len(data) > LARGEST_ARCHIVE_BYTES:
            part.unlink(missing_ok=True)
            raise UserError(
                f"the archive is larger than {LARGEST_ARCHIVE_BYTES >> 20} MiB", "leave data out of working_dir"
            )
        with part.open("ab" if offset else "wb") as f:
            f.write(data)

    def _commit(self, part: Path, sha: str) -> None:
        with part.open("rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
        try:
            if found != sha:
                raise UserError(f"the archive arrived as {found[:12]}…, not {sha[:12]}…", "send it again")
            archives.check(part)
            part.replace(self._path(sha))
        finally:
            part.unlink(missing_ok=True)

    def unpack(self, sha: str, target: Path) -> None:
        """Write the archive's files below `target`, an empty folder. Raises NotFound, or UserError if it is broken."""
        archive = self._path(sha)
        if not archive.is_file():
            raise NotFound(
                f"package {sha[:12]}… is not on this node", "the controller sends it again at the next start"
            )
        archives.read_each(archive, lambda info, content: _write(info, content, target))

    def _path(self, sha: str) -> Path:
        if not DIGEST.fullmatch(sha):
            raise UserError(f"{sha[:80]!r} is not a SHA-256", "64 hexadecimal digits name a package")
        return self._folder / f"{sha}.zip"


def _write(info: zipfile.ZipInfo, content: IO[bytes], target: Path) -> None:
    path = target / PurePosixPath(info.filename)
    if info.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o755 if info.external_attr >> 16 & stat.S_IXUSR else 0o644
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as to:
        shutil.copyfileobj(content, to, archives.COPY_BYTES)
