"""Code archives on a node: submitted folders, by the SHA-256 of their archive.

Archives are untrusted: a process with resource limits checks and unpacks each one once
(cluster/input/archive_unpack.py), and every attempt gets a copy of the unpacked folder.
"""

import hashlib
import re
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cluster.errors import Conflict, NotFound, UserError
from cluster.host.last_used import LastUsed
from cluster.input import archive_unpack
from cluster.input.archive_checks import MAX_ARCHIVE_BYTES
from cluster.paths import private_dir

DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
INCOMING_PREFIX = ".incoming-"


class NodeCodeArchives:
    """Unpacked archives below `folder`. `read` unpacks an archive. Thread-safe."""

    def __init__(self, folder: Path, read: archive_unpack.Read = archive_unpack.read_in_child):
        self._folder, self._read = private_dir(folder), read
        self._last_used = LastUsed()
        self._lock = threading.Lock()
        for path in self._folder.glob(f"{INCOMING_PREFIX}*"):  # left by an agent that was killed
            if path.is_dir():
                shutil.rmtree(path)
            elif not DIGEST.fullmatch(path.name.removeprefix(INCOMING_PREFIX)):  # else the server resumes this upload
                path.unlink(missing_ok=True)

    def has(self, sha: str) -> bool:
        """Return whether an archive is here. This counts as a use: an attempt that needs it follows."""
        self._last_used.touch(sha)
        return self._path(sha).is_dir()

    def arrived(self, sha: str) -> dict[str, Any]:
        """Return how much of an archive has arrived: {"bytes", "sha256" of these bytes}.

        The sender continues from there if it has the same bytes, or else starts again.
        """
        try:
            with self._part(sha).open("rb") as f:
                digest = hashlib.file_digest(f, "sha256")
                return {"bytes": f.tell(), "sha256": digest.hexdigest()}
        except FileNotFoundError:
            return {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}

    def idle(self) -> list[str]:
        """Archives that were not used for an hour. Removes incomplete uploads of that age."""
        self._remove_abandoned_uploads()
        return self._last_used.idle(path.name for path in self._folder.iterdir() if DIGEST.fullmatch(path.name))

    def _remove_abandoned_uploads(self) -> None:
        names = [path.name.removeprefix(INCOMING_PREFIX) for path in self._folder.glob(f"{INCOMING_PREFIX}*")]
        for sha in filter(DIGEST.fullmatch, names):
            with self._lock, self._last_used.remove_if_idle(sha) as idle:
                if idle:
                    self._part(sha).unlink(missing_ok=True)

    def remove(self, names: Iterable[str]) -> None:
        """Remove those of the archives that are still idle.

        A name is free at once, its files are deleted after that.
        """
        for sha in names:
            removed_path = self._folder / f"{INCOMING_PREFIX}{sha}.gone"
            with self._last_used.remove_if_idle(sha) as idle:
                if not idle or not self._path(sha).is_dir():
                    continue
                self._path(sha).replace(removed_path)
            shutil.rmtree(removed_path)

    def put(self, sha: str, offset: int, data: bytes, last: bool) -> None:
        """Append one piece. After the last one the digest is checked, and the archive unpacked.

        Raises Conflict when a piece does not follow the one before, UserError for a wrong digest or a hostile archive.
        """
        with self._lock:
            if self.has(sha):
                return
            part = self._part(sha)
            self._append(part, offset, data)
            if last:
                self._commit(part, sha)

    def _append(self, part: Path, offset: int, data: bytes) -> None:
        arrived_bytes = part.stat().st_size if part.exists() else 0
        if offset not in (0, arrived_bytes):
            raise Conflict(
                f"the piece starts at byte {offset}, but {arrived_bytes} bytes have arrived",
                "nothing to do: the server continues from there",
            )
        if offset + len(data) > MAX_ARCHIVE_BYTES:
            part.unlink(missing_ok=True)
            raise UserError(
                f"the archive is larger than {MAX_ARCHIVE_BYTES >> 20} MiB", "keep data outside of working_dir"
            )
        with part.open("ab" if offset else "wb") as f:
            f.write(data)

    def _commit(self, part: Path, sha: str) -> None:
        with part.open("rb") as f:
            digest = hashlib.file_digest(f, "sha256").hexdigest()
        try:
            if digest != sha:
                raise UserError(
                    f"the archive arrived with the SHA-256 {digest[:12]}…, not {sha[:12]}…", "send it again"
                )
            out = private_dir(self._folder / f"{INCOMING_PREFIX}{sha}.d")
            try:
                self._read(part, out)
                out.replace(self._path(sha))
            finally:
                shutil.rmtree(out, ignore_errors=True)
        finally:
            part.unlink(missing_ok=True)

    def unpack(self, sha: str, target: Path) -> None:
        """Copy an archive's files into the empty folder `target`. Raises NotFound."""
        folder = self._path(sha)
        self._last_used.touch(sha)
        if not folder.is_dir():
            raise NotFound(
                f"code archive {sha[:12]}… is not on this node",
                "nothing to do: the server sends it again at the next start",
            )
        shutil.copytree(folder, target, symlinks=True, dirs_exist_ok=True)

    def _part(self, sha: str) -> Path:
        """The file of an incomplete upload."""
        return self._folder / f"{INCOMING_PREFIX}{self._path(sha).name}"

    def _path(self, sha: str) -> Path:
        if not DIGEST.fullmatch(sha):
            raise UserError(f"{sha[:80]!r} is not a SHA-256", "name a code archive by 64 hexadecimal digits")
        return self._folder / sha
