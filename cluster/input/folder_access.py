"""List, read and write untrusted folders without following links in them, in pieces with a hash each.

Paths are relative to the tree's root, with `/`, and are refused if they could leave it. The folder's writer may replace
any file by a link, a pipe or a folder at any time; each folder of a path is therefore opened relative to its parent.
Standard library only: nodes and clients both use it.
"""

import errno
import fcntl
import hashlib
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cluster.errors import Conflict, FleetError, NotFound, UserError
from cluster.input.checkpoint_location import path_error
from cluster.input.folder_entries import (
    FolderEntry,
    Parts,
    cursor,
    descend,
    entry,
    from_cursor,
    link_error,
    walk_entries,
)

PIECE_BYTES = 8 << 20
"""Bytes read, hashed and sent at a time."""
MAX_LISTED_FILES = 5_000
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Piece(NamedTuple):
    """A piece of a file. `version` changes with the file's size, modification time or inode."""

    data: bytes
    size_bytes: int
    version: str
    modified_s: float
    mode: int


def digest(data: "bytes | memoryview") -> str:
    return hashlib.sha256(data).hexdigest()


def digest_of(hashes: list[str]) -> str:
    """Return the hash of a file, computed from the hashes of its pieces."""
    return digest("".join(hashes).encode())


def normalize_path(path: str, field: str = "path") -> str:
    """Return `path` without `.` and doubled slashes; "" is the root itself.

    Raises UserError for a path outside the root.
    """
    normalized = "/".join(part for part in path.split("/") if part not in ("", "."))
    refusal = "it is absolute" if path.startswith("/") else path_error(normalized) if normalized else ""
    if refusal:
        raise UserError(
            f"{field} {path[:200]!r} is not inside the job's folder: {refusal}", "write names and `/`, without `..`"
        )
    return normalized


