"""Files below one pool's storage, for checkpoints that move between pools. No path and no link leads out of it.

Each folder on the way is opened relative to the one above it and never through a link, so a link that user code puts
there while we look is not followed.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.checkpoint_location import path_error
from cluster.errors import FleetError, NotFound, UserError
from cluster.paths import storage_dir
from cluster.safe_path_walk import FOLDER, descend
from cluster.untrusted_files import LARGEST_INTEGER

LARGEST_PIECE_BYTES = 8 << 20
INCOMING = ".incoming-"


class PoolStorage:
    """All paths are relative to `root`, with `/`."""

    def __init__(self, root: Path):
        self.root = storage_dir(root)

    def read(self, path: str, offset: int, limit_bytes: int) -> bytes:
        """At most `limit_bytes`, and at most 8 MiB; b"" at the end."""
        *above, name = _parts(path)
        if not 0 <= offset <= LARGEST_INTEGER or limit_bytes < 0:
            raise UserError(f"{path!r} has no {limit_bytes} bytes from {offset} on")
        with self._opened(above) as folder, _reported(path):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            with os.fdopen(descriptor, "rb") as f:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise UserError(f"{path!r} is not a regular file")
                return os.pread(f.fileno(), min(limit_bytes, LARGEST_PIECE_BYTES), offset)

    def resolve(self, path: str) -> Path:
        """The absolute path, once every folder on it was found without following a link; for readers of checkpoints."""
        parts = _parts(path) if path else []
        with self._opened(parts):
            return self.root.joinpath(*parts)

    def find(self, path: str) -> Path:
        """The absolute path of a file or folder, found without following a link. Raises NotFound, UserError."""
        *above, name = _parts(path)
        with self._opened(above) as folder, _reported(path):
            if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise UserError(f"{path!r} is a link", "links are not followed")
        return self.root.joinpath(*above, name)

    def make(self, folder: str) -> Path:
        """The absolute path of a folder, made with those above it if need be."""
        parts = _parts(folder)
        with self._opened(parts, make=True):
            return self.root.joinpath(*parts)

    def new(self, path: str) -> Path:
        """The absolute path of something that a tool makes itself, in a folder that is made if need be."""
        *above, name = _parts(path)
        return (self.make("/".join(above)) if above else self.root) / name

    def exists(self, folder: str) -> bool:
        try:
            with self._opened(_parts(folder)):
                return True
        except NotFound:
            return False

    @contextmanager
    def _opened(self, parts: list[str], make: bool = False) -> Iterator[int]:
        """A descriptor of the folder."""
        try:
            descriptor = os.open(self.root, FOLDER)
        except OSError as e:
            raise FleetError(
                f"this pool's storage {self.root} cannot be opened: {e.strerror}", "it must be a folder, and no link"
            ) from None
        with _reported("/".join(parts)):
            descriptor = descend(descriptor, parts, make=make)
        try:
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
            raise FleetError(
                f"no space for {path!r} in this pool's storage: {e.strerror}", "free space there"
            ) from None
        raise UserError(f"{path!r}: {e.strerror}", "links are not followed") from None


def _parts(path: str) -> list[str]:
    """Raises UserError for a path that is absolute, empty or climbs."""
    if refusal := path_error(path):
        raise UserError(
            f"{path[:200]!r} is not a path below this pool's storage: {refusal}", "use names and `/`, no `..`"
        )
    return path.split("/")
