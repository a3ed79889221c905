"""Move a job's files to where its next attempt runs: rename them in one storage, or copy them."""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from cluster.errors import FleetError, PolyfleetError
from cluster.input.folder_access import PIECE_BYTES
from cluster.input.folder_entries import FolderEntry
from orchestrator.core.controller.commands import Launch
from orchestrator.runtime.agents import actors
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.checkpoints.bandwidth_limit import RateLimit
from orchestrator.runtime.files.file_locations import FileLocator, Folder, LocatedFiles

log = logging.getLogger(__name__)

IN_FLIGHT = 4
"""Maximum number of pieces in flight; they go from node to node, not through the server."""
TRIES = 3
PIECE_S = 120.0
COMMIT_S = 3600.0
SetActivity = Callable[[str], None]


class FileMoves:
    def __init__(self, agents: Agents, rate_limit: RateLimit | None = None):
        self._agents, self._rate_limit = agents, rate_limit or RateLimit()
        self._locator = FileLocator(agents)

    def ensure_on_nodes(self, launch: Launch, set_activity: SetActivity) -> str:
        """Give an attempt the files of earlier attempts; return a sentence on files that are missing, or "".

        Raises FleetError; the launch is then retried.
        """
        if not any(attempt.started for attempt in launch.previous_attempts):
            return ""
        set_activity("looks for its files")

        def on_progress(node: str, done_bytes: int, total_bytes: int) -> None:
            set_activity(f"downloads its files to {node} ({done_bytes >> 20} of {total_bytes >> 20} MiB)")

        located = self._locator.find_or_download(launch.job, launch.previous_attempts, on_progress)
        away = f"its files on {', '.join(located.away)} cannot be reached" if located.away else ""
        try:
            lost = (folder.missing for folder in located.folders)
            missing = "; ".join(filter(None, (away, *lost, *self._ensure_on_nodes(launch, located, set_activity))))
            if missing:
                log.warning("%s starts without some of its files: %s", launch.job, missing)
            return missing
        except FleetError:
            raise
        except PolyfleetError as e:
            raise FleetError(f"its files could not be copied: {e.message}", e.remedy) from e

    def _ensure_on_nodes(self, launch: Launch, located: LocatedFiles, set_activity: SetActivity) -> list[str]:
        """Bring the files to each storage of the attempt; return sentences on files that were left behind."""
        if not located.folders:
            return []
        missing: list[str] = []
        has_ended = {attempt.epoch: attempt.is_over for attempt in launch.previous_attempts}
        used = set()
        for rank, node, storage, epoch in self._targets(launch):
            source = _source(located, rank)
            if source is None or epoch >= launch.epoch:
                continue
            used.add(source.storage)
            if source.storage == storage and has_ended.get(source.epoch):
                self._agents.call(node, "rename_files", launch.job, source.epoch, launch.epoch)
                continue
            missing.append(self._copy(launch, source, node, set_activity))
        for source in located.folders:
            if source.storage in used and self._pool(source.node) == source.pool:
                with suppress(PolyfleetError):  # the folder of an older attempt is ignored in any case
                    self._agents.call(source.node, "remove_files", launch.job, source.epoch)
        return missing

    def _targets(self, launch: Launch) -> Iterator[tuple[int, str, str, int]]:
        """For each storage of the attempt: (node rank, node, storage, epoch of the newest folder in it)."""
        storages = set()
        for rank, node in enumerate(launch.nodes):
            reply = self._agents.call(node, "files_of", launch.job, "")
            if reply["storage"] not in storages:
                storages.add(reply["storage"])
                yield rank, node, str(reply["storage"]), int(reply["epoch"])

    def _pool(self, name: str) -> str:
        facts = self._agents.facts_of(name)
        return facts.pool if facts else ""

    def _copy(self, launch: Launch, source: Folder, node: str, set_activity: SetActivity) -> str:
        """Copy the files to a node; return a sentence on files that could not be copied, or "".

        If this is interrupted, files that have arrived stay, and the next try continues from there.
        """
        folder = source.path(launch.job)
        upload = hashlib.sha256(f"{folder} {source.storage}".encode()).hexdigest()[:24]
        entries = list(self._listed(source, folder))
        refused = [entry for entry in entries if entry["refused"]]
        accepted = [entry for entry in entries if not entry["refused"]]
        arrived = self._agents.call(node, "begin_upload", upload)
        files = [entry for entry in accepted if entry["type"] == "file"]
        wait = partial(self._rate_limit.wait, self._agents.facts_of(source.node), self._agents.facts_of(node))
        FolderCopy(self._agents, source, folder, node, upload, set_activity, wait).send(files, arrived)
        others = [entry for entry in accepted if entry["type"] != "file"]
        self._agents.call(node, "write_others", upload, others, timeout_s=COMMIT_S)
        self._agents.call(node, "keep_only", upload, [entry["path"] for entry in accepted], timeout_s=COMMIT_S)
        self._agents.call(node, "files_arrived", upload, launch.job, launch.epoch, timeout_s=COMMIT_S)
        if not refused:
            return ""
        first = refused[0]
        return f"{len(refused)} of its files were not copied to {node}, such as {first['path']!r}: {first['refused']}"

    def _listed(self, source: Folder, folder: str) -> Iterator[FolderEntry]:
        after = ""
        while True:
            page = self._agents.call(source.node, "list_files", folder, "", after, source.pool)
            yield from page["entries"]
            if not (after := page["after"]):
                return


