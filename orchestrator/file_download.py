"""Files of a job's folder, fetched to this machine."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import Conflict, FleetError, UserError
from cluster.folder_access import PIECE_BYTES, Piece, Tree, digest, plain
from cluster.folder_entries import Entry, link_refusal
from cluster.paths import umask
from orchestrator.file_transfer import TRIES, Progress, Report, Told, each, each_file, listed, until_reached

if TYPE_CHECKING:
    from orchestrator.client import Client

Data = dict[str, Any]
AGAIN_UP_TO_BYTES = 64 << 20
CHANGED = "changed while it was read: it may hold parts of more than one state of it"


def get(
    client: "Client", ref: str, path: str = "", dest: str = "", force: bool = False, progress: Progress | None = None
) -> Report:
    """A file goes to `dest` or into that folder; of a folder its content goes into `dest`, which is made. Without
    `dest` it goes into the current folder, under its own name.

    Raises Conflict, before anything is written, where a local file differs, unless `force`.
    """
    wanted = plain(path)
    told = listed(client, ref, wanted)
    root, name = _local(told, wanted, dest)
    if name and (why := told["entries"][0]["refused"] or _is_link(told["entries"][0])):
        raise UserError(f"{told['job']}:{wanted} cannot be fetched: {why}", "name a file or a folder")
    got = _Get(client, told, wanted, root, name, force)
    return until_reached(client, lambda: got.run(progress))


def _is_link(entry: Entry) -> str:
    return f"it is a link to {entry['target']}" if entry["type"] == "link" else ""


def _local(told: Data, path: str, dest: str) -> tuple[Path, str]:
    """The folder that is written into, and the name of a single file there ("" for a folder)."""
    single = (
        bool(path) and [entry["path"] for entry in told["entries"]] == [path] and told["entries"][0]["type"] != "folder"
    )
    name = path.rpartition("/")[2] or told["job"]
    there = Path(dest).expanduser() if dest else Path()
    if not single:
        return (there if dest else there / name), ""
    if not dest or dest.endswith("/") or there.is_dir():
        return there, name
    return there.parent, there.name


class _Get:
    def __init__(self, client: "Client", told: Data, path: str, root: Path, name: str, force: bool):
        self._client, self._told, self._path, self._name, self._force = client, told, path, name, force
        self._root, self._tree, self._umask = root, Tree(root), umask()
        self._report = Report(told["job"], str(root / name) if name else str(root), notes=list(told["notes"]))

    def run(self, progress: Progress | None) -> Report:
        entries = [entry for entry in self._told["entries"] if self._travels(entry)]
        files = [entry for entry in entries if entry["type"] == "file"]
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"{self._root} is no folder", "name a folder to write into") from None
        told = Told(sum(entry["bytes"] for entry in files), progress)
        here = each(self._is_here, files)
        for entry in entries:
            if entry["type"] == "folder":
                self._tree.make(self._local(entry))
        each_file(lambda entry: self._fetch(entry, told), [e for e, same in zip(files, here, strict=True) if not same])
        for entry, same in zip(files, here, strict=True):
            if same:
                told.more(entry["bytes"], False)
        self._links([entry for entry in entries if entry["type"] == "link"])
        self._report.files = [self._local(entry) for entry in files]
        self._report.bytes = sum(entry["bytes"] for entry in files)
        self._report.travelled_bytes = told.travelled
        return self._report

    def _travels(self, entry: Entry) -> bool:
        refused = entry["refused"]
        if entry["type"] == "link" and not refused:  # it may lead out of a part of the folder
            refused = link_refusal(self._local(entry), entry["target"])
        if refused:
            self._report.notes.append(f"{entry['path']} is left out: {refused}")
        return not refused

    def _local(self, entry: Entry) -> str:
        """Its path below the folder that is written into."""
        return self._name or plain(entry["path"].removeprefix(self._path).lstrip("/"))

    def _is_here(self, entry: Entry) -> bool:
        """Whether the same file is here. Raises Conflict where something else is."""
        local = self._local(entry)
        if not self._tree.exists(local):
            return False
        there = self._tree.look(local)
        if there["type"] == "file" and there["bytes"] == entry["bytes"] and self._same_content(entry, local):
            return True
        if there["type"] != "file" or not self._force:
            what = "differs" if there["type"] == "file" else f"is a {there['type']}"
            remedy = "add --force to write over it" if there["type"] == "file" else "name another place"
            raise Conflict(f"{self._root / local} is there already and {what}; nothing was written", remedy)
        return False

    def _same_content(self, entry: Entry, local: str) -> bool:
        first = 0
        while first * PIECE_BYTES < entry["bytes"]:
            theirs = self._client.file_hashes(*self._asked(entry), first)["sha256"]
            if theirs != self._tree.hashes(local, first, len(theirs))[1] or not theirs:
                return False
            first += len(theirs)
        return True

    def _asked(self, entry: Entry) -> tuple[str, Data, str]:
        """Job, spot and path, as the routes for pieces take them."""
        folders = self._told["folders"]
        folder = next(one for one in folders if entry["path"].startswith(one["prefix"]))
        return self._told["job"], folder, entry["path"].removeprefix(folder["prefix"])

    def _fetch(self, entry: Entry, told: Told) -> None:
        """One that changes is fetched again, unless it is large: a log that grows would never be done."""
        for _ in range(TRIES - 1 if entry["bytes"] <= AGAIN_UP_TO_BYTES else 0):
            if self._fetched(entry, told):
                return
        if not self._fetched(entry, told, last=True):
            self._report.notes.append(f"{entry['path']} {CHANGED}")

    def _fetched(self, entry: Entry, told: Told, last: bool = False) -> bool:
        """False where it changed meanwhile; what came stays then if it is the `last` try."""
        local, (job, spot, path) = self._local(entry), self._asked(entry)
        first = self._client.file_piece(job, spot, path, 0)
        part = _beside(local, first.version)
        with self._tree.alone(part):
            return self._taken(entry, told, last, (first, part))

    def _taken(self, entry: Entry, told: Told, last: bool, begun: tuple[Piece, str]) -> bool:
        local, (job, spot, path), (first, part) = self._local(entry), self._asked(entry), begun

        def take(at: int, piece: Piece) -> tuple[str, int]:
            data = piece.data[: first.size_bytes - at]  # it may have grown
            self._tree.write(part, at, data)
            told.more(len(data), True)
            hashes[at // PIECE_BYTES] = digest(data)
            return piece.version, at + len(data)

        hashes = self._brought(part, entry) if first.size_bytes > PIECE_BYTES else {}
        same = set(hashes)
        taken = [take(0, first)]
        told.more(len(same) * PIECE_BYTES, False)
        offsets = [at for at in range(PIECE_BYTES, first.size_bytes, PIECE_BYTES) if at // PIECE_BYTES not in same]
        taken += each(lambda at: take(at, self._client.file_piece(job, spot, path, at)), offsets)
        changed = any(version != first.version for version, _ in taken)
        if changed and not last:
            self._tree.remove(part)
            return False
        short = [end for _, end in taken if end % PIECE_BYTES]
        self._place(part, local, min([first.size_bytes, *short]), first, hashes)
        return not changed

    def _brought(self, part: str, entry: Entry) -> dict[int, str]:
        """Pieces of it that an earlier try has brought, with their hashes."""
        whole, first, same = self._tree.look(part)["bytes"] // PIECE_BYTES, 1, dict[int, str]()
        while first < whole:
            theirs = self._client.file_hashes(*self._asked(entry), first)["sha256"]
            ours = self._tree.hashes(part, first, len(theirs))[1]
            pairs = enumerate(zip(theirs, ours, strict=False), first)
            same |= {index: one for index, (one, other) in pairs if one == other}
            first += max(len(theirs), 1)
        return same

    def _place(self, part: str, local: str, size_bytes: int, piece: Piece, hashes: dict[int, str]) -> None:
        """Once all of it was read back and compared."""
        mode = (0o777 if piece.mode & 0o100 else 0o666) & ~self._umask
        self._tree.finish(part, size_bytes, piece.modified_s, mode)
        expected = [hashes[index] for index in range(-(-size_bytes // PIECE_BYTES))]
        if self._tree.hashes(part)[1] != expected:
            self._tree.remove(part)
            raise FleetError(
                f"{self._root / local} does not read back as it arrived",
                "get it again; if that fails too, check the disk",
            )
        try:
            self._tree.move(part, self._tree, local, over=self._force)
        except Conflict:
            self._tree.remove(part)
            raise Conflict(
                f"{self._root / local} appeared while it was fetched; it was not written over", "add --force"
            ) from None

    def _links(self, links: list[Entry]) -> None:
        """After all files: nothing is ever written through one."""
        for entry in links:
            local = self._local(entry)
            if self._tree.exists(local):
                there = self._tree.look(local)
                if there["type"] == "link" and there["target"] == entry["target"]:
                    continue
                raise Conflict(f"{self._root / local} is there already and is not the same link", "remove it first")
            self._tree.link(local, entry["target"])


def _beside(local: str, version: str) -> str:
    """Where a file arrives: known to a later try for the same state of it, hidden to everything else."""
    above, _, name = local.rpartition("/")
    mark = hashlib.sha256(version.encode()).hexdigest()[:12]
    part = f".{name[:120]}.{mark}.part"
    return f"{above}/{part}" if above else part
