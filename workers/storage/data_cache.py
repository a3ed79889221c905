"""Cache of jobs' data: fetched once into a pool's storage, and shared by all attempts that need it.

A job sees the data by a link into the cache, whose files are read-only for all. A read-only mount would need root, and
a copy would cost the time and space of the data for each attempt; a hard link has the same permissions as the cached
file, and cannot cross file systems. If a job of the same user or of root changes cached data nevertheless, the next use
notices it (cluster/host/content_cache.py).
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cluster.errors import UserError
from cluster.host.content_cache import ContentCache
from cluster.host.content_hash import Content
from cluster.input.checkpoint_location import path_error
from workers.protocol.messages import Mount
from workers.storage.pool_storage import PoolStorage

FOLDER = ".data"
LIMIT_VARIABLE = "POLYFLEET_DATA_CACHE_BYTES"
UPLOADS = ".uploads"


def limit_bytes(environ: Mapping[str, str], total_bytes: int) -> int:
    """Size limit of the data in one storage: the pool's setting, else half of the file system.

    Raises UserError.
    """
    text = environ.get(LIMIT_VARIABLE, "") or str(total_bytes // 2)
    if not text.isascii() or not text.isdigit() or int(text[:20]) >= 1 << 60:
        raise UserError(
            f"{LIMIT_VARIABLE} is {text[:40]!r} on this node", "write a number of bytes, such as 500000000000"
        )
    return int(text)


class DataCache:
    """The cache in one pool's storage, shared by all nodes that share the storage."""

    def __init__(self, storage: Path):
        self._storage = storage
        self._contents = ContentCache(storage / FOLDER)

    def find(self, sha256: str) -> int | None:
        """Return the bytes of cached data; None if it is not in the cache."""
        content = self._contents.find(sha256)
        return None if content is None else content.bytes

    def sha256_of(self, key: str) -> str:
        """Return the SHA-256 of cached data by the key of its source; "" if it is not in the cache."""
        sha256 = self._contents.source_sha256(key)
        return sha256 if sha256 and self._contents.find(sha256) else ""

    def keys(self) -> tuple[str, ...]:
        return tuple(self._contents.keys())

    def free_space(self, needed_bytes: int, environ: Mapping[str, str] = os.environ) -> None:
        """Before data is fetched, remove unused data until it fits under the limit.

        Raises FleetError, UserError.
        """
        max_bytes = limit_bytes(environ, shutil.disk_usage(self._storage).total)
        self._contents.free_space(needed_bytes, max_bytes)

    def add_upload(self, upload: str, inner: str, expected: str, key: str) -> Content:
        """Move data from an upload into the cache: the entry `inner`, or all of it if that is ""."""
        storage = PoolStorage(self._storage)
        folder = f"{UPLOADS}/{upload}"
        return self._contents.add(storage.find(f"{folder}/{inner}" if inner else folder), expected, key)

    @contextmanager
    def lock_data(self, mounts: tuple[Mount, ...]) -> Iterator[dict[str, tuple[Path, Path]]]:
        """Yield path and lock of the data, by SHA-256; none of it is removed until the block ends.

        Raises NotFound.
        """
        with ExitStack() as stack:
            yield {sha256: stack.enter_context(self._contents.use(sha256)) for sha256, *_ in mounts}


def link(work: Path, mounts: tuple[Mount, ...], contents: Mapping[str, tuple[Path, Path]]) -> None:
    """Link data into an attempt's work folder. Raises UserError if the path exists already."""
    for sha256, path, name in mounts:
        content = contents[sha256][0]
        path = f"{path}/{name}" if name and content.is_file() else path
        if refusal := path_error(path):
            raise UserError(f"data cannot be mounted at {path[:200]!r}: {refusal}", "use names and `/`, without `..`")
        target = work / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            target.symlink_to(content)
        except (FileExistsError, NotADirectoryError):
            message = f"data cannot be mounted at {path!r}: the submitted folder already has that path"
            raise UserError(message, "choose another `mount`") from None
