"""Data of jobs from an object store into a folder of this machine, in a process of its own (workers.checkpoint.tools).

What a store lists is a stranger's: names are checked before any is used as a path.
"""

import hashlib
import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cluster.checkpoint_location import path_error
from cluster.content_hash import MOST_FILES
from cluster.errors import FleetError, NotFound, UserError
from workers.checkpoint.transfer.stores import ObjectStore, store

READ_BYTES = 8 << 20
THREADS = 4
PART = ".part"
VERSION = ("ETag", "etag", "md5Hash", "generation", "version_id", "LastModified", "last_modified", "created", "mtime")
"""What stores tell of an object that changes with it; fsspec hands on each store's own words."""
Progress = Callable[[int, int], None]
Listing = list[tuple[str, str, int, str]]


def look(source: str) -> dict[str, Any]:
    """{"bytes", "files", "version": changes with any object at or below `source`}"""
    listing = _listing(_objects(source))
    told = "\n".join(f"{name} {size_bytes} {version}" for name, _, size_bytes, version in listing)
    version = hashlib.sha256(told.encode()).hexdigest()
    return {"bytes": sum(size for _, _, size, _ in listing), "files": len(listing), "version": version}


def fetch(source: str, target: str, version: str, progress: Progress | None = None) -> dict[str, Any]:
    """Fetch what is at or below `source` into the folder `target`, which may hold what an earlier try has brought:
    {"inner"}, the name of a single object in it, else "". Raises FleetError where it is not of that `version` any more.
    """
    objects, folder = _objects(source), Path(target)
    listing = _listing(objects)
    if look(source)["version"] != version:
        raise FleetError(f"{source} has changed since it was listed", "it is fetched again")
    _remove_others(folder, {name for name, *_ in listing})
    done, total = 0, sum(size for _, _, size, _ in listing)
    with ThreadPoolExecutor(THREADS, "fetch") as pool:
        for size_bytes in pool.map(lambda one: _fetch_one(objects, folder, *one[:3]), listing):
            done += size_bytes
            if progress is not None:
                progress(done, total)
    if look(source)["version"] != version:
        raise FleetError(f"{source} changed while it was fetched", "it is fetched again")
    return {"inner": listing[0][0] if listing[0][1] == objects.path else ""}


def _objects(source: str) -> ObjectStore:
    found = store(source)
    if not isinstance(found, ObjectStore):
        raise UserError(f"{source[:200]!r} is not in an object store", "write s3://BUCKET/PREFIX")
    return found


def _listing(objects: ObjectStore) -> Listing:
    """(path below the target, object, bytes, version) of each object, in order. Raises NotFound, UserError."""
    found = sorted(_found(objects))
    if len(found) > MOST_FILES:
        raise UserError(f"{objects.where} has more than {MOST_FILES:,} objects", "pack them into fewer")
    if not found:
        raise NotFound(f"nothing is at {objects.where}", "look at bucket and prefix, and at your access to them")
    paths = {name for name, *_ in found}
    for name in paths:
        above = name.rpartition("/")[0]
        while above:
            if above in paths:
                raise UserError(f"{objects.where} has {above!r} as an object and as a folder", "rename one of them")
            above = above.rpartition("/")[0]
    return found


def _found(objects: ObjectStore) -> Iterator[tuple[str, str, int, str]]:
    for path, told in objects.find():
        inside = path[len(objects.path) :].strip("/") if path != objects.path else path.rpartition("/")[2]
        if path.endswith("/") and not told.get("size"):
            continue  # stores' own way to show an empty folder
        if refusal := path_error(inside):
            raise UserError(f"{objects.where} has an object {inside[:200]!r}: {refusal}", "rename it")
        version = next((str(told[word]) for word in VERSION if told.get(word)), "")
        yield inside, path, int(told["size"]), version


def _fetch_one(objects: ObjectStore, folder: Path, name: str, path: str, size_bytes: int) -> int:
    """Whole, or only as a part that is begun anew."""
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
    """Of an earlier try, what is not among `names`."""
    for path in folder.rglob("*"):
        if not path.is_dir() and str(path.relative_to(folder)) not in names:
            path.unlink()
