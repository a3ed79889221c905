"""The index of files that were uploaded to an object store, and the folders there (stored_files.py)."""

import json
import math
import re
from collections import defaultdict
from contextlib import suppress
from typing import Any

from cluster.errors import FleetError, NotFound
from cluster.input.checkpoint_location import path_error
from cluster.input.folder_access import PIECE_BYTES
from cluster.input.folder_entries import EntryFields, link_error
from workers.checkpoint.transfer.stores import ObjectStore

INDEX = "FILES.json"
FOLDER = re.compile(r"output-([0-9]{1,12})/([^/]+)", re.ASCII)
HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
MAX_INDEX_BYTES = 1 << 30


class StoredFile(EntryFields):
    """An entry of the index. `pieces` are the names of the objects with its bytes."""

    pieces: list[str]


def folder_name(epoch: int, node: str) -> str:
    return f"output-{epoch}/{node}"


def object_sizes(objects: ObjectStore) -> dict[str, int]:
    """Bytes of each object below here, by its path relative to here."""
    prefix, sizes = f"{objects.path}/", dict[str, int]()
    with suppress(NotFound):  # nothing was uploaded yet
        for path, properties in objects.find():
            if path.startswith(prefix):
                sizes[path.removeprefix(prefix)] = int(properties.get("size") or 0)
    return sizes


def stored_folders(job: ObjectStore) -> list[tuple[int, str, list[str]]]:
    """(attempt, node, names of its objects) of each folder of a job, complete or not."""
    names = defaultdict[str, list[str]](list)
    for path in object_sizes(job):
        folder, _, name = path.rpartition("/")
        names[folder].append(name)
    matches = [(FOLDER.fullmatch(folder), objects) for folder, objects in names.items()]
    return [(int(match[1]), match[2], objects) for match, objects in matches if match]


def remove_folders(job: ObjectStore, epoch: int) -> None:
    """Remove the folders of attempts up to `epoch`, each index first, so that none is read half."""
    for number, node, names in stored_folders(job):
        if number <= epoch:
            objects = job.checkpoints_below(folder_name(number, node))
            for name in sorted(names, key=lambda name: name != INDEX):
                objects.remove(name)


def parse_index(objects: ObjectStore) -> tuple[list[StoredFile], str]:
    """Read the index: its files, and a sentence on what the upload left out. Raises FleetError if it is not valid."""
    size_bytes = objects.size_bytes(INDEX)
    text = bytearray(min(size_bytes, MAX_INDEX_BYTES))
    objects.read(INDEX, 0, memoryview(text))
    try:
        content = json.loads(bytes(text))
        files = [_parse_file(entry) for entry in content["entries"]]
        paths = {file["path"] for file in files}
        if len(paths) < len(files):
            raise ValueError("a path occurs twice")
        return files, str(content["refused"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
        raise FleetError(f"{objects.where}/{INDEX} is not an index of files: {e}", "the files are lost") from None


def _parse_file(entry: dict[str, Any]) -> StoredFile:
    file: StoredFile = {
        "path": str(entry["path"]),
        "type": str(entry["type"]),
        "bytes": int(entry["bytes"]),
        "modified_s": float(entry["modified_s"]),
        "mode": int(entry["mode"]) & 0o777,
        "target": str(entry["target"]),
        "pieces": [str(name) for name in entry["pieces"]],
    }
    if fault := _fault(file):
        raise ValueError(f"{file['path'][:200]!r}: {fault}")
    return file


def _fault(file: StoredFile) -> str:
    if fault := path_error(file["path"]):
        return fault
    if file["type"] == "link":
        return link_error(file["path"], file["target"])
    if file["type"] not in ("file", "folder"):
        return f"its type is {file['type'][:40]!r}"
    count = -(-file["bytes"] // PIECE_BYTES) if file["type"] == "file" else 0
    if file["bytes"] < 0 or len(file["pieces"]) != count or not all(map(HASH.fullmatch, file["pieces"])):
        return f"it has {len(file['pieces'])} pieces for {file['bytes']} bytes"
    return "" if math.isfinite(file["modified_s"]) else "its time is not a number"
