"""Checkpoints between pools: found, checked and moved by the agents that see them; nothing is read here.

A reference is `POOL:PATH`, the path relative to the pool's storage: a step folder, or a folder of steps (then its
newest). Where a tool takes a place, that may be the URI of an object store, too.
"""

import builtins
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from cluster import checkpoint_location
from cluster.checkpoint_location import CheckpointLocation
from cluster.errors import FleetError, NotFound, PolyfleetError, SpecError, UserError
from cluster.types import Finding
from orchestrator.checkpoint_search import Found, Storages
from workers.errors import CheckpointError

if TYPE_CHECKING:
    from orchestrator.runtime.agents import Agents
    from orchestrator.runtime.bandwidth_limit import Pace

CHUNK_BYTES = 8 << 20
"""As manifests have them; each fits one call."""
IN_FLIGHT = 4
"""Chunks on their way at once: so much memory a copy takes, in both nodes together."""
MANIFEST = "MANIFEST.json"
LARGEST_MANIFEST_BYTES = 256 << 20
VERIFY_S = 3600.0
TOOL_NEWS_S = 2.0
CHUNK_S = 120.0
CLIENT_IDLE_S = 10.0
MOST_READ_AT_ONCE = 256
REPAIR = "copy it again from its source, or delete it; `polyfleet checkpoint verify` takes the mark off a sound one"
Progress = Callable[[int, int], None]


