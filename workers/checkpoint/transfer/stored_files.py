"""Upload the files of a job's attempt below a prefix of an object store, and download them, in a child process.

    JOB/output-N/NODE/HASH          a piece of a file, at most 8 MiB, by the SHA-256 of its bytes
    JOB/output-N/NODE/FILES.json    the index, written last; an object that it does not list is not part of the files

An interrupted upload continues with the pieces that are missing. What the folder and the index contain is untrusted.
"""

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cluster.errors import FleetError
from cluster.input.folder_access import PIECE_BYTES, FolderTree, digest
from cluster.input.folder_entries import FolderEntry
from workers.checkpoint.format.manifest import DamagedCheckpoint
from workers.checkpoint.transfer.object_store import open_objects
from workers.checkpoint.transfer.stored_file_index import (
    INDEX,
    StoredFile,
    folder_name,
    object_sizes,
    parse_index,
    remove_folders,
    stored_folders,
)
from workers.checkpoint.transfer.stores import ObjectStore

THREADS = 4
Progress = Callable[[int, int], None]


def stored_files(uri: str) -> list[dict[str, Any]]:
    """List the complete folders of the job at `uri`: [{"epoch", "node"}]. Raises FleetError, UserError."""
    return [
        {"epoch": epoch, "node": node} for epoch, node, names in stored_folders(open_objects(uri)) if INDEX in names
    ]


def put_files(
    uri: str, epoch: int, node: str, root: str, base: str, progress: Progress | None = None
) -> dict[str, Any]:
    """Upload the folder `base` below `root` as that of attempt `epoch`; then remove what older attempts left there.

    Returns {"bytes", "refused": a sentence on entries that were left out, or ""}. Raises FleetError if a file changes
    during the upload.
    """
    job = open_objects(uri)
    objects, tree = job.checkpoints_below(folder_name(epoch, node)), FolderTree(Path(root), base)
    entries = list(tree.all_entries())
    accepted = [entry for entry in entries if not entry["refused"]]
    upload = _Upload(tree, objects, sum(entry["bytes"] for entry in accepted), progress)
    with ThreadPoolExecutor(THREADS, "upload") as pool:
        files = list(pool.map(upload.put, accepted))
    refused = _refused_sentence([entry for entry in entries if entry["refused"]])
    text = json.dumps({"entries": files, "refused": refused}).encode()
    objects.write(INDEX, iter([text]))
    for name in object_sizes(objects).keys() - {INDEX, *(name for file in files for name in file["pieces"])}:
        objects.remove(name)
    remove_folders(job, epoch - 1)
    return {"bytes": upload.total_bytes, "refused": refused}


def _refused_sentence(refused: list[FolderEntry]) -> str:
    if not refused:
        return ""
    first = refused[0]
    return f"{len(refused)} of its files were not uploaded, such as {first['path']!r}: {first['refused']}"


class _Counter:
    def __init__(self, total_bytes: int, progress: Progress | None):
        self.total_bytes, self._progress, self._done_bytes = total_bytes, progress, 0
        self._lock = threading.Lock()

    def add(self, done_bytes: int) -> None:
        with self._lock:
            self._done_bytes += done_bytes
            if self._progress is not None:
                self._progress(self._done_bytes, self.total_bytes)


