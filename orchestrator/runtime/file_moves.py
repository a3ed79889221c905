"""A job's files go where its next attempt runs: under the new attempt's name in the same storage, else copied there."""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from cluster.errors import FleetError, PolyfleetError
from cluster.folder_access import PIECE_BYTES
from cluster.folder_entries import Entry
from cluster.types import NodeFacts
from orchestrator.core.commands import Launch
from orchestrator.runtime import actors
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.bandwidth_limit import Pace
from orchestrator.runtime.file_locations import FilePlaces, Folder, Found

log = logging.getLogger(__name__)

IN_FLIGHT = 4
"""Pieces on their way at once; the server holds none."""
TRIES = 3
PIECE_S = 120.0
COMMIT_S = 3600.0
Tell = Callable[[str], None]


class FileMoves:
    def __init__(self, agents: Agents, pace: Pace | None = None):
        self._agents, self._pace = agents, pace or Pace()
        self._places = FilePlaces(agents)

    def bring(self, asked: Launch, tell: Tell) -> str:
        """What the attempts before have left is what this one begins with; returns what it begins without, or "".
        Raises FleetError: it is tried again.
        """
        if not any(one.started for one in asked.ran):
            return ""
        tell("looks for its files")
        found = self._places.find(asked.job, asked.ran)
        away = f"what it left on {', '.join(found.away)} cannot be reached" if found.away else ""
        try:
            missed = "; ".join(filter(None, (away, *self._bring(asked, found, tell))))
            if missed:
                log.warning("%s starts without all of its files: %s", asked.job, missed)
            return missed
        except FleetError:
            raise
        except PolyfleetError as e:
            raise FleetError(f"its files could not be brought: {e.message}", e.remedy) from e

    def _bring(self, asked: Launch, found: Found, tell: Tell) -> list[str]:
        """What could not be taken along, a sentence for each node."""
        if not found.folders:
            return []
        missed: list[str] = []
        over = {one.epoch: one.over for one in asked.ran}
        used = set()
        for rank, node, storage, epoch in self._targets(asked):
            source = _source(found, rank)
            if source is None or epoch >= asked.epoch:
                continue
            used.add(source.storage)
            if source.storage == storage and over.get(source.epoch):
                self._agents.call(node, "rename_files", asked.job, source.epoch, asked.epoch)
                continue
            missed.append(self._copy(asked, source, node, tell))
        for source in found.folders:
            if source.storage in used and self._pool(source.node) == source.pool:
                with suppress(PolyfleetError):  # an older attempt's folder counts no more in any case
                    self._agents.call(source.node, "remove_files", asked.job, source.epoch)
        return missed

    def _targets(self, asked: Launch) -> Iterator[tuple[int, str, str, int]]:
        """Each storage of the attempt once: node rank, node, its name, and the epoch of what is there already."""
        seen = set()
        for rank, node in enumerate(asked.nodes):
            told = self._agents.call(node, "files_of", asked.job, "")
            if told["storage"] not in seen:
                seen.add(told["storage"])
                yield rank, node, str(told["storage"]), int(told["epoch"])

    def _facts(self, name: str) -> NodeFacts | None:
        node = self._agents.get(name)
        return node.facts if node else None

    def _pool(self, name: str) -> str:
        facts = self._facts(name)
        return facts.pool if facts else ""

    def _copy(self, asked: Launch, source: Folder, node: str, tell: Tell) -> str:
        """Which files did not follow. What arrived stays when this is cut, and the next try goes on from there."""
        folder = source.path(asked.job)
        upload = hashlib.sha256(f"{folder} {source.storage}".encode()).hexdigest()[:24]
        entries = list(self._listed(source, folder))
        refused = [entry for entry in entries if entry["refused"]]
        good = [entry for entry in entries if not entry["refused"]]
        have = self._agents.call(node, "begin_upload", upload)
        files = [entry for entry in good if entry["type"] == "file"]
        wait = partial(self._pace.wait, self._facts(source.node), self._facts(node))
        Copy(self._agents, source, folder, node, upload, tell, wait).send(files, have)
        others = [entry for entry in good if entry["type"] != "file"]
        self._agents.call(node, "write_others", upload, others, timeout_s=COMMIT_S)
        self._agents.call(node, "keep_only", upload, [entry["path"] for entry in good], timeout_s=COMMIT_S)
        self._agents.call(node, "files_arrived", upload, asked.job, asked.epoch, timeout_s=COMMIT_S)
        if not refused:
            return ""
        first = refused[0]
        return f"{len(refused)} of its files did not follow it to {node}, such as {first['path']!r}: {first['refused']}"

    def _listed(self, source: Folder, folder: str) -> Iterator[Entry]:
        after = ""
        while True:
            told = self._agents.call(source.node, "list_files", folder, "", after, source.pool)
            yield from told["entries"]
            if not (after := told["after"]):
                return