class CheckpointService:
    """Reading and moving, from machine to machine at the `pace`, if any. Every method may raise FleetError (no agent
    sees it) or NotFound.
    """

    def __init__(self, agents: "Agents", pace: "Pace | None" = None, job_id: Callable[[str], str] = lambda name: ""):
        self._agents, self.pace = agents, pace
        self._storages = Storages(agents, job_id)
        self._having: dict[str, str] = {}

    def list(self, pool: str, prefix: str = "") -> "list[dict[str, Any]]":
        """Summaries of all checkpoints below `prefix`, a path or the name of a job, oldest first. Pool "" means every
        pool. `nodes`: one for each storage of the pool that has it; where all nodes share one, the first speaks for
        all. What lies on nodes that do not answer is left out, see `away`; of a single pool FleetError says so where
        nothing else is there.
        """
        pools = [pool] if pool else sorted({a.facts.pool for _, a in self._agents.ready() if a.facts})
        rows: builtins.list[dict[str, Any]] = []
        for name in pools:
            there: dict[str, dict[str, Any]] = {}
            for node in self._storages.nodes_of(name):
                for row in self._agents.call(node, "checkpoints", prefix) if not self._agents.away_reason(node) else ():
                    there.setdefault(row["path"], {"pool": name, **row, "nodes": []})["nodes"].append(node)
            rows += there.values()
        if not rows and (path := self._storages.of_job(prefix)):
            return self.list(pool, path)
        if pool and not rows and (away := self.away(pool)):
            raise FleetError("; ".join(away), "`polyfleet up` brings back a node that is down")
        return rows

    def away(self, pool: str) -> "builtins.list[str]":
        """Of which storages of the pool ("": of any) `list` has nothing, since no node that sees them answers."""
        nodes = [(name, node.facts) for name, node in self._agents.items() if node.facts]
        why = {name: self._agents.away_reason(name) for name, _ in nodes}
        seen = {(facts.pool, facts.storage_id) for name, facts in nodes if not why[name]}
        return [
            f"checkpoints of pool {facts.pool} on node {name}, {why[name]}, are not listed"
            for name, facts in nodes
            if pool in ("", facts.pool) and (facts.pool, facts.storage_id) not in seen
        ]

    def show(self, ref: str) -> "dict[str, Any]":
        """What its manifest says, `damaged` and `passed_over` what was found out before. No tensor is read."""
        found = self._find(ref)
        told = self._agents.call(found.node, "describe_checkpoint", found.place.path, found.place.pool)
        return {"pool": found.place.pool, **told, "passed_over": list(found.passed_over)}

    def findings(self) -> "builtins.list[tuple[str, Finding]]":
        """(node, finding) of all checkpoints that were found damaged and stay where they are, for `doctor`."""
        found = []
        for pool in sorted({a.facts.pool for _, a in self._agents.ready() if a.facts}):
            with suppress(FleetError):  # a node that does not answer is a finding of its own
                for node in self._storages.nodes_of(pool):
                    found += self._damaged(pool, node)
        return found

    def _damaged(self, pool: str, node: str) -> "builtins.list[tuple[str, Finding]]":
        rows: builtins.list[tuple[str, Finding]] = []
        with suppress(FleetError):
            for row in self._agents.call(node, "damaged_checkpoints"):
                told = f"is damaged, and nothing resumes from it: {row['reason']}"
                rows.append((node, Finding("warning", f"checkpoint {pool}:{row['path']}", told, REPAIR)))
        return rows

    def plan(self, ref: str, kind: str, count: int = 1) -> "dict[str, Any]":
        """What `count` devices of `kind` would keep, convert or refuse, and whether it fits."""
        found = self._find(ref)
        planned: dict[str, Any] = self._agents.call(found.node, "plan_checkpoint", found.place.path, kind, count)
        return planned

    def newest(self, reader: str, folder: CheckpointLocation) -> "dict[str, Any] | None":
        """Pool, path and step of the newest checkpoint in a folder that is not known to be damaged, and `passed_over`,
        [{"path", "reason"}], the newer ones: as node `reader` sees them. Who loads it proves its bytes."""
        found = self._agents.call(reader, "resolve_checkpoint", folder.path, folder.pool)
        if not found["path"]:
            return None
        told = self._agents.call(reader, "describe_checkpoint", found["path"], folder.pool)
        return {"pool": folder.pool, "step": told["step"], **found}

    def hold(self, reader: str, found: CheckpointLocation) -> None:
        """Nothing that `keep` makes superfluous removes it for some minutes."""
        self._agents.call(reader, "hold_checkpoint", found.path, found.pool)

    def keep_newest(self, node: str, folder: str, name: str, keep: int) -> None:
        """Remove from a folder in the storage of `node` what `keep` lets go beside `name`, which has just come. Where
        that is not the newest there, nothing is removed.
        """
        found = self._agents.call(node, "checkpoints", folder)
        names = sorted(PurePosixPath(row["path"]).name for row in found if not row.get("problem"))
        if len(names) > keep and names[-1] == name:
            facts = self._agents[node].facts
            root = {"pool": facts.pool if facts else "", "path": folder}
            self.watched(node, "prune", {"root": root, "keep": keep}, lambda done, total: None)

    def is_sound(self, reader: str, found: CheckpointLocation) -> bool:
        """Whether every byte is what was saved; a checkpoint of which one is not is marked, and passed over from then
        on. For whoever could not move one. Raises FleetError where nobody can tell."""
        try:
            self._agents.call(reader, "verify_checkpoint", found.path, found.pool, timeout_s=VERIFY_S)
        except CheckpointError:
            return False
        return True

    def copy(self, source: str, target: str, progress: Progress | None = None) -> "dict[str, Any]":
        """Copy one checkpoint into a folder of another pool. Only chunks that are missing there travel."""
        started = time.monotonic()
        at = self._find(source, "source")
        found, wanted = at.place, checkpoint_location.parse_pool_path(target, "target")
        writer, name = self.node_of(wanted.pool, "target"), PurePosixPath(found.path).name
        moved = self.move((at.node, found), writer, f"{wanted.path}/{name}", progress)
        path = f"{wanted.pool}:{wanted.path}/{name}"
        return {"source": str(found), "target": path, **moved, "seconds": time.monotonic() - started}

    def move(
        self, source: tuple[str, CheckpointLocation], writer: str, final: str, progress: Progress | None = None
    ) -> "dict[str, Any]":
        """From agent to agent, a few chunks at a time; the server holds none. What arrived stays when this is cut."""
        reader, found = source
        folder, name = str(PurePosixPath(final).parent), PurePosixPath(final).name
        text = self._text(reader, found)
        begun = self._agents.call(writer, "begin_checkpoint", folder, name, text, timeout_s=VERIFY_S)
        told = {key: begun[key] for key in ("step", "files", "bytes")} | {"verified": True}
        if begun["arrived"]:
            return told | {"travelled_bytes": 0, "already_there": True}
        try:
            travelled = self._send((reader, found), writer, (folder, name), begun, progress)
            self._agents.call(writer, "commit_checkpoint", folder, name, timeout_s=VERIFY_S)
        except BaseException:
            with suppress(PolyfleetError):  # the first error is the one to tell
                self._agents.call(writer, "leave_checkpoint", folder, name)
            raise
        return told | {"travelled_bytes": travelled, "already_there": False}

    def _text(self, reader: str, found: CheckpointLocation) -> bytes:
        """The manifest, in pieces of what one call carries."""
        pieces: list[bytes] = []
        path = f"{found.path}/{MANIFEST}"
        while not pieces or len(pieces[-1]) == CHUNK_BYTES:
            at = len(pieces) * CHUNK_BYTES
            if at > LARGEST_MANIFEST_BYTES:
                raise UserError(
                    f"{found.pool}:{path} has more than {LARGEST_MANIFEST_BYTES} bytes",
                    "check that the path is a checkpoint",
                )
            pieces.append(self._agents.call(reader, "read_file", path, at, CHUNK_BYTES, found.pool))
        return b"".join(pieces)

    def _send(
        self,
        source: tuple[str, CheckpointLocation],
        writer: str,
        to: tuple[str, str],
        begun: "dict[str, Any]",
        progress: Progress | None,
    ) -> int:
        """Bytes that travelled. They go through Ray's object store, from one node straight to the other."""
        from orchestrator.runtime.actors import answer

        reader, found = source
        pending: deque[Any] = deque()
        travelled, total = 0, begun["bytes"]
        here = max(total - len(begun["missing"]) * CHUNK_BYTES, 0)

        def settle() -> None:
            nonlocal travelled
            travelled += answer(pending.popleft(), f"node {writer}: write_chunk", 120)
            if progress:
                progress(min(here + travelled, total), total)

        ends = [node.facts if (node := self._agents.get(name)) else None for name in (reader, writer)]
        for file, index in begun["missing"]:
            if self.pace:
                self.pace.wait(ends[0], ends[1], CHUNK_BYTES)
            data = self._agents.actor(reader).read_file.remote(
                f"{found.path}/{file}", index * CHUNK_BYTES, CHUNK_BYTES, found.pool
            )
            pending.append(self._agents.actor(writer).write_chunk.remote(*to, file, index, data))
            if len(pending) >= IN_FLIGHT:
                settle()
        while pending:
            settle()
        return travelled

    # -- between a client and a pool

    def manifest(self, ref: str) -> "dict[str, Any]":
        """{"checkpoint": POOL:PATH of the one that is meant, "manifest": its bytes}"""
        found = self._find(ref, "source")
        return {"checkpoint": str(found.place), "manifest": self._text(found.node, found.place)}

    def chunk(self, ref: str, file: str, index: int) -> bytes:
        found = checkpoint_location.parse_pool_path(ref, "source")
        reader, path = self._reader_of(ref), f"{found.path}/{file}"
        try:
            data: bytes = self._agents.call(
                reader, "read_file", path, index * CHUNK_BYTES, CHUNK_BYTES, found.pool, timeout_s=CHUNK_S
            )
        except NotFound:
            self._having.pop(ref, None)  # whoever asks again has it looked for again
            raise
        return data

    def _reader_of(self, ref: str) -> str:
        """A node that was found to have it and still serves: nobody looks for it again with each chunk."""
        node = self._agents.get(self._having.get(ref, ""))
        if node is None or not node.ready:
            if len(self._having) >= MOST_READ_AT_ONCE:
                self._having.clear()
            self._having[ref] = self._find(ref, "source").node
        return self._having[ref]

    def place(self, target: str) -> "dict[str, Any]":
        """The node that writes there, and the folder in its pool's storage."""
        wanted = checkpoint_location.parse_pool_path(target, "target")
        return {"node": self.node_of(wanted.pool, "target"), "pool": wanted.pool, "folder": wanted.path}

    def begin(self, node: str, folder: str, name: str, text: bytes) -> "dict[str, Any]":
        """A client that is gone may come back soon: what it held is given up after a few seconds."""
        told: dict[str, Any] = self._agents.call(
            node, "begin_checkpoint", folder, name, text, CLIENT_IDLE_S, timeout_s=VERIFY_S
        )
        return told

    def write(self, node: str, to: tuple[str, str], file: str, index: int, data: bytes) -> None:
        self._agents.call(node, "write_chunk", *to, file, index, data, timeout_s=CHUNK_S)

    def leave(self, node: str, folder: str, name: str) -> None:
        self._agents.call(node, "leave_checkpoint", folder, name)

    def commit(self, node: str, folder: str, name: str) -> "dict[str, Any]":
        self._agents.call(node, "commit_checkpoint", folder, name, timeout_s=VERIFY_S)
        return {"path": f"{folder}/{name}"}

    def tool(self, verb: str, named: "dict[str, str]", options: "dict[str, Any]", progress: Progress) -> Any:
        """Run a tool (workers.checkpoint.tools) on a node that reaches its places: {argument: POOL:PATH or URI}.

        A place that is written decides on the pool; of its nodes one runs it that has what is read. The rest must be
        readable there.
        """
        arguments: dict[str, Any] = dict(options)
        reached: list[tuple[str, str]] = []
        for name, text in named.items():
            use = checkpoint_location.TOOLS[verb][name]
            place = (
                checkpoint_location.parse_location(text, name)
                if use.stores
                else checkpoint_location.parse_pool_path(text, name)
            )
            if place.scheme:
                arguments[name] = {"uri": str(place)}
                continue
            found = None if use.written or use.whole else self._find(str(place), name)
            if use.written and use.whole:
                place = self._storages.folder(place)
            arguments[name] = {"pool": place.pool, "path": found.place.path if found else place.path}
            reached.insert(0 if use.written else len(reached), (place.pool, found.node if found else ""))
        if not reached:
            raise SpecError("places", "none of them lies in a pool", "run it on paths of this machine, without a fleet")
        pool = reached[0][0]
        having = next((node for of, node in reached if of == pool and node), "")
        return self.watched(having or self.node_of(pool), verb, arguments, progress)

    def discard(self, place: CheckpointLocation) -> None:
        """Remove a checkpoint from every storage of its pool."""
        for node in self._storages.nodes_of(place.pool):
            self.watched(node, "discard", {"path": {"pool": place.pool, "path": place.path}}, lambda done, total: None)

    def watched(self, node: str, verb: str, arguments: "dict[str, Any]", progress: Progress) -> Any:
        """The result of a tool on that node. Raises Conflict where it runs as many as it may."""
        number, seen = self._agents.call(node, "start_tool", verb, arguments), 0
        try:
            while True:
                news = self._agents.call(node, "tool_news", number, seen, TOOL_NEWS_S, timeout_s=TOOL_NEWS_S + 30)
                if news["result"] is not None:
                    return news["result"]
                seen = news["seen"]
                progress(*(news["progress"] or (0, 0)))
        except BaseException:
            with suppress(PolyfleetError):
                self._agents.call(node, "stop_tool", number)
            raise

    def node_of(self, pool: str, field: str = "pool") -> str:
        """One that serves the pool's storage. Raises FleetError, SpecError."""
        return self._storages.node_of(pool, field)

    def _find(self, ref: str, field: str = "checkpoint") -> Found:
        return self._storages.find(checkpoint_location.parse_pool_path(ref, field), field)
