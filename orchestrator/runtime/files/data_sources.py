"""Sources of job data: object stores, storages of pools, and uploads of clients.

Nodes read object stores themselves; data in a pool's storage is copied between nodes; this server has the uploads.
"""

import posixpath
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.errors import Conflict, FleetError, NotFound, SpecError, UserError
from cluster.host.content_cache import source_key
from cluster.host.content_hash import entry_error
from cluster.input import checkpoint_location
from cluster.input.checkpoint_location import CheckpointLocation
from cluster.input.folder_access import PIECE_BYTES, digest
from cluster.input.folder_entries import FolderEntry
from orchestrator.core.model import Data
from orchestrator.runtime.agents import actors
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.checkpoints.bandwidth_limit import RateLimit
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService
from orchestrator.runtime.files.data_store import DataStore, not_uploaded
from orchestrator.runtime.files.file_locations import Folder
from orchestrator.runtime.files.file_moves import COMMIT_S, IN_FLIGHT, PIECE_S, FolderCopy
from orchestrator.spec.checkpoint_address import is_local_path
from orchestrator.units import size
from workers.protocol.messages import Mount

BUSY_S = 600.0
"""Seconds for which to retry while a node runs its maximum number of tools."""
OUTPUT = "output"
SetActivity = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Item:
    """One data entry of a job.

    `field`: its name in the spec. `expected`: its required SHA-256, "" for any content.
    """

    field: str
    data: Data
    expected: str

    @property
    def mount(self) -> Mount:
        path, inside = posixpath.normpath(self.data.mount), self.data.mount.endswith("/")
        return self.expected, path, posixpath.basename(self.data.uri.rstrip("/")) if inside else ""


