"""Files below one pool's storage, for checkpoints that move between pools. No path and no link leads out of it.

Each folder on the way is opened relative to the one above it and never through a link, so a link that user code puts
there while we look is not followed. What arrives is written into a folder `.incoming-…`; one rename makes it visible.
"""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from cluster.errors import Conflict, FleetError, NotFound, UserError
from cluster.paths import private_dir

LARGEST_PIECE_BYTES = 8 << 20
INCOMING = ".incoming-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Storage:
    """All paths are relative to `root`, with `/`."""

    def __init__(self, root: Path):
        self.root = private_dir(root)

    def list_files(self, folder: str) -> list[dict[str, Any]]:
        """[{"path": relative to `folder`, "bytes"}] of all files below it, sorted. Raises UserError at a link."""
        with self._opened(_parts(folder)) as top:
            found = list(_walk(top, ""))
        return [{"path": path, "bytes": size} for path, size in sorted(found)]

    def read(self, path: str, offset: int, limit_bytes: int) -> bytes:
        """At most `limit_bytes`, and at most 8 MiB; b"" at the end."""
        *above, name = _parts(path)
        with self._opened(above) as folder, _reported(path):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            with os.fdopen(descriptor, "rb") as f:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise UserError(f"{path!r} is not a regular file")
                return os.pread(f.fileno(), min(limit_bytes, LARGEST_PIECE_BYTES), offset)

    def write(self, path: str, offset: int, data: bytes) -> int:
        """Write into a folder `.incoming-…`, making it and those above it. Returns how many bytes."""
        *above, name = _parts(path)
        if not any(part.startswith(INCOMING) for part in above):
            raise UserError(f"{path!r} is not below a folder {INCOMING}…", "write aside, then commit")
        if len(data) > LARGEST_PIECE_BYTES:
            raise UserError(f"a piece of {len(data)} bytes", f"send at most {LARGEST_PIECE_BYTES}")
        with self._opened(above, make=True) as folder, _reported(path):
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            with os.fdopen(descriptor, "wb") as f:
                return os.pwrite(f.fileno(), data, offset)

    def commit(self, temporary: str, final: str) -> None:
        """Make `temporary` visible as `final` once every byte is on disk. Raises Conflict when that exists."""
        *above, name = _parts(temporary)
        *target_above, target = _parts(final)
        if not name.startswith(INCOMING) or target.startswith(INCOMING):
            raise UserError(f"{temporary!r} cannot be committed as {final!r}", f"only a folder {INCOMING}… can")
        with self._opened([*above, name]) as folder:
            _sync_tree(folder)
        with self._opened(above) as source, self._opened(target_above, make=True) as to:
            if target in _names(to):
                raise Conflict(f"{final!r} is already there", "choose another name, or use it")
            os.rename(name, target, src_dir_fd=source, dst_dir_fd=to)
            os.fsync(to)

    def discard(self, temporary: str) -> None:
        """Remove what was written aside and will not be committed, and a folder above it that it leaves empty."""
        *above, name = _parts(temporary)
        if not name.startswith(INCOMING):
            raise UserError(f"{temporary!r} is no folder {INCOMING}…", "only what was never visible is removed")
        with suppress(NotFound), self._opened(above) as folder:
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
        if above:
            with suppress(OSError), self._opened(above[:-1]) as folder:
                os.rmdir(above[-1], dir_fd=folder)

    def resolve(self, path: str) -> Path:
        """The absolute path, once every folder on it was found without following a link; for readers of checkpoints."""
        parts = _parts(path) if path else []
        with self._opened(parts):
            return self.root.joinpath(*parts)

    def exists(self, folder: str) -> bool:
        try:
            with self._opened(_parts(folder)):
                return True
        except NotFound:
            return False

    @contextmanager
    def _opened(self, parts: list[str], make: bool = False) -> Iterator[int]:
        """A descriptor of the folder."""
        descriptor = os.open(self.root, _FOLDER)
        try:
            for part in parts:
                with _reported("/".join(parts)):
                    if make and part not in _names(descriptor):
                        os.mkdir(part, 0o700, dir_fd=descriptor)
                    below = os.open(part, _FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)


@contextmanager
def _reported(path: str) -> Iterator[None]:
    """System errors as ours, with the path as it was given."""
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"no {path!r} in this pool's storage", "list the folder above it") from None
    except (NotADirectoryError, IsADirectoryError):
        raise UserError(f"{path!r} is a file where a folder is needed, or the other way round, or a link") from None
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FleetError(f"no room for {path!r} in this pool's storage: {e.strerror}", "make room there") from None
        raise UserError(f"{path!r}: {e.strerror}", "links are not followed") from None


def _parts(path: str) -> list[str]:
    """Raises UserError for a path that is absolute, empty or climbs."""
    parts = path.split("/")
    bad = not path or path.startswith("/") or "\0" in path or "\\" in path
    if bad or any(part in ("", ".", "..") for part in parts) or str(PurePosixPath(path)) != path:
        raise UserError(f"{path[:200]!r} is not a path below this pool's storage", "use names and `/`, no `..`")
    return parts


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _walk(folder: int, prefix: str) -> Iterator[tuple[str, int]]:
    for name in _names(folder):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            below = os.open(name, _FOLDER, dir_fd=folder)
            try:
                yield from _walk(below, f"{prefix}{name}/")
            finally:
                os.close(below)
        elif stat.S_ISREG(status.st_mode):
            yield prefix + name, status.st_size
        else:
            raise UserError(f"{prefix + name!r} is neither a file nor a folder", "links are not followed")


def _sync_tree(folder: int) -> None:
    for name in _names(folder):
        is_folder = stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        below = os.open(name, _FOLDER if is_folder else os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        try:
            if is_folder:
                _sync_tree(below)
            else:
                os.fsync(below)
        finally:
            os.close(below)
    os.fsync(folder)
