"""Store built libraries for later processes, below POLYFLEET_HOME, which nodes with different CPUs may share.

A file's name contains the hash of everything it was built from and the hash of its content, so that a truncated or
modified file is not loaded. Only this user can write here.
"""

import hashlib
import os
import shutil
import stat
import threading
from contextlib import suppress
from pathlib import Path

from cluster import paths
from cluster.errors import UserError

FOLDER = "native"
_HASH_LETTERS = 32


class LibraryStore:
    """Folder of built libraries. `reason` says why nothing can be stored, or is ""."""

    def __init__(self) -> None:
        self.folder, self.reason = Path(FOLDER), ""
        try:
            self.folder = paths.private_dir(paths.home() / FOLDER)
            self.reason = _unsafe_reason(self.folder)
        except (OSError, RuntimeError, UserError) as e:  # a RuntimeError if this user has no home folder
            self.reason = f"nothing can be stored: {e}"

    def find(self, name: str, key: str) -> Path | None:
        """Return the library that was built earlier, or None. Deletes files that changed after they were written."""
        if self.reason:
            return None
        for path in sorted(self.folder.glob(f"{name}-{key[:_HASH_LETTERS]}-*.so")):
            if not _unsafe_reason(path) and path.name == _file_name(name, key, path):
                return path
            path.unlink(missing_ok=True)
        return None

    def add(self, name: str, key: str, built: Path) -> Path | None:
        """Store the library atomically and durably, safe against concurrent writers. Return None if that fails."""
        if self.reason:
            return None
        part = self.folder / f".{name}.{os.getpid()}.{threading.get_ident()}.part"
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o700)
            with os.fdopen(descriptor, "wb") as out, built.open("rb") as data:
                shutil.copyfileobj(data, out)
                out.flush()
                os.fsync(out.fileno())
            return part.rename(self.folder / _file_name(name, key, built))
        except OSError as e:
            self.reason = f"{self.folder} cannot be written: {e.strerror or e}"
            with suppress(OSError):
                part.unlink()
            return None


def _file_name(name: str, key: str, content: Path) -> str:
    digest = hashlib.sha256(content.read_bytes()).hexdigest()
    return f"{name}-{key[:_HASH_LETTERS]}-{digest[:_HASH_LETTERS]}.so"


def _unsafe_reason(path: Path) -> str:
    """Return why another user could have written `path`, or "". A link is never trusted."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a link"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to user {status.st_uid}"
    return f"{path} can be written by other users" if status.st_mode & 0o022 else ""
