"""Files of this machine, sent into a job's folder, or to a node that imports them."""

import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import Conflict, NotFound, UserError
from cluster.folder_access import PIECE_BYTES, Tree, digest, digest_of, plain
from cluster.folder_entries import Entry
from orchestrator.file_transfer import Progress, Report, Told, each, each_file, listed, until_reached

if TYPE_CHECKING:
    from orchestrator.client import Client

Data = dict[str, Any]
PUT_AT_ONCE = 500
NOTHING = digest(b"")
"""An empty file has no piece."""


def put(
    client: "Client", source: str, ref: str, path: str = "", force: bool = False, progress: Progress | None = None
) -> Report:
    """The mirror image of `get`. Raises Conflict for a file that is there: while the job runs, or where it differs,
    unless `force`.
    """
    local = Path(source).expanduser()
    if not os.path.lexists(local):
        raise NotFound(f"no {source!r} on this machine", "name a file or a folder")
    return until_reached(client, lambda: _Put(client, local, ref, path, force).run(progress))


class _Put:
    def __init__(self, client: "Client", local: Path, ref: str, path: str, force: bool):
        self._client, self._force = client, force
        single = not local.is_dir()
        root = local.parent if single else local
        self._tree, self._name = Tree(root, follow=True), local.name if single else ""
        if single and not local.is_file():
            raise UserError(f"{local} is no regular file", "name a file or a folder")
        self._job = client.job(ref)["id"]
        into = path.endswith("/") or (single and self._is_folder(path))
        if single:
            self._path = plain(f"{path or '.'}/{local.name}") if into or not path else plain(path)
        else:
            self._path = plain(path) or local.resolve().name
        self._spot = client.file_place(self._job, self._path)
        whole = f"{socket.gethostname()}\n{local.resolve()}\n{self._job}\n{self._path}"
        self._upload = hashlib.sha256(whole.encode("utf-8", "replace")).hexdigest()[:24]
        self._report = Report(self._job, f"{self._job}:{self._path}")

    def _is_folder(self, path: str) -> bool:
        try:
            entries = self._client.files(self._job, plain(path))["entries"]
        except NotFound:
            return False
        return not path or [entry["path"] for entry in entries] != [plain(path)] or entries[0]["type"] == "folder"

    def run(self, progress: Progress | None) -> Report:
        """All that differs is refused before anything is sent; what was sent gets its places at the end."""
        files = [entry for entry in self._tree.all_entries(self._name) if self._travels(entry)]
        there = self._there()
        new = [entry for entry in files if not self._is_there(entry, there)]
        told = Told(sum(entry["bytes"] for entry in files), progress)
        sent = self._client.upload_begin(self._spot["node"], self._upload)
        each_file(lambda entry: self._send(entry, sent.get(entry["path"], 0), told), new)
        self._place(new)
        sent_now = {entry["path"] for entry in new}
        told.more(sum(entry["bytes"] for entry in files if entry["path"] not in sent_now), False)
        self._report.files = [self._remote(entry) for entry in files]
        self._report.bytes = sum(entry["bytes"] for entry in files)
        self._report.travelled_bytes = told.travelled
        return self._report

    def _travels(self, entry: Entry) -> bool:
        why = entry["refused"] or ("links are not sent" if entry["type"] == "link" else "")
        if why:
            self._report.notes.append(f"{entry['path']} is left out: {why}")
        return not why and entry["type"] == "file"

    def _remote(self, entry: Entry) -> str:
        inside: str = self._spot["path"]
        return inside if self._name else f"{inside}/{entry['path']}"

    def _there(self) -> dict[str, Entry]:
        """What the job's folder holds at those places."""
        try:
            told = listed(self._client, self._job, self._path)
        except NotFound:
            return {}
        prefix = self._path.removesuffix(self._spot["path"])
        return {entry["path"].removeprefix(prefix): entry for entry in told["entries"]}

    def _is_there(self, entry: Entry, there: dict[str, Entry]) -> bool:
        """Whether the same file is there. Raises Conflict where another is, and it may not be written over."""
        remote = self._remote(entry)
        if (found := there.get(remote)) is None:
            return False
        if found["type"] == "file" and found["bytes"] == entry["bytes"] and self._is_same(entry, remote):
            return True
        if self._spot["running"]:
            told = f"{remote!r} is a file of a running job, which may be using it; nothing was written"
            raise Conflict(told, "give another name, or wait until the job has ended")
        if found["type"] != "file" or not self._force:
            remedy = "add --force to write over it" if found["type"] == "file" else "name another place"
            raise Conflict(f"{self._job}:{remote} is there already and differs; nothing was written", remedy)
        return False

    def _is_same(self, entry: Entry, remote: str) -> bool:
        ours, first = self._tree.hashes(entry["path"])[1], 0
        while first < len(ours):
            theirs = self._client.file_hashes(self._job, self._spot, remote, first)["sha256"]
            if not theirs or theirs != ours[first : first + len(theirs)]:
                return False
            first += len(theirs)
        return True

    def _send(self, entry: Entry, sent_bytes: int, told: Told) -> None:
        path, node = entry["path"], self._spot["node"]
        same = _sent(self._client, node, self._upload, self._tree, path, sent_bytes)
        send_file(self._client, node, self._upload, self._tree, path, same, told.more)

    def _place(self, files: list[Entry]) -> None:
        names = [{"uploaded": entry["path"], "path": self._remote(entry)} for entry in files]
        for first in range(0, len(names), PUT_AT_ONCE):
            some = names[first : first + PUT_AT_ONCE]
            self._client.files_put(self._job, self._spot, self._upload, some, self._force)
        self._client.upload_discard(self._spot["node"], self._upload)


