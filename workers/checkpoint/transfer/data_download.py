"""Download a job's data from an object store, in a child process (workers.checkpoint.tools).

Names in a store are untrusted: they are checked before any is used as a path.
"""

import hashlib
import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cluster.errors import FleetError, NotFound, UserError
from cluster.host.content_hash import MAX_FILES
from cluster.input.checkpoint_location import path_error
from workers.checkpoint.transfer.stores import ObjectStore, store

READ_BYTES = 8 << 20
THREADS = 4
PART = ".part"
VERSION = ("ETag", "etag", "md5Hash", "generation", "version_id", "LastModified", "last_modified", "created", "mtime")
"""Fields that change with an object; fsspec passes on each store's own names."""
Progress = Callable[[int, int], None]
Listing = list[tuple[str, str, int, str]]


def look(source: str) -> dict[str, Any]:
    """Describe the data: {"bytes", "files", "version"}; `version` changes with any object at or below `source`."""
    listing = _listing(_open_objects(source))
    text = "\n".join(f"{name} {size_bytes} {version}" for name, _, size_bytes, version in listing)
    version = hashlib.sha256(text.encode()).hexdigest()
    return {"bytes": sum(size for _, _, size, _ in listing), "files": len(listing), "version": version}


def fetch(source: str, target: str, version: str, progress: Progress | None = None) -> dict[str, Any]:
    """Download what is at or below `source` into `target`, which may contain files of an earlier try.
    Returns {"inner"}: the name of a single object in it, else "". Raises FleetError if the data is no longer of that
    `version`.
    """
    objects, folder = _open_objects(source), Path(target)
    listing = _listing(objects)
    if look(source)["version"] != version:
        raise FleetError(f"{source} has changed since it was listed", "nothing to do: it is downloaded again")
    _remove_others(folder, {name for name, *_ in listing})
    done, total = 0, sum(size for _, _, size, _ in listing)
    with ThreadPoolExecutor(THREADS, "fetch") as pool:
        for size_bytes in pool.map(lambda row: _fetch_one(objects, folder, *row[:3]), listing):
            done += size_bytes
            if progress is not None:
                progress(done, total)
    if look(source)["version"] != version:
        raise FleetError(f"{source} changed while it was downloaded", "nothing to do: it is downloaded again")
    return {"inner": listing[0][0] if listing[0][1] == objects.path else ""}


def _open_objects(source: str) -> ObjectStore:
    objects = store(source)
    if not isinstance(objects, ObjectStore):
        raise UserError(f"{source[:200]!r} is not in an object store", "write s3://BUCKET/PREFIX")
    return objects


def _listing(objects: ObjectStore) -> Listing:
    """List each object as (path below the target, object, bytes, version), in order. Raises NotFound, UserError."""
    listing = sorted(_list_objects(objects))
    if len(listing) > MAX_FILES:
        raise UserError(f"{objects.where} has more than {MAX_FILES:,} objects", "pack them into fewer objects")
    if not listing:
        raise NotFound(f"nothing is at {objects.where}", "check bucket and prefix, and your access to them")
    paths = {name for name, *_ in listing}
    for name in paths:
        parent = name.rpartition("/")[0]
        while parent:
            if parent in paths:
                raise UserError(f"{objects.where} has both an object and a folder {parent!r}", "rename one of them")
            parent = parent.rpartition("/")[0]
    return listing


def _list_objects(objects: ObjectStore) -> Iterator[tuple[str, str, int, str]]:
    for path, info in objects.find():
        name = path[len(objects.path) :].strip("/") if path != objects.path else path.rpartition("/")[2]
        if path.endswith("/") and not info.get("size"):
            continue  # a placeholder with which stores represent an empty folder
        if fault := path_error(name):
            raise UserError(f"{objects.where} has an object {name[:200]!r}: {fault}", "rename it")
        version = next((str(info[key]) for key in VERSION if info.get(key)), "")
        yield name, path, int(info["size"]), version


def _fetch_one(objects: ObjectStore, folder: Path, name: str, path: str, size_bytes: int) -> int:
    """Download one object under a temporary name, then rename it; an interrupted download starts again."""
    target = folder / name
    if target.is_file() and target.stat().st_size == size_bytes:
        return size_bytes
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = folder / f"{uuid.uuid4().hex}{PART}"
    try:
        with part.open("wb") as file:
            for piece in objects.pieces(path, size_bytes, READ_BYTES):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except OSError as e:
        part.unlink(missing_ok=True)
        raise FleetError(f"{name!r} of {objects.where} cannot be written: {e.strerror or e}", "free space there") from e
    return size_bytes


def _remove_others(folder: Path, names: set[str]) -> None:
    """Remove files of an earlier try that are not among `names`."""
    for path in folder.rglob("*"):
        if not path.is_dir() and str(path.relative_to(folder)) not in names:
            path.unlink()