class Copy:
    """Files of one folder on their way into an upload. `told` says what it does, once so many bytes are there."""

    def __init__(
        self,
        agents: Agents,
        source: Folder,
        folder: str,
        node: str,
        upload: str,
        tell: Tell,
        wait: Callable[[int], None],
        told: Callable[[int], str] | None = None,
    ):
        self._told = told or self._of_a_job
        self._agents, self._source, self._folder = agents, source, folder
        self._node, self._upload, self._tell, self._wait = node, upload, tell, wait
        self._pending: deque[tuple[str, Any]] = deque()
        self._versions: dict[str, set[str]] = {}
        self._done_bytes = self._total_bytes = 0

    def send(self, files: list[Entry], have: dict[str, int]) -> None:
        self._total_bytes = sum(entry["bytes"] for entry in files)
        for _ in range(TRIES):
            for entry in files:
                self._send(entry, have.get(entry["path"], 0))
            self._settle(0)
            changed = {path for path, versions in self._versions.items() if len(versions) > 1}
            files, have = [entry for entry in files if entry["path"] in changed], {}
            self._versions.clear()
            if not files:
                return
        raise FleetError(f"{files[0]['path']!r} changes while it is copied, although its attempt has ended")

    def _send(self, entry: Entry, have_bytes: int) -> None:
        """The last piece, which makes the file whole, goes after the others."""
        offsets = range(0, max(entry["bytes"], 1), PIECE_BYTES)
        same = self._same(entry["path"], have_bytes) if have_bytes else set()
        for index, offset in enumerate(offsets[:-1]):
            if index not in same:
                self._wait(PIECE_BYTES)
                self._piece(entry["path"], offset, False)
        if len(offsets) > 1:
            self._settle(0)
        self._wait(entry["bytes"] - offsets[-1])
        self._piece(entry["path"], offsets[-1], True)
        self._done_bytes += entry["bytes"]
        self._tell(self._told(self._done_bytes))

    def _of_a_job(self, done_bytes: int) -> str:
        return f"copies its files from {self._source.pool} ({done_bytes >> 20} of {self._total_bytes >> 20} MiB)"

    def _same(self, path: str, have_bytes: int) -> set[int]:
        """Pieces that an earlier try has brought."""
        same: set[int] = set()
        for first in range(0, have_bytes // PIECE_BYTES, 32):
            here = self._agents.call(self._source.node, "file_hashes", self._folder, path, first, self._source.pool)
            there = self._agents.call(self._node, "file_hashes", f".uploads/{self._upload}", path, first, "")
            pairs = enumerate(zip(here["sha256"], there["sha256"], strict=False), first)
            same |= {index for index, (one, other) in pairs if one == other}
        return same

    def _piece(self, path: str, offset: int, last: bool) -> None:
        """From one node straight to the other."""
        read = self._agents.actor(self._source.node).file_piece
        write = self._agents.actor(self._node).take_piece
        piece = read.remote(self._folder, path, offset, self._source.pool)
        self._pending.append((path, write.remote(self._upload, path, offset, piece, last)))
        self._settle(IN_FLIGHT - 1)

    def _settle(self, most: int) -> None:
        while len(self._pending) > most:
            path, ref = self._pending.popleft()
            version = actors.answer(ref, f"node {self._node}: take_piece", PIECE_S)
            self._versions.setdefault(path, set()).add(version)


def _source(found: Found, rank: int) -> Folder | None:
    """What the part of that node rank begins with: of several folders its own."""
    if len(found.folders) == 1:
        return found.folders[0]
    return next((folder for folder in found.folders if folder.node_rank == rank), None)
