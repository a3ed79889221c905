"""Where checkpoints can lie: folders of this machine, and object stores through fsspec. Both are asked the same few
things; nothing else is used, so that any store will do.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from cluster import checkpoint_location
from cluster.errors import FleetError, NotFound, PolyfleetError, UserError
from workers.checkpoint.disk.reader import read_at
from workers.checkpoint.format import links
from workers.checkpoint.format.manifest import FOLDER, LARGEST_BYTES, NAME, DamagedCheckpoint
from workers.checkpoint.format.manifest_checks import open_regular
from workers.errors import CheckpointError

OBJECT_STORES = {
    "s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "memory": "fsspec",
}  # fmt: skip
IN_MEMORY: tuple[str, ...] = ()
"""Schemes of stores that end with their process: only tests have one, nobody may name it."""
BLOCK_BYTES = 16 << 20


class CheckpointStore(Protocol):
    """One folder of checkpoints, or one checkpoint in it: names are relative to `where`, with `/`."""

    where: str

    def names(self) -> list[str]:
        """What lies directly below; [] where nothing does."""

    def exists(self, name: str) -> bool: ...

    def size_bytes(self, name: str) -> int:
        """Raises DamagedCheckpoint where there is no such file."""

    def read(self, name: str, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on. Raises DamagedCheckpoint."""

    def below(self, name: str) -> "CheckpointStore": ...


class FolderStore:
    """A folder of this machine. `follow`: links in it, too; else one to a checkpoint elsewhere is not listed."""

    def __init__(self, path: Path, follow: bool = False):
        self.path, self.where, self._follow = path, str(path), follow or links.are_followed()

    def names(self) -> list[str]:
        there = self.path.iterdir() if self.path.is_dir() else ()
        return sorted(p.name for p in there if self._follow or not p.is_symlink())

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

    def below(self, name: str) -> "FolderStore":
        return FolderStore(self.path / name, self._follow)


class ObjectStore:
    """A prefix in an object store. Objects are written once, whole, under names that are never used again."""

    def __init__(self, files: Any, path: str, where: str):
        self._files, self._path, self.where = files, path.rstrip("/"), where

    @property
    def path(self) -> str:
        """As the store's library writes it."""
        return self._path

    def find(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every object at or below here: its path, and what the store tells of it. Raises UserError, FleetError."""
        with self._asked("listed"):
            self._files.invalidate_cache()
            found = self._files.find(self._path, detail=True)
        yield from found.items()

    def pieces(self, path: str, size_bytes: int, most_bytes: int) -> Iterator[bytes]:
        """All of an object, piece by piece. Raises FleetError where it has another size."""
        for offset in range(0, size_bytes, most_bytes):
            end = min(offset + most_bytes, size_bytes)
            with self._asked("read"):
                piece = bytes(self._files.cat_file(path, start=offset, end=end))
            if len(piece) != end - offset:
                raise FleetError(f"{self.where} has changed while it was read", "it is fetched again")
            yield piece

    @contextmanager
    def _asked(self, what: str) -> Iterator[None]:
        """Errors of every store's library as ours: what its user has to put right, or trouble that may pass."""
        try:
            yield
        except PolyfleetError:
            raise
        except FileNotFoundError:
            raise NotFound(f"nothing is at {self.where}", "look at bucket and prefix") from None
        except PermissionError as e:
            raise UserError(f"{self.where} may not be {what}: {e}", "look at the credentials in the environment") from e
        except Exception as e:  # their libraries raise what they like
            told = f"{self.where} cannot be {what}: {type(e).__name__}: {e}"
            raise FleetError(told[:1000], "check the network and the credentials in the environment") from e

    def names(self) -> list[str]:
        try:
            found = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        except OSError as e:
            raise self._failed("listed", e) from e
        return sorted(PurePosixPath(name.rstrip("/")).name for name in found)

    def exists(self, name: str) -> bool:
        return bool(self._files.exists(f"{self._path}/{name}"))

    def size_bytes(self, name: str) -> int:
        try:
            return int(self._files.size(f"{self._path}/{name}"))
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{self.where}/{name} is not there") from None

    def read(self, name: str, offset: int, out: memoryview) -> None:
        try:
            data = self._files.cat_file(f"{self._path}/{name}", start=offset, end=offset + len(out))
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{self.where}/{name} is not there") from None
        except OSError as e:
            raise self._failed(f"read ({name})", e) from e
        if len(data) != len(out):
            raise DamagedCheckpoint(f"{self.where}/{name} has no {len(out)} bytes from {offset} on")
        out[:] = data

    def write(self, name: str, parts: Iterator[bytes]) -> None:
        """One object, uploaded in blocks; it appears when all of it is there."""
        try:
            with self._files.open(f"{self._path}/{name}", "wb", block_size=BLOCK_BYTES) as file:
                for part in parts:
                    file.write(part)
        except OSError as e:
            raise self._failed(f"written ({name})", e) from e

    def remove(self, name: str) -> None:
        self._files.rm_file(f"{self._path}/{name}")

    def below(self, name: str) -> "ObjectStore":
        return ObjectStore(self._files, f"{self._path}/{name}", f"{self.where}/{name}")

    def _failed(self, what: str, e: OSError) -> CheckpointError:
        return CheckpointError(f"{self.where} cannot be {what}: {e}", "check the network and your access, then go on")


def store(place: str | Path, follow_links: bool = False) -> "FolderStore | ObjectStore":
    """The store a path or URI names. Raises UserError for a scheme that is not on the list, or whose library is absent.

    Credentials come from the environment, as each library has it; they are never part of a URI of ours.
    """
    text = str(place)
    if isinstance(place, Path) or not checkpoint_location.is_uri(text):
        return FolderStore(Path(text).expanduser(), follow_links)
    found = checkpoint_location.parse_uri(text, "place", IN_MEMORY)
    path = f"/{found.path}" if found.scheme in IN_MEMORY else found.path
    return ObjectStore(_filesystem(found.scheme), path, str(found))


def _filesystem(scheme: str) -> Any:
    import fsspec

    try:
        return fsspec.filesystem(scheme)
    except ImportError:
        raise UserError(
            f"{scheme}:// needs the package {OBJECT_STORES[scheme]}", f"pip install {OBJECT_STORES[scheme]}"
        ) from None
    except OSError as e:
        raise CheckpointError(f"{scheme}:// cannot be reached: {e}", "check the network and your access") from e


def newest_checkpoint(place: "FolderStore | ObjectStore") -> tuple["FolderStore | ObjectStore", str]:
    """The checkpoint at a place, and its name; of a folder of checkpoints the newest that was committed."""
    if place.exists(NAME):
        return place, PurePosixPath(place.where).name
    steps = [name for name in place.names() if FOLDER.fullmatch(name) and place.below(name).exists(NAME)]
    if not steps:
        raise NotFound(f"no checkpoint at {place.where}", "name a folder step-…, or one that holds some")
    newest = max(steps, key=lambda name: (int(name.split("-")[1]), name))
    return place.below(newest), newest


def manifest_text(place: "FolderStore | ObjectStore") -> bytes:
    """MANIFEST.json as it lies there."""
    size_bytes = place.size_bytes(NAME)
    if size_bytes > LARGEST_BYTES:
        raise DamagedCheckpoint(f"{place.where}/{NAME} has {size_bytes} bytes, a manifest has at most {LARGEST_BYTES}")
    text = memoryview(bytearray(size_bytes))
    place.read(NAME, 0, text)
    return bytes(text)