@dataclass(frozen=True, slots=True)
class Source:
    """The data as it is at its source now.

    `key` identifies the source and its version. `send(node, upload)` copies the data into an upload on a node and
    returns the path in it that is the data, "" for all.
    """

    bytes: int
    key: str
    send: Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class Sources:
    agents: Agents
    checkpoints: CheckpointService
    store: DataStore

    @property
    def _rate_limit(self) -> RateLimit:
        return self.checkpoints.rate_limit or RateLimit()

    def find(self, node: str, item: Item, set_activity: SetActivity) -> Source:
        """Find the source of an item that is needed on `node`. Raises SpecError, FleetError, NotFound."""
        if is_local_path(item.data.uri):
            return self._from_server(item, set_activity)
        location = checkpoint_location.parse_location(item.data.uri, f"{item.field}.uri")
        return (
            self._from_store(node, location, item, set_activity)
            if location.scheme
            else self._from_pool(location, item, set_activity)
        )

    # -- from an object store, read by the node itself

    def _from_store(self, node: str, location: CheckpointLocation, item: Item, set_activity: SetActivity) -> Source:
        source = {"source": {"uri": str(location)}}
        description = self._run_tool(node, "look", source, lambda done_bytes, total: None, set_activity)
        progress = _progress_callback(set_activity, str(location), description["bytes"])
        pool = self.agents[node].facts.pool  # type: ignore[union-attr] # a node with a launch has reported its facts

        def send(node: str, upload: str) -> str:
            target = {"pool": pool, "path": f".uploads/{upload}"}
            arguments = {**source, "target": target, "version": description["version"]}
            return str(self._run_tool(node, "fetch", arguments, progress, set_activity)["inner"])

        return Source(description["bytes"], source_key(item.data.uri, description["version"]), send)

    def _run_tool(
        self, node: str, verb: str, arguments: Any, progress: Callable[[int, int], None], set_activity: SetActivity
    ) -> Any:
        """Run a tool on a node, and retry while the node runs its maximum number.

        Raises FleetError after BUSY_S.
        """
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                return self.checkpoints.run_tool(node, verb, arguments, progress)
            except Conflict as e:
                if time.monotonic() > deadline:
                    raise FleetError(e.message, e.remedy) from e
                set_activity(f"waits for other transfers on {node}")
                time.sleep(1.0)

    # -- from a pool's storage, copied between nodes

    def _from_pool(self, location: CheckpointLocation, item: Item, set_activity: SetActivity) -> Source:
        reader, folder, name, entries = self._find_entries(location, item)
        for entry in entries:
            if refusal := entry_error(entry["type"], entry["refused"]):
                remedy = "remove this entry, or name a folder that does not contain it"
                raise SpecError(f"{item.field}.uri", f"{location}: {entry['path']!r} {refusal}", remedy)
        files = [entry for entry in entries if entry["type"] == "file"]
        total = sum(entry["bytes"] for entry in files)
        listing = "\n".join(f"{e['path']} {e['bytes']} {e['modified_s']}" for e in files)
        source = Folder(0, reader, location.pool, "")

        def send(node: str, upload: str) -> str:
            arrived = self.agents.call(node, "begin_upload", upload)
            wait = partial(self._rate_limit.wait, self.agents.facts_of(reader), self.agents.facts_of(node))
            FolderCopy(
                self.agents, source, folder, node, upload, set_activity, wait, _activity_text(str(location), total)
            ).send(files, arrived)
            self.agents.call(node, "keep_only", upload, [e["path"] for e in files], timeout_s=COMMIT_S)
            return name

        return Source(total, source_key(item.data.uri, listing), send)

    def _find_entries(self, location: CheckpointLocation, item: Item) -> tuple[str, str, str, list[FolderEntry]]:
        """Return (node, folder, name, entries at or below it). Raises SpecError if no node has a file there."""
        readers = self._readers(location.pool, f"{item.field}.uri")
        for reader in readers:
            folder, _, name = self._resolve(reader, location).rpartition("/")
            try:
                entries = list(self._entries(reader, folder, name, location.pool))
            except NotFound:
                continue
            if any(entry["type"] == "file" for entry in entries):
                return reader, folder, name, entries
        unavailable = [
            n for n, node in self.agents.items() if node.facts and node.facts.pool == location.pool and not node.ready
        ]
        if unavailable:
            message = f"{location} is not on the nodes that are up, but may be on {', '.join(unavailable)}"
            raise FleetError(f"{item.field}.uri: {message}", "`polyfleet status` lists the nodes")
        raise SpecError(
            f"{item.field}.uri", f"no file is at {location}", "`polyfleet files ls JOB` lists the files of a job"
        )

    def _readers(self, pool: str, field: str) -> list[str]:
        own = [name for name, _ in self.agents.of_pool(pool)]
        near = [name for name, node in self.agents.ready() if node.facts and pool in node.facts.neighbours]
        return list(dict.fromkeys([*own, *near])) or [self.checkpoints.node_of(pool, field)]

    def _resolve(self, reader: str, location: CheckpointLocation) -> str:
        """Resolve JOB/output to the folder of the job's newest attempt."""
        job, _, path = location.path.partition("/")
        first, slash, rest = path.partition("/")
        if first != OUTPUT:
            return location.path
        epoch = self.agents.call(reader, "files_of", job, location.pool)["epoch"]
        return f"{job}/{OUTPUT}-{epoch}{slash}{rest}"

    def _entries(self, reader: str, folder: str, name: str, pool: str) -> Iterator[FolderEntry]:
        after = ""
        while True:
            page = self.agents.call(reader, "list_files", folder, name, after, pool, timeout_s=PIECE_S)
            yield from page["entries"]
            if not (after := page["after"]):
                return

    # -- from this server, uploaded by a client

    def _from_server(self, item: Item, set_activity: SetActivity) -> Source:
        try:
            total = self.store.size_bytes(item.expected)
        except (NotFound, UserError):
            raise not_uploaded(f"{item.field}.uri", item.data.uri) from None

        def send(node: str, upload: str) -> str:
            tree, files, single = self.store.files(item.expected)
            arrived = self.agents.call(node, "begin_upload", upload)
            done_bytes, pending, progress = 0, deque[Any](), _progress_callback(set_activity, item.data.uri, total)
            for entry in files:
                path, size_bytes = entry["path"], entry["bytes"]
                if arrived.get(path) == size_bytes and size_bytes:  # the node hashes it later, with all other files
                    done_bytes += size_bytes
                    continue
                for offset in range(0, max(size_bytes, 1), PIECE_BYTES):
                    piece = tree.read(path, offset)
                    end = {"bytes": size_bytes, "modified_s": entry["modified_s"], "mode": entry["mode"]}
                    last = offset + PIECE_BYTES >= size_bytes
                    arguments = (upload, path, offset, piece.data, digest(piece.data), end if last else None)
                    if last:
                        done_bytes += _wait_for_pieces(pending, 0, node)
                    self._rate_limit.wait(self.agents.server_address, self.agents.facts_of(node), len(piece.data))
                    pending.append(self.agents.actor(node).write_piece.remote(*arguments))
                    done_bytes += _wait_for_pieces(pending, IN_FLIGHT - 1, node)
                    progress(done_bytes, total)
            _wait_for_pieces(pending, 0, node)
            self.agents.call(node, "keep_only", upload, [entry["path"] for entry in files], timeout_s=COMMIT_S)
            return single

        return Source(total, "", send)


def _wait_for_pieces(pending: "deque[Any]", maximum: int, node: str) -> int:
    """Wait until at most `maximum` pieces are in flight; return the number of bytes that have arrived."""
    done_bytes = 0
    while len(pending) > maximum:
        done_bytes += int(actors.get_result(pending.popleft(), f"node {node}: write_piece", COMMIT_S))
    return done_bytes


def _activity_text(uri: str, total: int) -> Callable[[int], str]:
    """Make a function from bytes fetched to a progress text."""
    return lambda done_bytes: f"fetches {size(total)} of data from {uri} ({100 * done_bytes // max(total, 1)} %)"


def _progress_callback(set_activity: SetActivity, uri: str, total: int) -> Callable[[int, int], None]:
    text = _activity_text(uri, total)
    set_activity(text(0))
    return lambda done_bytes, _: set_activity(text(done_bytes))
