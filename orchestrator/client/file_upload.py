"""Upload files of this machine to a job's folder, or to a node that imports them."""

import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import Conflict, NotFound, UserError
from cluster.input.folder_access import PIECE_BYTES, FolderTree, digest, digest_of, normalize_path
from cluster.input.folder_entries import FolderEntry
from orchestrator.client.file_transfer import (
    Progress,
    ProgressCounter,
    TransferResult,
    folder_arguments,
    list_all_files,
    retry_unreachable,
    run_parallel,
    transfer_files,
)

if TYPE_CHECKING:
    from orchestrator.client.client import Client

Data = dict[str, Any]
MAX_FILES_PER_PUT = 500
EMPTY_HASH = digest(b"")
"""Hash of an empty piece; it does not count as a piece, since an empty file has none."""


def put(
    client: "Client", source: str, ref: str, path: str = "", force: bool = False, progress: Progress | None = None
) -> TransferResult:
    """Upload a file or a folder; the reverse of `get`. Raises Conflict for a file that exists while the job runs, or,
    unless `force` is set, that differs.
    """
    local = Path(source).expanduser()
    if not os.path.lexists(local):
        raise NotFound(f"no {source!r} on this machine", "name a file or a folder")
    return retry_unreachable(client, lambda: _Upload(client, local, ref, path, force).run(progress))


class _Upload:
    def __init__(self, client: "Client", local: Path, ref: str, path: str, force: bool):
        self._client, self._force = client, force
        single = not local.is_dir()
        root = local.parent if single else local
        self._tree, self._name = FolderTree(root, follow=True), local.name if single else ""
        if single and not local.is_file():
            raise UserError(f"{local} is not a regular file", "name a file or a folder")
        self._job = client.jobs.show(ref)["id"]
        is_into_folder = path.endswith("/") or (single and self._is_folder(path))
        if single:
            self._path = (
                normalize_path(f"{path or '.'}/{local.name}") if is_into_folder or not path else normalize_path(path)
            )
        else:
            self._path = normalize_path(path) or local.resolve().name
        self._destination = client.files.destination(self._job, path=self._path)
        identity = f"{socket.gethostname()}\n{local.resolve()}\n{self._job}\n{self._path}"
        self._upload = hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:24]
        self._result = TransferResult(self._job, f"{self._job}:{self._path}")

    def _is_folder(self, path: str) -> bool:
        try:
            entries = self._client.files.list(self._job, path=normalize_path(path))["entries"]
        except NotFound:
            return False
        return (
            not path or [entry["path"] for entry in entries] != [normalize_path(path)] or entries[0]["type"] == "folder"
        )

    def run(self, progress: Progress | None) -> TransferResult:
        """Check all files for conflicts, send them, then move them to their final paths."""
        files = [entry for entry in self._tree.all_entries(self._name) if self._is_included(entry)]
        existing = self._remote_entries()
        new = [entry for entry in files if not self._is_there(entry, existing)]
        counter = ProgressCounter(sum(entry["bytes"] for entry in files), progress)
        sent_bytes_by_path = self._client.files.begin_upload(self._upload, self._destination["node"])["there"]
        transfer_files(lambda entry: self._send(entry, sent_bytes_by_path.get(entry["path"], 0), counter), new)
        self._move_to_targets(new)
        sent_now = {entry["path"] for entry in new}
        counter.add(sum(entry["bytes"] for entry in files if entry["path"] not in sent_now), False)
        self._result.files = [self._remote_path(entry) for entry in files]
        self._result.bytes = sum(entry["bytes"] for entry in files)
        self._result.transferred_bytes = counter.transferred
        return self._result

    def _is_included(self, entry: FolderEntry) -> bool:
        reason = entry["refused"] or ("links are not sent" if entry["type"] == "link" else "")
        if reason:
            self._result.notes.append(f"{entry['path']} is left out: {reason}")
        return not reason and entry["type"] == "file"

    def _remote_path(self, entry: FolderEntry) -> str:
        inside: str = self._destination["path"]
        return inside if self._name else f"{inside}/{entry['path']}"

    def _remote_entries(self) -> dict[str, FolderEntry]:
        """Existing entries of the job's folder at the target path, by path."""
        try:
            listing = list_all_files(self._client, self._job, self._path)
        except NotFound:
            return {}
        prefix = self._path.removesuffix(self._destination["path"])
        return {entry["path"].removeprefix(prefix): entry for entry in listing["entries"]}

    def _is_there(self, entry: FolderEntry, existing: dict[str, FolderEntry]) -> bool:
        """Return whether the job has the same file. Raises Conflict if it has another that must not be overwritten."""
        remote = self._remote_path(entry)
        if (entry_there := existing.get(remote)) is None:
            return False
        if entry_there["type"] == "file" and entry_there["bytes"] == entry["bytes"] and self._is_same(entry, remote):
            return True
        if self._destination["running"]:
            message = f"{remote!r} is a file of a running job, which may be using it; nothing was written"
            raise Conflict(message, "choose another name, or wait until the job has ended")
        if entry_there["type"] != "file" or not self._force:
            remedy = "add --force to overwrite it" if entry_there["type"] == "file" else "choose another destination"
            raise Conflict(f"{self._job}:{remote} already exists and differs; nothing was written", remedy)
        return False

    def _is_same(self, entry: FolderEntry, remote: str) -> bool:
        local_hashes, first = self._tree.hashes(entry["path"])[1], 0
        while first < len(local_hashes):
            folder = folder_arguments(self._destination)
            remote_hashes = self._client.files.hashes(self._job, remote, first=first, **folder)["sha256"]
            if not remote_hashes or remote_hashes != local_hashes[first : first + len(remote_hashes)]:
                return False
            first += len(remote_hashes)
        return True

    def _send(self, entry: FolderEntry, sent_bytes: int, counter: ProgressCounter) -> None:
        path, node = entry["path"], self._destination["node"]
        same = _matching_pieces(self._client, node, self._upload, self._tree, path, sent_bytes)
        send_file(self._client, node, self._upload, self._tree, path, same, counter.add)

    def _move_to_targets(self, files: list[FolderEntry]) -> None:
        names = [{"uploaded": entry["path"], "path": self._remote_path(entry)} for entry in files]
        for first in range(0, len(names), MAX_FILES_PER_PUT):
            batch = names[first : first + MAX_FILES_PER_PUT]
            folder = folder_arguments(self._destination)
            self._client.files.put(self._job, self._upload, batch, force=self._force, **folder)
        self._client.files.discard_upload(self._upload, self._destination["node"])


