"""Access files below one pool's storage, such that no path and no link leads out of it.

Each folder of a path is opened relative to the one above it and never through a link, so a link that user code creates
at that moment is not followed.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.errors import FleetError, NotFound, UserError
from cluster.input.checkpoint_location import path_error
from cluster.input.folder_entries import FOLDER, descend
from cluster.input.untrusted_files import MAX_INTEGER
from cluster.paths import storage_dir

MAX_PIECE_BYTES = 8 << 20
INCOMING_PREFIX = ".incoming-"


class PoolStorage:
    """The storage at `root`. All paths are relative to it, with `/`."""

    def __init__(self, root: Path):
        self.root = storage_dir(root)

    def read(self, path: str, offset: int, limit_bytes: int) -> bytes:
        """Read at most `limit_bytes`, and at most 8 MiB; b"" at the end."""
        *parents, name = _split(path)
        if not 0 <= offset <= MAX_INTEGER or limit_bytes < 0:
            raise UserError(f"cannot read {limit_bytes} bytes of {path!r} from byte {offset} on")
        with self._open(parents) as folder, _convert_errors(path):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            with os.fdopen(descriptor, "rb") as f:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise UserError(f"{path!r} is not a regular file")
                return os.pread(f.fileno(), min(limit_bytes, MAX_PIECE_BYTES), offset)

    def resolve(self, path: str) -> Path:
        """Return the absolute path of a folder, for readers of checkpoints.

        Raises if a part is missing or a link.
        """
        parts = _split(path) if path else []
        with self._open(parts):
            return self.root.joinpath(*parts)

    def find(self, path: str) -> Path:
        """Return the absolute path of a file or folder. Raises NotFound; UserError if a part is a link."""
        *parents, name = _split(path)
        with self._open(parents) as folder, _convert_errors(path):
            if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise UserError(f"{path!r} is a link", "links are not followed")
        return self.root.joinpath(*parents, name)

    def make_folder(self, folder: str) -> Path:
        """Create a folder and those above it if need be; return its absolute path."""
        parts = _split(folder)
        with self._open(parts, create=True):
            return self.root.joinpath(*parts)

    def create_file(self, path: str) -> Path:
        """Return the absolute path of a new entry for a tool to create; creates the folder that it is in."""
        *parents, name = _split(path)
        return (self.make_folder("/".join(parents)) if parents else self.root) / name

    def exists(self, folder: str) -> bool:
        try:
            with self._open(_split(folder)):
                return True
        except NotFound:
            return False

    @contextmanager
    def _open(self, parts: list[str], create: bool = False) -> Iterator[int]:
        """Open a folder; yields its descriptor."""
        try:
            descriptor = os.open(self.root, FOLDER)
        except OSError as e:
            raise FleetError(
                f"this pool's storage {self.root} cannot be opened: {e.strerror}",
                "make sure that it is a folder and not a link",
            ) from None
        with _convert_errors("/".join(parts)):
            descriptor = descend(descriptor, parts, create=create)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


@contextmanager
def _convert_errors(path: str) -> Iterator[None]:
    """Convert system errors into ours, with the path as the caller wrote it."""
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"no {path!r} in this pool's storage", "list its parent folder") from None
    except (NotADirectoryError, IsADirectoryError):
        raise UserError(
            f"{path!r} is a link, or a file where a folder is needed, or a folder where a file is needed"
        ) from None
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FleetError(
                f"no space for {path!r} in this pool's storage: {e.strerror}", "free disk space on that node"
            ) from None
        raise UserError(f"{path!r}: {e.strerror}", "links are not followed") from None


def _split(path: str) -> list[str]:
    """Split a path. Raises UserError if it is absolute, empty or has `..`."""
    if refusal := path_error(path):
        raise UserError(
            f"{path[:200]!r} is not a path below this pool's storage: {refusal}", "use names and `/`, without `..`"
        )
    return path.split("/")