class FolderCopy:
    """Copies files of one folder into an upload on another node.

    `describe(bytes_copied)` makes an activity text.
    """

    def __init__(
        self,
        agents: Agents,
        source: Folder,
        folder: str,
        node: str,
        upload: str,
        set_activity: SetActivity,
        wait: Callable[[int], None],
        describe: Callable[[int], str] | None = None,
    ):
        self._describe = describe or self._job_activity
        self._agents, self._source, self._folder = agents, source, folder
        self._node, self._upload, self._set_activity, self._wait = node, upload, set_activity, wait
        self._pending: deque[tuple[str, Any]] = deque()
        self._versions: dict[str, set[str]] = {}
        self._done_bytes = self._total_bytes = 0

    def send(self, files: list[FolderEntry], arrived: dict[str, int]) -> None:
        self._total_bytes = sum(entry["bytes"] for entry in files)
        for _ in range(TRIES):
            for entry in files:
                self._send(entry, arrived.get(entry["path"], 0))
            self._wait_for_pieces(0)
            changed = {path for path, versions in self._versions.items() if len(versions) > 1}
            files, arrived = [entry for entry in files if entry["path"] in changed], {}
            self._versions.clear()
            if not files:
                return
        raise FleetError(f"{files[0]['path']!r} changes while it is copied, although its attempt has ended")

    def _send(self, entry: FolderEntry, arrived_bytes: int) -> None:
        """Copy one file. Its last piece, which completes it, is sent after all others have arrived."""
        offsets = range(0, max(entry["bytes"], 1), PIECE_BYTES)
        arrived = self._arrived_pieces(entry["path"], arrived_bytes) if arrived_bytes else set()
        for index, offset in enumerate(offsets[:-1]):
            if index not in arrived:
                self._wait(PIECE_BYTES)
                self._copy_piece(entry["path"], offset, False)
        if len(offsets) > 1:
            self._wait_for_pieces(0)
        self._wait(entry["bytes"] - offsets[-1])
        self._copy_piece(entry["path"], offsets[-1], True)
        self._done_bytes += entry["bytes"]
        self._set_activity(self._describe(self._done_bytes))

    def _job_activity(self, done_bytes: int) -> str:
        return f"copies its files from {self._source.pool} ({done_bytes >> 20} of {self._total_bytes >> 20} MiB)"

    def _arrived_pieces(self, path: str, arrived_bytes: int) -> set[int]:
        """Indexes of pieces that an earlier try has copied."""
        equal: set[int] = set()
        for first in range(0, arrived_bytes // PIECE_BYTES, 32):
            source_hashes = self._agents.call(
                self._source.node, "file_hashes", self._folder, path, first, self._source.pool
            )
            target_hashes = self._agents.call(self._node, "file_hashes", f".uploads/{self._upload}", path, first, "")
            pairs = enumerate(zip(source_hashes["sha256"], target_hashes["sha256"], strict=False), first)
            equal |= {index for index, (one, other) in pairs if one == other}
        return equal

    def _copy_piece(self, path: str, offset: int, last: bool) -> None:
        """Copy one piece directly between the nodes."""
        read = self._agents.actor(self._source.node).file_piece
        write = self._agents.actor(self._node).take_piece
        piece = read.remote(self._folder, path, offset, self._source.pool)
        self._pending.append((path, write.remote(self._upload, path, offset, piece, last)))
        self._wait_for_pieces(IN_FLIGHT - 1)

    def _wait_for_pieces(self, maximum: int) -> None:
        while len(self._pending) > maximum:
            path, ref = self._pending.popleft()
            version = actors.get_result(ref, f"node {self._node}: take_piece", PIECE_S)
            self._versions.setdefault(path, set()).add(version)


def _source(located: LocatedFiles, rank: int) -> Folder | None:
    """The folder that the part with this node rank starts with: the only one, or its own."""
    if len(located.folders) == 1:
        return located.folders[0]
    return next((folder for folder in located.folders if folder.node_rank == rank), None)
