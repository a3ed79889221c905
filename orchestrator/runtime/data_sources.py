"""Where the data of jobs comes from: an object store, which the node itself reads, another pool's storage, from node to
node, or this server, which has what a client sent.
"""

import posixpath
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster import checkpoint_location
from cluster.checkpoint_location import CheckpointLocation
from cluster.content_cache import source_key
from cluster.content_hash import entry_refusal
from cluster.errors import Conflict, FleetError, NotFound, SpecError, UserError
from cluster.folder_access import PIECE_BYTES, digest
from cluster.folder_entries import Entry
from cluster.types import NodeFacts
from orchestrator.checkpoint_address import of_this_machine
from orchestrator.checkpoints import CheckpointService
from orchestrator.core.model import Data
from orchestrator.runtime import actors
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.bandwidth_limit import Pace
from orchestrator.runtime.data_store import DataStore, missing
from orchestrator.runtime.file_locations import Folder
from orchestrator.runtime.file_moves import COMMIT_S, IN_FLIGHT, PIECE_S, Copy
from orchestrator.show.units import size
from workers.messages import Mount

BUSY_S = 600.0
"""So long a node that runs as many tools as it may is asked again."""
OUTPUT = "output"
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Item:
    """One of a job's data, by the name of its field; `expected`: what it must be, "" where anything will do."""

    field: str
    wanted: Data
    expected: str

    @property
    def mount(self) -> Mount:
        path, inside = posixpath.normpath(self.wanted.mount), self.wanted.mount.endswith("/")
        return self.expected, path, posixpath.basename(self.wanted.uri.rstrip("/")) if inside else ""


