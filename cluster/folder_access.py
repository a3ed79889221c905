"""Folders that others fill: listed, read and written without following a link in them, in pieces with a hash each.

Paths are relative to the tree's root, with `/`, and are refused where they could lead out of it. Whoever fills such a
folder may put a link, a pipe or a folder in the place of any file while we look; each folder on the way is therefore
opened relative to the one above it. Standard library only: nodes and clients use it alike.
"""

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cluster.checkpoint_location import path_error
from cluster.errors import Conflict, FleetError, NotFound, UserError
from cluster.folder_entries import Entry, Parts, below, cursor, entry, from_cursor, link_refusal
from cluster.safe_path_walk import descend

PIECE_BYTES = 8 << 20
"""What is read, hashed and sent at a time."""
MOST_LISTED = 5_000
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Piece(NamedTuple):
    """`version` changes with the file: its size, the time of its last change, its inode."""

    data: bytes
    size_bytes: int
    version: str
    modified_s: float
    mode: int


def digest(data: "bytes | memoryview") -> str:
    return hashlib.sha256(data).hexdigest()


def digest_of(hashes: list[str]) -> str:
    """One for a whole file, of those of its pieces."""
    return digest("".join(hashes).encode())


def plain(path: str, field: str = "path") -> str:
    """`path` without `.` and doubled slashes; "" is the root itself. Raises UserError for one that leads out of it."""
    kept = "/".join(part for part in path.split("/") if part not in ("", "."))
    refusal = "it is absolute" if path.startswith("/") else path_error(kept) if kept else ""
    if refusal:
        raise UserError(
            f"{field} {path[:200]!r} is not inside the job's folder: {refusal}", "use names and `/`, no `..`"
        )
    return kept