class FolderTree:
    """A folder tree: `base` below `root`. Links are not followed, except in the path of `root` itself.

    `follow`: links to files count as the files, for a folder that a user names on their own machine.
    """

    def __init__(self, root: Path, base: str = "", follow: bool = False):
        self.root, self.base, self._follow = root, base, follow

    def __str__(self) -> str:
        return str(self.root / self.base)

    def entries(self, path: str = "", after: str = "", limit: int = MAX_LISTED_FILES) -> tuple[list[FolderEntry], str]:
        """Return a page of at most `limit` entries below `path`, in the order of their parts, behind `after`.

        Also returns the `after` of the next page, "" if there is none. If `path` is not a folder, returns its own
        entry. Raises NotFound.
        """
        if path and (entry_of_path := self.entry(path))["type"] != "folder":
            return [entry_of_path], ""
        listed: list[FolderEntry] = []
        last: Parts = ()
        with self._open_folder(_parts(path)) as folder:
            for parts, item in walk_entries(folder, _parts(path), from_cursor(after), self._follow):
                if len(listed) >= limit:
                    return listed, cursor(last)
                listed.append(item)
                last = parts
        return listed, ""

    def all_entries(self, path: str = "") -> Iterator[FolderEntry]:
        """Yield all entries below `path`, like `entries`."""
        after = ""
        while True:
            page, after = self.entries(path, after)
            yield from page
            if not after:
                return

    def size_bytes(self) -> int:
        """Return the bytes of all its files; 0 if the folder does not exist."""
        try:
            with self._open_folder(()) as folder:
                return sum(item["bytes"] for _, item in walk_entries(folder, (), ()))
        except (NotFound, UserError):
            return 0

    def entry(self, path: str) -> FolderEntry:
        """Return the entry of one path. Raises NotFound."""
        *parents, name = _parts(path)
        with self._open_folder(tuple(parents)) as folder, _translated_errors(path):
            return entry(folder, name, (*parents, name), self._follow)

    def exists(self, path: str) -> bool:
        try:
            self.entry(path)
        except (NotFound, UserError):
            return False
        return True

    def read(self, path: str, offset: int, limit_bytes: int = PIECE_BYTES) -> Piece:
        """Read at most one piece; b"" at the end. Raises NotFound, or UserError if it is not a regular file."""
        with self._open_file(path) as (descriptor, status):
            data = os.pread(descriptor, min(limit_bytes, PIECE_BYTES), offset)
            return Piece(
                data, status.st_size, version_of(status), status.st_mtime, stat.S_IMODE(status.st_mode) & 0o777
            )

    def hashes(self, path: str, first: int = 0, count: int = 1 << 30) -> tuple[str, list[str]]:
        """Return the file's version, and the hashes of its pieces from `first` on as they are now."""
        with self._open_file(path) as (descriptor, status):
            last = min(first + count, -(-status.st_size // PIECE_BYTES))
            pieces = (os.pread(descriptor, PIECE_BYTES, index * PIECE_BYTES) for index in range(first, last))
            return version_of(status), [digest(piece) for piece in pieces]

    @contextmanager
    def _open_file(self, path: str) -> Iterator[tuple[int, os.stat_result]]:
        *parents, name = _parts(path)
        with self._open_folder(tuple(parents)) as folder, _translated_errors(path):
            descriptor = os.open(name, _READ & ~os.O_NOFOLLOW if self._follow else _READ, dir_fd=folder)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise UserError(f"{path!r} is not a regular file", "name a file")
                yield descriptor, status
            finally:
                os.close(descriptor)

    # -- writing

    def create_folder(self, path: str = "") -> None:
        """Create the folder and its parents."""
        with self._open_folder(_parts(path), create=True):
            return

    def write(self, path: str, offset: int, data: "bytes | memoryview") -> None:
        """Write `data` at `offset`; create the file and its folders if needed."""
        with self._open_for_writing(path) as descriptor:
            view, written = memoryview(data), 0
            while written < len(view):
                written += os.pwrite(descriptor, view[written:], offset + written)

    @contextmanager
    def locked(self, path: str) -> Iterator[None]:
        """Lock the file for one writer; create it if needed. Raises Conflict if another process holds it."""
        with self._open_for_writing(path) as descriptor:
            conflict = Conflict(
                f"{str(self.root / path)!r} is being written by another process",
                "wait until it has finished, then run the command again",
            )
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                if e.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                    raise conflict from None  # ignore other errors: the file system has no locks
            with self._open_for_writing(path) as current:
                if (
                    os.fstat(current).st_ino != os.fstat(descriptor).st_ino
                ):  # another process replaced the file before we locked it
                    raise conflict
            yield

    def finish(self, path: str, size_bytes: int, modified_s: float, mode: int) -> None:
        """Set a written file's length, mode and time, and sync it to disk."""
        with self._open_for_writing(path) as descriptor:
            os.ftruncate(descriptor, size_bytes)
            os.fchmod(descriptor, mode & 0o777 | stat.S_IRUSR | stat.S_IWUSR)
            os.utime(descriptor, (modified_s, modified_s))
            os.fsync(descriptor)

    def link(self, path: str, target: str) -> None:
        """Create a symbolic link. Raises UserError if it points outside the tree, Conflict if `path` exists."""
        if refusal := link_error(path, target):
            raise UserError(
                f"the link {path!r} to {target[:200]!r} is refused: {refusal}", "link to a path inside the folder"
            )
        *parents, name = _parts(path)
        with self._open_folder(tuple(parents), create=True) as folder, _translated_errors(path):
            os.symlink(target, name, dir_fd=folder)

    def move(self, path: str, to: "FolderTree", new: str, *, overwrite: bool) -> None:
        """Move one file or link atomically to `new` in the tree `to`, on the same file system.

        Raises Conflict if `new` exists, unless `overwrite` is set and it is a regular file.
        """
        *parents, name = _parts(path)
        *new_parents, new_name = _parts(new)
        with (
            self._open_folder(tuple(parents)) as source,
            to._open_folder(tuple(new_parents), create=True) as target,
            _translated_errors(new),
        ):
            if overwrite:
                with suppress(FileNotFoundError):
                    if not stat.S_ISREG(os.stat(new_name, dir_fd=target, follow_symlinks=False).st_mode):
                        raise Conflict(f"{new!r} exists and is not a regular file", "name another path")
                os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)
            else:
                os.link(name, new_name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
                os.unlink(name, dir_fd=source)

    def remove(self, path: str) -> None:
        """Remove a file, if it exists."""
        *parents, name = _parts(path)
        with suppress(NotFound), self._open_folder(tuple(parents)) as folder, suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)

    @contextmanager
    def _open_for_writing(self, path: str) -> Iterator[int]:
        *parents, name = _parts(path)
        with self._open_folder(tuple(parents), create=True) as folder, _translated_errors(path):
            descriptor = os.open(name, _WRITE, 0o600, dir_fd=folder)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise UserError(f"{path!r} is not a regular file", "name another path")
                yield descriptor
            finally:
                os.close(descriptor)

    @contextmanager
    def _open_folder(self, parts: Parts, create: bool = False) -> Iterator[int]:
        """Yield a descriptor of the folder."""
        names = (*_parts(self.base), *parts)
        with _translated_errors("/".join(parts)):
            descriptor = descend(os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), names, create=create)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def version_of(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"


def _parts(path: str) -> Parts:
    """Split a path. Raises UserError if it is absolute or has `..`."""
    if path and (refusal := path_error(path)):
        raise UserError(f"{path[:200]!r} is not a path in this folder: {refusal}", "write names and `/`, without `..`")
    return tuple(path.split("/")) if path else ()


@contextmanager
def _translated_errors(path: str) -> Iterator[None]:
    """Turn system errors into ours, with the path as it was passed."""
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"no {path!r} in this folder", "run `polyfleet files ls` to see its files") from None
    except FileExistsError:
        raise Conflict(f"{path!r} exists already", "name another path") from None
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"{path!r} cannot be written on {socket.gethostname()}: {e.strerror}"
            raise FleetError(message, "free disk space on that machine, then try again") from None
        if e.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR):
            reason = "is a link, or a file where a folder is needed, or a folder where a file is needed"
            raise UserError(f"{path!r} {reason}", "name a path without links") from None
        raise UserError(f"{path!r}: {e.strerror}", "check its permissions") from None
