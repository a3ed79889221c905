"""Where checkpoints can be stored: local folders, and object stores through fsspec.

Both have the same few operations, and nothing else is used, so that any store works: names, exists, size_bytes, read
and checkpoints_below. Names are relative to `where`, with `/`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from cluster.errors import FleetError, NotFound, PolyfleetError, UserError
from cluster.host.copy_rate import store_pace
from cluster.input import checkpoint_location
from workers.checkpoint.disk.reader import read_at
from workers.checkpoint.format import links
from workers.checkpoint.format.manifest import FOLDER, MAX_MANIFEST_BYTES, NAME, DamagedCheckpoint
from workers.checkpoint.format.manifest_checks import open_regular
from workers.errors import CheckpointError

OBJECT_STORES = {
    "s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "memory": "fsspec",
}  # fmt: skip
IN_MEMORY: tuple[str, ...] = ()
"""Schemes of stores that end with their process. Only tests set one; users cannot name one."""
BLOCK_BYTES = 16 << 20


class FolderStore:
    """A local folder. `follow`: links in it are followed; else a link to a checkpoint elsewhere is not listed."""

    def __init__(self, path: Path, follow: bool = False):
        self.path, self.where, self._follow = path, str(path), follow or links.are_followed()

    def names(self) -> list[str]:
        entries = self.path.iterdir() if self.path.is_dir() else ()
        return sorted(p.name for p in entries if self._follow or not p.is_symlink())

    def exists(self, name: str) -> bool:
        return os.path.lexists(self.path / name)

    def size_bytes(self, name: str) -> int:
        descriptor = open_regular(self.path / name, self._follow)
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def read(self, name: str, offset: int, out: memoryview) -> None:
        descriptor = open_regular(self.path / name, self._follow)
        try:
            read_at(self.path / name, descriptor, offset, out)
        finally:
            os.close(descriptor)

    def checkpoints_below(self, name: str) -> "FolderStore":
        return FolderStore(self.path / name, self._follow)


class ObjectStore:
    """A prefix in an object store. Objects are written once, completely, under names that are never used again.

    `pace` waits until as many bytes may be transferred.
    """

    def __init__(self, files: Any, path: str, where: str, pace: Callable[[int], None] = lambda transfer_bytes: None):
        self._files, self._path, self.where, self._pace = files, path.rstrip("/"), where, pace

    @property
    def path(self) -> str:
        """Path as the store's library writes it."""
        return self._path

    def find(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every object at or below here: its path, and its properties. Raises UserError, FleetError."""
        with self._convert_errors("listed"):
            self._files.invalidate_cache()
            objects = self._files.find(self._path, detail=True)
        yield from objects.items()

    def pieces(self, path: str, size_bytes: int, most_bytes: int) -> Iterator[bytes]:
        """Yield an object's bytes, piece by piece. Raises FleetError if it has another size."""
        for offset in range(0, size_bytes, most_bytes):
            end = min(offset + most_bytes, size_bytes)
            self._pace(end - offset)
            with self._convert_errors("read"):
                piece = bytes(self._files.cat_file(path, start=offset, end=end))
            if len(piece) != end - offset:
                raise FleetError(f"{self.where} has changed while it was read", "nothing to do: it is downloaded again")
            yield piece

    @contextmanager
    def _convert_errors(self, operation: str) -> Iterator[None]:
        """Convert a store library's errors: UserError for what the user must fix, FleetError if it may pass."""
        try:
            yield
        except PolyfleetError:
            raise
        except FileNotFoundError:
            raise NotFound(f"nothing is at {self.where}", "check bucket and prefix") from None
        except PermissionError as e:
            raise UserError(
                f"{self.where} may not be {operation}: {e}", "check the credentials in the environment"
            ) from e
        except Exception as e:  # each library raises errors of its own
            message = f"{self.where} cannot be {operation}: {type(e).__name__}: {e}"
            raise FleetError(message[:1000], "check the network and the credentials in the environment") from e

    def names(self) -> list[str]:
        try:
            objects = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        except OSError as e:
            raise self._error("listed", e) from e
        return sorted(PurePosixPath(name.rstrip("/")).name for name in objects)

    def exists(self, name: str) -> bool:
        return bool(self._files.exists(f"{self._path}/{name}"))

    def size_bytes(self, name: str) -> int:
        try:
            return int(self._files.size(f"{self._path}/{name}"))
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{self.where}/{name} does not exist") from None

    def read(self, name: str, offset: int, out: memoryview) -> None:
        self._pace(len(out))
        try:
            data = self._files.cat_file(f"{self._path}/{name}", start=offset, end=offset + len(out))
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{self.where}/{name} does not exist") from None
        except OSError as e:
            raise self._error(f"read ({name})", e) from e
        if len(data) != len(out):
            raise DamagedCheckpoint(f"{self.where}/{name} has fewer than {len(out)} bytes at offset {offset}")
        out[:] = data

    def write(self, name: str, parts: Iterator[bytes]) -> None:
        """Write one object, uploaded in blocks; it is visible once it is complete."""
        try:
            with self._files.open(f"{self._path}/{name}", "wb", block_size=BLOCK_BYTES) as file:
                for part in parts:
                    self._pace(len(part))
                    file.write(part)
        except OSError as e:
            raise self._error(f"written ({name})", e) from e

    def remove(self, name: str) -> None:
        """Remove one object, if it exists."""
        try:
            self._files.rm_file(f"{self._path}/{name}")
        except FileNotFoundError:
            return
        except OSError as e:
            raise self._error(f"deleted ({name})", e) from e

    def checkpoints_below(self, name: str) -> "ObjectStore":
        return ObjectStore(self._files, f"{self._path}/{name}", f"{self.where}/{name}", self._pace)

    def _error(self, operation: str, e: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.where} cannot be {operation}: {e}", "check the network and your access, then run it again"
        )