class _Upload(_Counter):
    """Uploads the pieces of files that are not in the store yet."""

    def __init__(self, tree: FolderTree, objects: ObjectStore, total_bytes: int, progress: Progress | None):
        super().__init__(total_bytes, progress)
        self._tree, self._objects, self._sizes = tree, objects, object_sizes(objects)

    def put(self, entry: FolderEntry) -> StoredFile:
        names = self._put_pieces(entry) if entry["type"] == "file" else []
        return {
            "path": entry["path"],
            "type": entry["type"],
            "bytes": entry["bytes"],
            "modified_s": entry["modified_s"],
            "mode": entry["mode"],
            "target": entry["target"],
            "pieces": names,
        }

    def _put_pieces(self, entry: FolderEntry) -> list[str]:
        names, versions = list[str](), set[str]()
        for offset in range(0, entry["bytes"], PIECE_BYTES):
            piece = self._tree.read(entry["path"], offset)
            versions.add(piece.version)
            if piece.size_bytes != entry["bytes"] or len(versions) > 1:
                raise FleetError(f"{entry['path']!r} changed while it was uploaded", "nothing to do: it is tried again")
            name = digest(piece.data)
            if self._sizes.get(name) != len(piece.data):
                self._objects.write(name, iter([piece.data]))
                self._sizes[name] = len(piece.data)
            names.append(name)
            self.add(len(piece.data))
        return names


def fetch_files(
    uri: str, epoch: int, node: str, root: str, base: str, progress: Progress | None = None
) -> dict[str, Any]:
    """Download a folder that was uploaded into `base` below `root`, which may contain files of an earlier try.

    Returns {"refused": what the upload left out}. Raises FleetError for what is not as it was uploaded.
    """
    objects, tree = open_objects(uri).checkpoints_below(folder_name(epoch, node)), FolderTree(Path(root), base)
    files, refused = parse_index(objects)
    contents = [file for file in files if file["type"] == "file"]
    tree.create_folder()
    _remove_others(tree, {file["path"]: file for file in files})
    download = _Download(tree, objects, sum(file["bytes"] for file in contents), progress)
    with ThreadPoolExecutor(THREADS, "download") as pool:
        list(pool.map(download.fetch, contents))
    for file in files:
        if file["type"] == "folder":
            tree.create_folder(file["path"])
        elif file["type"] == "link" and not tree.exists(file["path"]):
            tree.link(file["path"], file["target"])
    return {"refused": refused}


def _remove_others(tree: FolderTree, files: Mapping[str, StoredFile]) -> None:
    """Remove what an earlier try downloaded that is not in the index now, or is another kind of entry there."""
    for entry in list(tree.all_entries()):
        file = files.get(entry["path"])
        is_equal = file is not None and (file["type"], file["target"]) == (entry["type"], entry["target"])
        if not is_equal and entry["type"] != "folder":
            tree.remove(entry["path"])


class _Download(_Counter):
    """Downloads the pieces of files that are not here yet, and checks each by its hash."""

    def __init__(self, tree: FolderTree, objects: ObjectStore, total_bytes: int, progress: Progress | None):
        super().__init__(total_bytes, progress)
        self._tree, self._objects = tree, objects

    def fetch(self, file: StoredFile) -> None:
        path = file["path"]
        existing = dict(enumerate(self._tree.hashes(path)[1])) if self._tree.exists(path) else {}
        for index, name in enumerate(file["pieces"]):
            offset = index * PIECE_BYTES
            length = min(PIECE_BYTES, file["bytes"] - offset)
            if existing.get(index) != name:
                self._tree.write(path, offset, self._read(path, name, length))
            self.add(length)
        if not file["pieces"]:
            self._tree.write(path, 0, b"")
        self._tree.finish(path, file["bytes"], file["modified_s"], file["mode"])

    def _read(self, path: str, name: str, length: int) -> memoryview:
        data = memoryview(bytearray(length))
        reason = "its bytes differ from those that were uploaded"
        try:
            self._objects.read(name, 0, data)
            if digest(data) == name:
                return data
        except DamagedCheckpoint as e:
            reason = e.message
        raise FleetError(
            f"{path!r} in {self._objects.where} is damaged: {reason}",
            "restart the node that wrote it, if it still exists; else the files are lost",
        )


def remove_stored_files(uri: str, epochs: Mapping[str, int]) -> None:
    """Remove the folders of attempts up to `epochs[job]` of each job below `uri`. Raises FleetError, UserError."""
    root = open_objects(uri)
    for job, epoch in epochs.items():
        remove_folders(root.checkpoints_below(job), epoch)