@dataclass(frozen=True, slots=True)
class Source:
    """What is there now. `key` names it and its version; `send` brings it into an upload of a node and tells what in it
    counts, "" for all.
    """

    bytes: int
    key: str
    send: Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class Sources:
    agents: Agents
    checkpoints: CheckpointService
    store: DataStore

    def of(self, node: str, item: Item, tell: Tell) -> Source:
        """`node` is where it is to be. Raises SpecError, FleetError, NotFound."""
        if of_this_machine(item.wanted.uri):
            return self._sent(item, tell)
        place = checkpoint_location.parse_location(item.wanted.uri, f"{item.field}.uri")
        return self._in_store(node, place, item, tell) if place.scheme else self._in_pool(place, item, tell)

    # -- from an object store: the node itself reads it

    def _in_store(self, node: str, place: CheckpointLocation, item: Item, tell: Tell) -> Source:
        source = {"source": {"uri": str(place)}}
        found = self._tool(node, "look", source, lambda done, total: None, tell)
        progress = _progress(tell, str(place), found["bytes"])
        pool = self.agents[node].facts.pool  # type: ignore[union-attr] # one that is launched on has told

        def send(node: str, upload: str) -> str:
            target = {"pool": pool, "path": f".uploads/{upload}"}
            asked = {**source, "target": target, "version": found["version"]}
            return str(self._tool(node, "fetch", asked, progress, tell)["inner"])

        return Source(found["bytes"], source_key(item.wanted.uri, found["version"]), send)

    def _tool(self, node: str, verb: str, arguments: Any, progress: Callable[[int, int], None], tell: Tell) -> Any:
        """Waits while the node runs as many as it may."""
        until = time.monotonic() + BUSY_S
        while True:
            try:
                return self.checkpoints.watched(node, verb, arguments, progress)
            except Conflict as e:
                if time.monotonic() > until:
                    raise FleetError(e.message, e.remedy) from e
                tell(f"waits for other transfers on {node}")
                time.sleep(1.0)

    # -- from a pool's storage: from node to node

    def _in_pool(self, place: CheckpointLocation, item: Item, tell: Tell) -> Source:
        reader, folder, name, entries = self._listed(place, item)
        for entry in entries:
            if refusal := entry_refusal(entry["type"], entry["refused"]):
                remedy = "leave it out, or name a folder below"
                raise SpecError(f"{item.field}.uri", f"{place}: {entry['path']!r} {refusal}", remedy)
        files = [entry for entry in entries if entry["type"] == "file"]
        total = sum(entry["bytes"] for entry in files)
        told = "\n".join(f"{e['path']} {e['bytes']} {e['modified_s']}" for e in files)
        source = Folder(0, reader, place.pool, "")

        def send(node: str, upload: str) -> str:
            have = self.agents.call(node, "begin_upload", upload)
            pace = self.checkpoints.pace or Pace()
            wait = partial(pace.wait, facts_of(self.agents, reader), facts_of(self.agents, node))
            Copy(self.agents, source, folder, node, upload, tell, wait, _told(str(place), total)).send(files, have)
            self.agents.call(node, "keep_only", upload, [e["path"] for e in files], timeout_s=COMMIT_S)
            return name

        return Source(total, source_key(item.wanted.uri, told), send)

    def _listed(self, place: CheckpointLocation, item: Item) -> tuple[str, str, str, list[Entry]]:
        """Node, folder and name there, and all that lies at or below it. Raises SpecError where no node has it."""
        readers = self._readers(place.pool, f"{item.field}.uri")
        for reader in readers:
            folder, _, name = self._real(reader, place).rpartition("/")
            try:
                entries = list(self._entries(reader, folder, name, place.pool))
            except NotFound:
                continue
            if any(entry["type"] == "file" for entry in entries):
                return reader, folder, name, entries
        untold = [
            n for n, node in self.agents.items() if node.facts and node.facts.pool == place.pool and not node.ready
        ]
        if untold:
            told = f"no {place} on the nodes that are up, and {', '.join(untold)} may have it"
            raise FleetError(f"{item.field}.uri: {told}", "`polyfleet status` lists the nodes")
        raise SpecError(
            f"{item.field}.uri", f"no file is at {place}", "`polyfleet files ls JOB` shows what a job has left"
        )

    def _readers(self, pool: str, field: str) -> list[str]:
        own = [name for name, _ in self.agents.of_pool(pool)]
        near = [name for name, node in self.agents.ready() if node.facts and pool in node.facts.neighbours]
        return list(dict.fromkeys([*own, *near])) or [self.checkpoints.node_of(pool, field)]

    def _real(self, reader: str, place: CheckpointLocation) -> str:
        """JOB/output is the folder of its newest attempt."""
        job, _, below = place.path.partition("/")
        first, slash, rest = below.partition("/")
        if first != OUTPUT:
            return place.path
        epoch = self.agents.call(reader, "files_of", job, place.pool)["epoch"]
        return f"{job}/{OUTPUT}-{epoch}{slash}{rest}"

    def _entries(self, reader: str, folder: str, name: str, pool: str) -> Iterator[Entry]:
        after = ""
        while True:
            told = self.agents.call(reader, "list_files", folder, name, after, pool, timeout_s=PIECE_S)
            yield from told["entries"]
            if not (after := told["after"]):
                return

    # -- from this server

    def _sent(self, item: Item, tell: Tell) -> Source:
        try:
            total = self.store.size_bytes(item.expected)
        except (NotFound, UserError):
            raise missing(f"{item.field}.uri", item.wanted.uri) from None

        def send(node: str, upload: str) -> str:
            tree, files, single = self.store.files(item.expected)
            have = self.agents.call(node, "begin_upload", upload)
            done, pending, progress = 0, deque[Any](), _progress(tell, item.wanted.uri, total)
            for entry in files:
                path, size_bytes = entry["path"], entry["bytes"]
                if have.get(path) == size_bytes and size_bytes:  # hashed with all others where it lies
                    done += size_bytes
                    continue
                for offset in range(0, max(size_bytes, 1), PIECE_BYTES):
                    piece = tree.read(path, offset)
                    end = {"bytes": size_bytes, "modified_s": entry["modified_s"], "mode": entry["mode"]}
                    last = offset + PIECE_BYTES >= size_bytes
                    arguments = (upload, path, offset, piece.data, digest(piece.data), end if last else None)
                    if last:
                        done += _settle(pending, 0, node)
                    pending.append(self.agents.actor(node).write_piece.remote(*arguments))
                    done += _settle(pending, IN_FLIGHT - 1, node)
                    progress(done, total)
            _settle(pending, 0, node)
            self.agents.call(node, "keep_only", upload, [entry["path"] for entry in files], timeout_s=COMMIT_S)
            return single

        return Source(total, "", send)


def _settle(pending: "deque[Any]", most: int, node: str) -> int:
    """Wait until at most so many pieces are on their way: the bytes of those that have arrived."""
    done = 0
    while len(pending) > most:
        done += int(actors.answer(pending.popleft(), f"node {node}: write_piece", COMMIT_S))
    return done


def _told(uri: str, total: int) -> Callable[[int], str]:
    """What a launch does that has fetched so many bytes."""
    return lambda done: f"fetches {size(total)} of data from {uri} ({100 * done // max(total, 1)} %)"


def _progress(tell: Tell, uri: str, total: int) -> Callable[[int, int], None]:
    told = _told(uri, total)
    tell(told(0))
    return lambda done, _: tell(told(done))


def facts_of(agents: Agents, name: str) -> NodeFacts | None:
    node = agents.get(name)
    return node.facts if node else None
