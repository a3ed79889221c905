"""Data of jobs on a node: fetched once into its pool's storage, used by all attempts that want the same, never written.

A job sees it by a link into the cache, whose files nobody has the right to write. A read-only mount would need root,
and a copy the time and space of the data for each attempt; a hard link shares the right to write with the cache just as
a link does, and cannot cross file systems. What a job of the same user or of root changes there nevertheless is noticed
at the next use (cluster/content_cache.py).
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cluster.checkpoint_location import path_error
from cluster.content_cache import Contents
from cluster.content_hash import Content
from cluster.errors import UserError
from workers.messages import Mount
from workers.pool_storage import PoolStorage

FOLDER = ".data"
LIMIT = "POLYFLEET_DATA_CACHE_BYTES"
UPLOADS = ".uploads"


def limit_bytes(environ: Mapping[str, str], whole_bytes: int) -> int:
    """Of all data in one storage; half of its file system unless the pool says otherwise. Raises UserError."""
    text = environ.get(LIMIT, "") or str(whole_bytes // 2)
    if not text.isascii() or not text.isdigit() or int(text[:20]) >= 1 << 60:
        raise UserError(f"{LIMIT} is {text[:40]!r} on this node", "write bytes, such as 500000000000")
    return int(text)


class DataCache:
    """Of one pool's storage: what shares that shares the data."""

    def __init__(self, storage: Path):
        self._storage = storage
        self._contents = Contents(storage / FOLDER)

    def find(self, sha256: str) -> int | None:
        """Bytes of what is here; None where it is not."""
        found = self._contents.find(sha256)
        return None if found is None else found.bytes

    def found_at(self, key: str) -> str:
        sha256 = self._contents.found_at(key)
        return sha256 if sha256 and self._contents.find(sha256) else ""

    def keys(self) -> tuple[str, ...]:
        return tuple(self._contents.keys())

    def make_room(self, needed_bytes: int, environ: Mapping[str, str] = os.environ) -> None:
        """Raises FleetError, UserError; nothing has been fetched then."""
        most = limit_bytes(environ, shutil.disk_usage(self._storage).total)
        self._contents.make_room(needed_bytes, most)

    def keep(self, upload: str, inner: str, expected: str, came_from: str) -> Content:
        """What arrived as `inner` in an upload, "" for all of it."""
        storage = PoolStorage(self._storage)
        folder = f"{UPLOADS}/{upload}"
        return self._contents.keep(storage.find(f"{folder}/{inner}" if inner else folder), expected, came_from)

    @contextmanager
    def used(self, mounts: tuple[Mount, ...]) -> Iterator[dict[str, tuple[Path, Path]]]:
        """Content and lock by SHA-256, none of which is removed meanwhile. Raises NotFound."""
        with ExitStack() as held:
            yield {sha256: held.enter_context(self._contents.used(sha256)) for sha256, *_ in mounts}


def link(work: Path, mounts: tuple[Mount, ...], contents: Mapping[str, tuple[Path, Path]]) -> None:
    """Show data in an attempt's own folder. Raises UserError where something is there already."""
    for sha256, path, name in mounts:
        content = contents[sha256][0]
        path = f"{path}/{name}" if name and content.is_file() else path
        if refusal := path_error(path):
            raise UserError(f"data cannot be shown at {path[:200]!r}: {refusal}", "use names and `/`, no `..`")
        target = work / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            target.symlink_to(content)
        except (FileExistsError, NotADirectoryError):
            told = f"data is to be shown at {path!r}, which the submitted folder has already"
            raise UserError(told, "name another `mount`") from None