class Tree:
    """`base` lies below `root` and is looked for without following links, too; `root` itself is the caller's.

    `follow`: links to files count as the files, as in a folder that a user names on a machine of their own.
    """

    def __init__(self, root: Path, base: str = "", follow: bool = False):
        self.root, self.base, self._follow = root, base, follow

    def __str__(self) -> str:
        return str(self.root / self.base)

    def entries(self, path: str = "", after: str = "", most: int = MOST_LISTED) -> tuple[list[Entry], str]:
        """Everything below `path`, or `path` itself where it is no folder, in the order of its parts, beyond `after`.
        And what to give as `after` for more of it, "" where that was all. Raises NotFound.
        """
        if path and (only := self.look(path))["type"] != "folder":
            return [only], ""
        found: list[Entry] = []
        last: Parts = ()
        with self._opened(_parts(path)) as folder:
            for parts, there in below(folder, _parts(path), from_cursor(after), self._follow):
                if len(found) >= most:
                    return found, cursor(last)
                found.append(there)
                last = parts
        return found, ""

    def all_entries(self, path: str = "") -> Iterator[Entry]:
        """As `entries`, all of them."""
        after = ""
        while True:
            found, after = self.entries(path, after)
            yield from found
            if not after:
                return

    def size_bytes(self) -> int:
        """Of all its files; 0 where there is none."""
        try:
            with self._opened(()) as folder:
                return sum(found["bytes"] for _, found in below(folder, (), ()))
        except (NotFound, UserError):
            return 0

    def look(self, path: str) -> Entry:
        """Raises NotFound."""
        *above, name = _parts(path)
        with self._opened(tuple(above)) as folder, _reported(path):
            return entry(folder, name, (*above, name), self._follow)

    def exists(self, path: str) -> bool:
        try:
            self.look(path)
        except (NotFound, UserError):
            return False
        return True

    def read(self, path: str, offset: int, most_bytes: int = PIECE_BYTES) -> Piece:
        """At most one piece; b"" at the end. Raises NotFound, UserError for what is no regular file."""
        with self._file(path) as (descriptor, found):
            data = os.pread(descriptor, min(most_bytes, PIECE_BYTES), offset)
            return Piece(data, found.st_size, version_of(found), found.st_mtime, stat.S_IMODE(found.st_mode) & 0o777)

    def hashes(self, path: str, first: int = 0, count: int = 1 << 30) -> tuple[str, list[str]]:
        """The file's version, and the hashes of pieces `first` and following as they are now."""
        with self._file(path) as (descriptor, found):
            last = min(first + count, -(-found.st_size // PIECE_BYTES))
            pieces = (os.pread(descriptor, PIECE_BYTES, index * PIECE_BYTES) for index in range(first, last))
            return version_of(found), [digest(piece) for piece in pieces]

    @contextmanager
    def _file(self, path: str) -> Iterator[tuple[int, os.stat_result]]:
        *above, name = _parts(path)
        with self._opened(tuple(above)) as folder, _reported(path):
            descriptor = os.open(name, _READ & ~os.O_NOFOLLOW if self._follow else _READ, dir_fd=folder)
            try:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise UserError(f"{path!r} is not a regular file", "name a file")
                yield descriptor, found
            finally:
                os.close(descriptor)

    # -- writing

    def make(self, path: str = "") -> None:
        """The folder, with those above it."""
        with self._opened(_parts(path), make=True):
            return

    def write(self, path: str, offset: int, data: "bytes | memoryview") -> None:
        """Into a file that is made, with its folders, if need be."""
        with self._writing(path) as descriptor:
            view, done = memoryview(data), 0
            while done < len(view):
                done += os.pwrite(descriptor, view[done:], offset + done)

    @contextmanager
    def alone(self, path: str) -> Iterator[None]:
        """While nobody else has this of the same file, which is made if need be. Raises Conflict where somebody has."""
        with self._writing(path) as descriptor:
            taken = Conflict(f"{str(self.root / path)!r} is being written by another process", "let it finish")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                if e.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                    raise taken from None  # any other error: a file system without locks
            with self._writing(path) as again:
                if os.fstat(again).st_ino != os.fstat(descriptor).st_ino:  # it was given its place meanwhile
                    raise taken
            yield

    def finish(self, path: str, size_bytes: int, modified_s: float, mode: int) -> None:
        """Exactly as long as it should be, and on disk."""
        with self._writing(path) as descriptor:
            os.ftruncate(descriptor, size_bytes)
            os.fchmod(descriptor, mode & 0o777 | stat.S_IRUSR | stat.S_IWUSR)
            os.utime(descriptor, (modified_s, modified_s))
            os.fsync(descriptor)

    def link(self, path: str, target: str) -> None:
        """A symbolic link that stays inside the tree. Raises UserError for another, Conflict where something is."""
        if refusal := link_refusal(path, target):
            raise UserError(
                f"the link {path!r} to {target[:200]!r} is refused: {refusal}", "links stay in their folder"
            )
        *above, name = _parts(path)
        with self._opened(tuple(above), make=True) as folder, _reported(path):
            os.symlink(target, name, dir_fd=folder)

    def move(self, path: str, to: "Tree", new: str, *, over: bool) -> None:
        """One file or link, at once: a reader of `new` sees the old one or this one. Raises Conflict where `new` is
        there, unless `over` a regular file. Both lie on one file system.
        """
        *above, name = _parts(path)
        *new_above, new_name = _parts(new)
        with self._opened(tuple(above)) as source, to._opened(tuple(new_above), make=True) as target, _reported(new):
            if over:
                with suppress(FileNotFoundError):
                    if not stat.S_ISREG(os.stat(new_name, dir_fd=target, follow_symlinks=False).st_mode):
                        raise Conflict(f"{new!r} is there and is not a regular file", "name another place")
                os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)
            else:
                os.link(name, new_name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
                os.unlink(name, dir_fd=source)

    def remove(self, path: str) -> None:
        """A file; an absent one is none to remove."""
        *above, name = _parts(path)
        with suppress(NotFound), self._opened(tuple(above)) as folder, suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)

    @contextmanager
    def _writing(self, path: str) -> Iterator[int]:
        *above, name = _parts(path)
        with self._opened(tuple(above), make=True) as folder, _reported(path):
            descriptor = os.open(name, _WRITE, 0o600, dir_fd=folder)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise UserError(f"{path!r} is not a regular file", "name another place")
                yield descriptor
            finally:
                os.close(descriptor)

    @contextmanager
    def _opened(self, parts: Parts, make: bool = False) -> Iterator[int]:
        """A descriptor of the folder."""
        names = (*_parts(self.base), *parts)
        with _reported("/".join(parts)):
            descriptor = descend(os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), names, make=make)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def version_of(found: os.stat_result) -> str:
    return f"{found.st_size}-{found.st_mtime_ns}-{found.st_ino}"


def _parts(path: str) -> Parts:
    """Raises UserError for a path that is absolute or climbs."""
    if path and (refusal := path_error(path)):
        raise UserError(f"{path[:200]!r} is not a path in this folder: {refusal}", "use names and `/`, no `..`")
    return tuple(path.split("/")) if path else ()


@contextmanager
def _reported(path: str) -> Iterator[None]:
    """System errors as ours, with the path as it was given."""
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"no {path!r} in this folder", "`polyfleet files ls` shows what is there") from None
    except FileExistsError:
        raise Conflict(f"{path!r} is there already", "name another place") from None
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FleetError(f"no space for {path!r}: {e.strerror}", "free space there") from None
        if e.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR):
            why = "is a link, or a file where a folder is needed, or the other way round"
            raise UserError(f"{path!r} {why}", "links are not followed") from None
        raise UserError(f"{path!r}: {e.strerror}", "look at its rights") from None