def store(location: str | Path, follow_links: bool = False) -> "FolderStore | ObjectStore":
    """Return the store that a path or URI names. Raises UserError for an unknown scheme or a missing library.

    Credentials come from the environment, as each library reads them; they are never part of a URI.
    """
    text = str(location)
    if isinstance(location, Path) or not checkpoint_location.is_uri(text):
        return FolderStore(Path(text).expanduser(), follow_links)
    uri = checkpoint_location.parse_uri(text, "place", IN_MEMORY)
    path = f"/{uri.path}" if uri.scheme in IN_MEMORY else uri.path
    return ObjectStore(_filesystem(uri.scheme), path, str(uri), store_pace())


def _filesystem(scheme: str) -> Any:
    import fsspec

    try:
        return fsspec.filesystem(scheme)
    except ImportError:
        raise UserError(
            f"{scheme}:// needs the package {OBJECT_STORES[scheme]}", f"run pip install {OBJECT_STORES[scheme]}"
        ) from None
    except OSError as e:
        raise CheckpointError(f"{scheme}:// cannot be reached: {e}", "check the network and your access") from e


def newest_checkpoint(folder: "FolderStore | ObjectStore") -> tuple["FolderStore | ObjectStore", str]:
    """Return the checkpoint at a location, or the newest committed one below it, with its name."""
    if folder.exists(NAME):
        return folder, PurePosixPath(folder.where).name
    steps = [name for name in folder.names() if FOLDER.fullmatch(name) and folder.checkpoints_below(name).exists(NAME)]
    if not steps:
        raise NotFound(f"no checkpoint at {folder.where}", "name a step-… folder, or a folder that contains some")
    newest = max(steps, key=lambda name: (int(name.split("-")[1]), name))
    return folder.checkpoints_below(newest), newest


def manifest_text(folder: "FolderStore | ObjectStore") -> bytes:
    """Return the bytes of MANIFEST.json as stored."""
    size_bytes = folder.size_bytes(NAME)
    if size_bytes > MAX_MANIFEST_BYTES:
        raise DamagedCheckpoint(
            f"{folder.where}/{NAME} has {size_bytes} bytes, a manifest has at most {MAX_MANIFEST_BYTES}"
        )
    text = memoryview(bytearray(size_bytes))
    folder.read(NAME, 0, text)
    return bytes(text)