def _matching_pieces(
    client: "Client", node: str, upload: str, tree: FolderTree, path: str, sent_bytes: int
) -> set[int]:
    """Indexes of the pieces of a file that an earlier try has sent."""
    same: set[int] = set()
    first, piece_count = 0, sent_bytes // PIECE_BYTES
    while first < piece_count:
        remote_hashes = client.files.upload_hashes(upload, node, path, first=first)["sha256"]
        local_hashes = tree.hashes(path, first, len(remote_hashes))[1]
        same |= {
            i for i, (one, other) in enumerate(zip(remote_hashes, local_hashes, strict=False), first) if one == other
        }
        first += max(len(remote_hashes), 1)
    return same


def send_file(
    client: "Client",
    node: str,
    upload: str,
    tree: FolderTree,
    path: str,
    same: set[int],
    on_progress: Callable[[int, bool], None],
) -> None:
    """Send one file to an upload, except for its pieces in `same`. Raises UserError if it changes while it is sent."""
    first, hashes = tree.read(path, 0), dict[int, str]()
    offsets = list(range(0, max(first.size_bytes, 1), PIECE_BYTES))

    def send(offset: int) -> None:
        piece, last = tree.read(path, offset), offset == offsets[-1]
        if piece.version != first.version:
            raise UserError(
                f"{tree.root / path} changed while it was sent", "send it again when no process writes to it"
            )
        hashes[offset] = digest(piece.data)
        attributes: Data = {
            "size_bytes": piece.size_bytes,
            "modified_s": max(piece.modified_s, 0.0),
            "mode": piece.mode,
        }
        if last:
            attributes["pieces_sha256"] = digest_of([hashes[at] for at in offsets if hashes[at] != EMPTY_HASH])
        if is_sent := last or offset // PIECE_BYTES not in same:
            end = attributes if last else {}
            client.files.send_piece(upload, node, path, hashes[offset], piece.data, offset=offset, **end)
        on_progress(len(piece.data), is_sent)

    run_parallel(send, offsets[:-1])
    send(offsets[-1])  # last, because it completes the file


def send_folder(client: "Client", node: str, upload: str, local: Path, progress: Progress | None) -> int:
    """Send all files of `local` (a file or a folder) to an upload; return the bytes sent. Links to files are sent as
    the files; any other link is refused, since the upload would be incomplete.
    """
    single = not local.is_dir()
    tree = FolderTree(local.parent if single else local, follow=True)
    entries = [entry for entry in tree.all_entries(local.name if single else "") if entry["type"] != "folder"]
    for entry in entries:
        if entry["type"] != "file" or entry["refused"]:
            link = f"it is a link to {entry['target']}, which is not a file that can be read"
            reason = link if entry["type"] == "link" else entry["refused"] or f"it is a {entry['type']}"
            raise UserError(f"{tree.root / entry['path']} cannot be sent: {reason}", "put the file itself there")
    counter, sent_bytes_by_path = (
        ProgressCounter(sum(entry["bytes"] for entry in entries), progress),
        client.files.begin_upload(upload, node)["there"],
    )

    def send(entry: FolderEntry) -> None:
        same = _matching_pieces(client, node, upload, tree, entry["path"], sent_bytes_by_path.get(entry["path"], 0))
        send_file(client, node, upload, tree, entry["path"], same, counter.add)

    transfer_files(send, entries)
    return counter.transferred
