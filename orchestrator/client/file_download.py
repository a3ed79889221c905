"""Download files of a job's folder to this machine."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import Conflict, FleetError, UserError
from cluster.input.folder_access import PIECE_BYTES, FolderTree, Piece, digest, normalize_path
from cluster.input.folder_entries import FolderEntry, link_error
from cluster.paths import umask
from orchestrator.client.file_transfer import (
    TRIES,
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
MAX_REFETCH_BYTES = 64 << 20
CHANGED = "changed while it was read: the copy may mix parts of several versions"


def get(
    client: "Client", ref: str, path: str = "", dest: str = "", force: bool = False, progress: Progress | None = None
) -> TransferResult:
    """Download a file or a folder. A file is written to `dest`, or into it if it is a folder; the content of a folder
    is written into `dest`, which is created. Without `dest`, it is written into the current folder under its own name.

    Raises Conflict before anything is written if a local file differs, unless `force` is set.
    """
    remote = normalize_path(path)
    listing = list_all_files(client, ref, remote)
    root, name = _local_target(listing, remote, dest)
    if name and (reason := listing["entries"][0]["refused"] or _is_link(listing["entries"][0])):
        raise UserError(f"{listing['job']}:{remote} cannot be fetched: {reason}", "name a file or a folder")
    download = _Download(client, listing, remote, root, name, force)
    return retry_unreachable(client, lambda: download.run(progress))


def _is_link(entry: FolderEntry) -> str:
    return f"it is a link to {entry['target']}" if entry["type"] == "link" else ""


def _local_target(listing: Data, path: str, dest: str) -> tuple[Path, str]:
    """The folder that is written into, and the name of a single file there ("" for a folder)."""
    single = (
        bool(path)
        and [entry["path"] for entry in listing["entries"]] == [path]
        and listing["entries"][0]["type"] != "folder"
    )
    name = path.rpartition("/")[2] or listing["job"]
    target = Path(dest).expanduser() if dest else Path()
    if not single:
        return (target if dest else target / name), ""
    if not dest or dest.endswith("/") or target.is_dir():
        return target, name
    return target.parent, target.name


class _Download:
    def __init__(self, client: "Client", listing: Data, path: str, root: Path, name: str, force: bool):
        self._client, self._listing, self._path, self._name, self._force = client, listing, path, name, force
        self._root, self._tree, self._umask = root, FolderTree(root), umask()
        self._result = TransferResult(
            listing["job"], str(root / name) if name else str(root), notes=list(listing["notes"])
        )

    def run(self, progress: Progress | None) -> TransferResult:
        entries = [entry for entry in self._listing["entries"] if self._is_included(entry)]
        files = [entry for entry in entries if entry["type"] == "file"]
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"{self._root} is not a folder", "name a folder to write into") from None
        counter = ProgressCounter(sum(entry["bytes"] for entry in files), progress)
        is_present = run_parallel(self._is_here, files)
        for entry in entries:
            if entry["type"] == "folder":
                self._tree.create_folder(self._local(entry))
        transfer_files(
            lambda entry: self._fetch(entry, counter),
            [e for e, same in zip(files, is_present, strict=True) if not same],
        )
        for entry, same in zip(files, is_present, strict=True):
            if same:
                counter.add(entry["bytes"], False)
        self._create_links([entry for entry in entries if entry["type"] == "link"])
        self._result.files = [self._local(entry) for entry in files]
        self._result.bytes = sum(entry["bytes"] for entry in files)
        self._result.transferred_bytes = counter.transferred
        return self._result

    def _is_included(self, entry: FolderEntry) -> bool:
        refused = entry["refused"]
        if entry["type"] == "link" and not refused:  # it may lead out of the part of the folder that is fetched
            refused = link_error(self._local(entry), entry["target"])
        if refused:
            self._result.notes.append(f"{entry['path']} is left out: {refused}")
        return not refused

    def _local(self, entry: FolderEntry) -> str:
        """Path of the entry below the folder that is written to."""
        return self._name or normalize_path(entry["path"].removeprefix(self._path).lstrip("/"))

    def _is_here(self, entry: FolderEntry) -> bool:
        """Return whether this machine has the same file. Raises Conflict if something else is at its path."""
        local = self._local(entry)
        if not self._tree.exists(local):
            return False
        existing = self._tree.entry(local)
        if existing["type"] == "file" and existing["bytes"] == entry["bytes"] and self._same_content(entry, local):
            return True
        if existing["type"] != "file" or not self._force:
            problem = "differs" if existing["type"] == "file" else f"is a {existing['type']}"
            remedy = "add --force to overwrite it" if existing["type"] == "file" else "choose another destination"
            raise Conflict(f"{self._root / local} already exists and {problem}; nothing was written", remedy)
        return False

    def _same_content(self, entry: FolderEntry, local: str) -> bool:
        first = 0
        while first * PIECE_BYTES < entry["bytes"]:
            remote_hashes = self._hashes(entry, first)
            if remote_hashes != self._tree.hashes(local, first, len(remote_hashes))[1] or not remote_hashes:
                return False
            first += len(remote_hashes)
        return True

    def _hashes(self, entry: FolderEntry, first: int) -> list[str]:
        """Hashes of some of the job's pieces from `first` on."""
        job, folder, path = self._piece_arguments(entry)
        return self._client.files.hashes(job, path, first=first, **folder_arguments(folder))["sha256"]

    def _piece_arguments(self, entry: FolderEntry) -> tuple[str, Data, str]:
        """Job, folder and path: the arguments of the verbs for pieces."""
        folders = self._listing["folders"]
        folder = next(one for one in folders if entry["path"].startswith(one["prefix"]))
        return self._listing["job"], folder, entry["path"].removeprefix(folder["prefix"])

    def _fetch(self, entry: FolderEntry, counter: ProgressCounter) -> None:
        """Fetch a file, again if it changes during that, unless it is large: fetching a growing log would never end."""
        for _ in range(TRIES - 1 if entry["bytes"] <= MAX_REFETCH_BYTES else 0):
            if self._try_fetch(entry, counter):
                return
        if not self._try_fetch(entry, counter, last=True):
            self._result.notes.append(f"{entry['path']} {CHANGED}")

    def _try_fetch(self, entry: FolderEntry, counter: ProgressCounter, last: bool = False) -> bool:
        """Fetch a file. Return False if it changed during that; the fetched file then stays only on the `last` try."""
        local, (job, folder, path) = self._local(entry), self._piece_arguments(entry)
        first = read_piece(self._client, job, folder, path, 0)
        part = _part_path(local, first.version)
        with self._tree.locked(part):
            return self._fetch_pieces(entry, counter, last, (first, part))

    def _fetch_pieces(
        self, entry: FolderEntry, counter: ProgressCounter, last: bool, first_piece: tuple[Piece, str]
    ) -> bool:
        local, (job, folder, path), (first, part) = self._local(entry), self._piece_arguments(entry), first_piece

        def store(at: int, piece: Piece) -> tuple[str, int]:
            data = piece.data[: first.size_bytes - at]  # the file may have grown
            self._tree.write(part, at, data)
            counter.add(len(data), True)
            hashes[at // PIECE_BYTES] = digest(data)
            return piece.version, at + len(data)

        hashes = self._matching_pieces(part, entry) if first.size_bytes > PIECE_BYTES else {}
        same = set(hashes)
        stored = [store(0, first)]
        counter.add(len(same) * PIECE_BYTES, False)
        offsets = [at for at in range(PIECE_BYTES, first.size_bytes, PIECE_BYTES) if at // PIECE_BYTES not in same]
        stored += run_parallel(lambda at: store(at, read_piece(self._client, job, folder, path, at)), offsets)
        changed = any(version != first.version for version, _ in stored)
        if changed and not last:
            self._tree.remove(part)
            return False
        short = [end for _, end in stored if end % PIECE_BYTES]
        self._move_to_target(part, local, min([first.size_bytes, *short]), first, hashes)
        return not changed

    def _matching_pieces(self, part: str, entry: FolderEntry) -> dict[int, str]:
        """Pieces that an earlier try has fetched and that are still equal, with their hashes."""
        piece_count, first, same = self._tree.entry(part)["bytes"] // PIECE_BYTES, 1, dict[int, str]()
        while first < piece_count:
            remote_hashes = self._hashes(entry, first)
            local_hashes = self._tree.hashes(part, first, len(remote_hashes))[1]
            pairs = enumerate(zip(remote_hashes, local_hashes, strict=False), first)
            same |= {index: one for index, (one, other) in pairs if one == other}
            first += max(len(remote_hashes), 1)
        return same

    def _move_to_target(self, part: str, local: str, size_bytes: int, piece: Piece, hashes: dict[int, str]) -> None:
        """Move a complete file to its path after reading it back and comparing the hashes."""
        mode = (0o777 if piece.mode & 0o100 else 0o666) & ~self._umask
        self._tree.finish(part, size_bytes, piece.modified_s, mode)
        expected = [hashes[index] for index in range(-(-size_bytes // PIECE_BYTES))]
        if self._tree.hashes(part)[1] != expected:
            self._tree.remove(part)
            raise FleetError(
                f"{self._root / local} read back differs from what arrived",
                "run the command again; if that fails too, check the disk",
            )
        try:
            self._tree.move(part, self._tree, local, overwrite=self._force)
        except Conflict:
            self._tree.remove(part)
            raise Conflict(
                f"{self._root / local} was created by another process while it was fetched; it was not overwritten",
                "add --force to overwrite it",
            ) from None

    def _create_links(self, links: list[FolderEntry]) -> None:
        """Create links after all files, so that no file is ever written through a link."""
        for entry in links:
            local = self._local(entry)
            if self._tree.exists(local):
                existing = self._tree.entry(local)
                if existing["type"] == "link" and existing["target"] == entry["target"]:
                    continue
                raise Conflict(f"{self._root / local} already exists and is not the same link", "remove it first")
            self._tree.link(local, entry["target"])


def read_piece(client: "Client", job: str, folder: Data, path: str, offset: int) -> Piece:
    """Read one piece of a job's file. Raises FleetError if it arrived damaged."""
    reply = client.files.read(job, path, offset=offset, **folder_arguments(folder))
    headers = {name: reply.headers[f"Polyfleet-{name}"] for name in ("sha256", "bytes", "version", "mode")}
    if digest(reply.content) != headers["sha256"]:
        raise FleetError(f"{path!r}: the piece at byte {offset} arrived damaged", "run the command again")
    modified_s = float(reply.headers["Polyfleet-modified-s"])
    return Piece(reply.content, int(headers["bytes"]), headers["version"], modified_s, int(headers["mode"]))


def _part_path(local: str, version: str) -> str:
    """Path to which a file is fetched: a hidden name that only later tries for the same version of the file use."""
    above, _, name = local.rpartition("/")
    mark = hashlib.sha256(version.encode()).hexdigest()[:12]
    part = f".{name[:120]}.{mark}.part"
    return f"{above}/{part}" if above else part