def _sent(client: "Client", node: str, upload: str, tree: Tree, path: str, sent_bytes: int) -> set[int]:
    """Pieces of a file that an earlier try has sent."""
    same: set[int] = set()
    first, whole = 0, sent_bytes // PIECE_BYTES
    while first < whole:
        theirs = client.upload_hashes(node, upload, path, first)["sha256"]
        ours = tree.hashes(path, first, len(theirs))[1]
        same |= {i for i, (one, other) in enumerate(zip(theirs, ours, strict=False), first) if one == other}
        first += max(len(theirs), 1)
    return same


def send_file(
    client: "Client",
    node: str,
    upload: str,
    tree: Tree,
    path: str,
    same: set[int],
    more: Callable[[int, bool], None],
) -> None:
    """One file into an upload; pieces in `same` are there. Raises UserError where it changes meanwhile."""
    first, hashes = tree.read(path, 0), dict[int, str]()
    offsets = list(range(0, max(first.size_bytes, 1), PIECE_BYTES))

    def send(offset: int) -> None:
        piece, last = tree.read(path, offset), offset == offsets[-1]
        if piece.version != first.version:
            raise UserError(f"{tree.root / path} changes while it is sent", "send it once nobody writes to it")
        hashes[offset] = digest(piece.data)
        told = {"size_bytes": piece.size_bytes, "modified_s": max(piece.modified_s, 0.0), "mode": piece.mode}
        end = told | {"whole": digest_of([hashes[at] for at in offsets if hashes[at] != NOTHING])} if last else None
        if travels := last or offset // PIECE_BYTES not in same:
            client.upload_piece(node, upload, path, offset, piece.data, end)
        more(len(piece.data), travels)

    each(send, offsets[:-1])
    send(offsets[-1])  # the file is whole with it


def send_folder(client: "Client", node: str, upload: str, local: Path, progress: Progress | None) -> int:
    """All files of `local` (a file or a folder) into an upload: how many bytes travelled. Links to files travel as the
    files; any other is refused, since what is sent would not be whole.
    """
    single = not local.is_dir()
    tree = Tree(local.parent if single else local, follow=True)
    entries = [entry for entry in tree.all_entries(local.name if single else "") if entry["type"] != "folder"]
    for entry in entries:
        if entry["type"] != "file" or entry["refused"]:
            link = f"it is a link to {entry['target']}, which is not a file that can be read"
            why = link if entry["type"] == "link" else entry["refused"] or f"it is a {entry['type']}"
            raise UserError(f"{tree.root / entry['path']} cannot be sent: {why}", "put the file itself there")
    told, sent = Told(sum(entry["bytes"] for entry in entries), progress), client.upload_begin(node, upload)

    def send(entry: Entry) -> None:
        same = _sent(client, node, upload, tree, entry["path"], sent.get(entry["path"], 0))
        send_file(client, node, upload, tree, entry["path"], same, told.more)

    each_file(send, entries)
    return told.travelled
