"""Find, check and move checkpoints of pools through the agents of their nodes. The server itself reads no checkpoint.

A reference is `POOL:PATH`, the path relative to the pool's storage: a step folder, or a folder of steps (then the
newest step). Arguments of a tool may also be the URI of an object store.
"""

import builtins
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from cluster.errors import FleetError, NotFound, PolyfleetError, SpecError, UserError
from cluster.input import checkpoint_location
from cluster.input.checkpoint_location import CheckpointLocation, reference_fields, split_reference
from cluster.types import Finding
from orchestrator.runtime.checkpoints.checkpoint_search import CheckpointMatch, PoolStorages
from orchestrator.runtime.checkpoints.stored_pool_tools import StoredPoolTools
from orchestrator.views.checkpoints import CheckpointDestination, CommittedView, IncomingView, MovePlan
from workers.checkpoint.tool_table import TOOLS
from workers.errors import CheckpointError

if TYPE_CHECKING:
    from orchestrator.runtime.agents.agents import Agents
    from orchestrator.runtime.checkpoints.bandwidth_limit import RateLimit

CHUNK_BYTES = 8 << 20
"""Chunk size of manifests; one chunk fits into one call."""
IN_FLIGHT = 4
"""Chunks in flight per copy: they are the memory that it takes, in both nodes together."""
MANIFEST = "MANIFEST.json"
MAX_MANIFEST_BYTES = 256 << 20
VERIFY_S = 3600.0
TOOL_POLL_S = 2.0
CHUNK_S = 120.0
CLIENT_IDLE_S = 10.0
MAX_CONCURRENT_READS = 256
REPAIR = "copy it again from its source, or delete it; `polyfleet checkpoint verify` clears the mark if it is intact"
Progress = Callable[[int, int], None]


class CheckpointService:
    """Read and move checkpoints; `rate_limit` is that between machines. Every method may raise FleetError (no agent
    reaches the storage) or NotFound.
    """

    def __init__(
        self, agents: "Agents", rate_limit: "RateLimit | None" = None, job_id: Callable[[str], str] = lambda name: ""
    ):
        self._agents, self.rate_limit = agents, rate_limit
        self._storages = PoolStorages(agents, job_id)
        self._reader_by_ref: dict[str, str] = {}

    def list(self, pool: str, prefix: str = "") -> "list[dict[str, Any]]":
        """Summaries of all checkpoints below `prefix`, a path or the name of a job, newest first. Pool "" means every
        pool. `nodes` has one node for each storage of the pool that has the checkpoint; if all nodes share one storage,
        that is the first node. Checkpoints on nodes that do not respond are left out, see `away`. Raises FleetError if
        `pool` names a pool, it has no checkpoint there, and some of its nodes do not respond.
        """
        pools = [pool] if pool else sorted({a.facts.pool for _, a in self._agents.ready() if a.facts})
        rows: builtins.list[dict[str, Any]] = []
        for name in pools:
            by_path: dict[str, dict[str, Any]] = {}
            for node in self._storages.nodes_of(name):
                for row in self._agents.call(node, "checkpoints", prefix) if not self._agents.away_reason(node) else ():
                    summary = row | reference_fields(name, row["path"])
                    by_path.setdefault(row["path"], summary | {"nodes": []})["nodes"].append(node)
            rows += by_path.values()
        if not rows and (path := self._storages.replace_job_name(prefix)):
            return self.list(pool, path)
        if pool and not rows and (away := self.away(pool)):
            raise FleetError("; ".join(away), "`polyfleet up` brings back a node that is down")
        return rows

    def away(self, pool: str) -> "builtins.list[str]":
        """Reasons why `list` omits storages of the pool ("": of any pool): none of their nodes responds."""
        nodes = [(name, node.facts) for name, node in self._agents.items() if node.facts]
        reasons = {name: self._agents.away_reason(name) for name, _ in nodes}
        listed = {(facts.pool, facts.storage_id) for name, facts in nodes if not reasons[name]}
        return [
            f"checkpoints of pool {facts.pool} on node {name}, {reasons[name]}, are not listed"
            for name, facts in nodes
            if pool in ("", facts.pool) and (facts.pool, facts.storage_id) not in listed
        ]

    def show(self, ref: str) -> "dict[str, Any]":
        """Content of the manifest, and `damaged` and `passed_over` from earlier checks. Reads no tensor."""
        match = self._find(ref)
        summary = self._agents.call(match.node, "describe_checkpoint", match.location.path, match.location.pool)
        identity = reference_fields(match.location.pool, summary["path"])
        return {**summary, **identity, "passed_over": list(match.passed_over)}

    def findings(self) -> "builtins.list[tuple[str, Finding]]":
        """(node, finding) for each checkpoint that is marked as damaged and still stored, for `doctor`."""
        findings = []
        for pool in sorted({a.facts.pool for _, a in self._agents.ready() if a.facts}):
            with suppress(FleetError):  # a node that does not respond is a finding of its own
                for node in self._storages.nodes_of(pool):
                    findings += self._damaged(pool, node)
        return findings

    def _damaged(self, pool: str, node: str) -> "builtins.list[tuple[str, Finding]]":
        rows: builtins.list[tuple[str, Finding]] = []
        with suppress(FleetError):
            for row in self._agents.call(node, "damaged_checkpoints"):
                message = f"is damaged, so no job resumes from it: {row['reason']}"
                rows.append((node, Finding("warning", f"checkpoint {pool}:{row['path']}", message, REPAIR)))
        return rows

    def plan(self, ref: str, kind: str, count: int = 1) -> MovePlan:
        """Describe what `count` devices of `kind` would keep, convert or refuse, and whether the checkpoint fits."""
        match = self._find(ref)
        self.stage(match.node, match.location)
        planned: MovePlan = self._agents.call(match.node, "plan_checkpoint", match.location.path, kind, count)
        return planned

    def newest(self, reader: str, folder: CheckpointLocation) -> "dict[str, Any] | None":
        """Pool, path and step of the newest checkpoint in a folder that is not marked as damaged, and the newer ones as
        `passed_over`, [{"path", "reason"}]: all as node `reader` sees them. Bytes are verified only on loading."""
        resolved = self._agents.call(reader, "resolve_checkpoint", folder.path, folder.pool)
        if not resolved["path"]:
            return None
        summary = self._agents.call(reader, "describe_checkpoint", resolved["path"], folder.pool)
        return {"pool": folder.pool, "step": summary["step"], **resolved}

    def protect(self, reader: str, location: CheckpointLocation) -> None:
        """Protect a checkpoint for some minutes from deletion by the retention setting `keep`."""
        self._agents.call(reader, "hold_checkpoint", location.path, location.pool)

    def keep_newest(self, node: str, folder: str, name: str, keep: int) -> None:
        """Keep the newest `keep` checkpoints of a folder in the storage of `node`, and remove the others. Remove
        nothing if `name`, which has just arrived, is not the newest there.
        """
        stored = self._agents.call(node, "checkpoints", folder)
        names = sorted(PurePosixPath(row["path"]).name for row in stored if not row.get("problem"))
        if len(names) > keep and names[-1] == name:
            facts = self._agents[node].facts
            root = {"pool": facts.pool if facts else "", "path": folder}
            self.run_tool(node, "prune", {"root": root, "keep": keep}, lambda done, total: None)

    def is_sound(self, reader: str, location: CheckpointLocation) -> bool:
        """Verify every byte of a checkpoint that could not be moved. A damaged checkpoint is marked, and passed over
        from then on. Raises FleetError if it cannot be verified."""
        try:
            self._agents.call(reader, "verify_checkpoint", location.path, location.pool, timeout_s=VERIFY_S)
        except CheckpointError:
            return False
        return True

    def copy(self, source: str, target: str, progress: Progress | None = None) -> "dict[str, Any]":
        """Copy one checkpoint into a folder of another pool. Only chunks that are missing there are sent."""
        started = time.monotonic()
        match = self._find(source, "source")
        location, destination = match.location, checkpoint_location.parse_pool_path(target, "target")
        writer, name = self.node_of(destination.pool, "target"), PurePosixPath(location.path).name
        moved = self.move((match.node, location), writer, f"{destination.path}/{name}", progress)
        path = f"{destination.pool}:{destination.path}/{name}"
        return {"source": str(location), "target": path, **moved, "seconds": time.monotonic() - started}

    def move(
        self, source: tuple[str, CheckpointLocation], writer: str, final: str, progress: Progress | None = None
    ) -> "dict[str, Any]":
        """Move a checkpoint from agent to agent, a few chunks at a time; no chunk passes through the server. Chunks
        that arrived remain if the move is interrupted.
        """
        reader, location = source
        self.stage(reader, location, progress)
        folder, name = str(PurePosixPath(final).parent), PurePosixPath(final).name
        text = self._read_manifest(reader, location)
        begin_reply = self._agents.call(writer, "begin_checkpoint_upload", folder, name, text, timeout_s=VERIFY_S)
        result = {key: begin_reply[key] for key in ("step", "files", "bytes")} | {"verified": True}
        if begin_reply["arrived"]:
            return result | {"transferred_bytes": 0, "already_there": True}
        try:
            transferred = self._send((reader, location), writer, (folder, name), begin_reply, progress)
            self._agents.call(writer, "commit_checkpoint_upload", folder, name, timeout_s=VERIFY_S)
        except BaseException:
            with suppress(PolyfleetError):  # the first error is the one to raise
                self._agents.call(writer, "close_checkpoint_upload", folder, name)
            raise
        return result | {"transferred_bytes": transferred, "already_there": False}

    def stage(self, node: str, location: CheckpointLocation, progress: Progress | None = None) -> None:
        """Download a checkpoint that is only in the object store of a pool to `node`, one of its nodes, so that it can
        be read there. Does nothing for a pool without an object store. Raises CheckpointError if it is damaged.
        """
        facts = self._agents.facts_of(node)
        if facts is None or not facts.object_store or facts.pool != location.pool:
            return
        target = {"pool": location.pool, "path": str(PurePosixPath(location.path).parent)}
        arguments = {"source": {"uri": f"{facts.object_store}/{location.path}"}, "target": target}
        self.run_tool(node, "stage", arguments, progress or (lambda done, total: None))

    def _read_manifest(self, reader: str, location: CheckpointLocation) -> bytes:
        """Read the manifest in pieces of at most CHUNK_BYTES, the limit of one call."""
        pieces: list[bytes] = []
        path = f"{location.path}/{MANIFEST}"
        while not pieces or len(pieces[-1]) == CHUNK_BYTES:
            offset = len(pieces) * CHUNK_BYTES
            if offset > MAX_MANIFEST_BYTES:
                raise UserError(
                    f"{location.pool}:{path} has more than {MAX_MANIFEST_BYTES} bytes",
                    "check that the path is a checkpoint",
                )
            pieces.append(self._agents.call(reader, "read_file", path, offset, CHUNK_BYTES, location.pool))
        return b"".join(pieces)

    def _send(
        self,
        source: tuple[str, CheckpointLocation],
        writer: str,
        to: tuple[str, str],
        begin_reply: "dict[str, Any]",
        progress: Progress | None,
    ) -> int:
        """Send the missing chunks directly from node to node through Ray's object store. Return the bytes sent."""
        from orchestrator.runtime.agents.actors import get_result

        reader, location = source
        pending: deque[Any] = deque()
        transferred, total = 0, begin_reply["bytes"]
        present_bytes = max(total - len(begin_reply["missing"]) * CHUNK_BYTES, 0)

        def finish_oldest() -> None:
            nonlocal transferred
            transferred += get_result(pending.popleft(), f"node {writer}: write_checkpoint_chunk", 120)
            if progress:
                progress(min(present_bytes + transferred, total), total)

        ends = [node.facts if (node := self._agents.get(name)) else None for name in (reader, writer)]
        for file, index in begin_reply["missing"]:
            if self.rate_limit:
                self.rate_limit.wait(ends[0], ends[1], CHUNK_BYTES)
            data = self._agents.actor(reader).read_file.remote(
                f"{location.path}/{file}", index * CHUNK_BYTES, CHUNK_BYTES, location.pool
            )
            pending.append(self._agents.actor(writer).write_checkpoint_chunk.remote(*to, file, index, data))
            if len(pending) >= IN_FLIGHT:
                finish_oldest()
        while pending:
            finish_oldest()
        return transferred

    # -- between a client and a pool

    def manifest(self, ref: str) -> "dict[str, Any]":
        """{"checkpoint": POOL:PATH of the checkpoint that `ref` resolves to, "manifest": its bytes}"""
        match = self._find(ref, "source")
        self.stage(match.node, match.location)
        return {"checkpoint": str(match.location), "manifest": self._read_manifest(match.node, match.location)}

    def chunk(self, ref: str, file: str, index: int) -> bytes:
        location = checkpoint_location.parse_pool_path(ref, "source")
        reader, path = self._reader_of(ref), f"{location.path}/{file}"
        try:
            data: bytes = self._agents.call(
                reader, "read_file", path, index * CHUNK_BYTES, CHUNK_BYTES, location.pool, timeout_s=CHUNK_S
            )
        except NotFound:
            self._reader_by_ref.pop(ref, None)  # the next request searches for it again
            raise
        return data

    def _reader_of(self, ref: str) -> str:
        """A node that has the checkpoint and is still ready, cached so that not every chunk causes a search."""
        node = self._agents.get(self._reader_by_ref.get(ref, ""))
        if node is None or not node.ready:
            if len(self._reader_by_ref) >= MAX_CONCURRENT_READS:
                self._reader_by_ref.clear()
            match = self._find(ref, "source")
            self.stage(match.node, match.location)
            self._reader_by_ref[ref] = match.node
        return self._reader_by_ref[ref]

    def destination(self, target: str) -> CheckpointDestination:
        """The node that writes to `target`, and the folder in its pool's storage."""
        destination = checkpoint_location.parse_pool_path(target, "target")
        return {"node": self.node_of(destination.pool, "target"), "pool": destination.pool, "folder": destination.path}

    def begin(self, node: str, folder: str, name: str, text: bytes) -> IncomingView:
        """Begin a copy from a client. If the client disconnects, the node gives the copy up after CLIENT_IDLE_S, so
        that the client can begin it again.
        """
        reply: dict[str, Any] = self._agents.call(
            node, "begin_checkpoint_upload", folder, name, text, CLIENT_IDLE_S, timeout_s=VERIFY_S
        )
        missing = [{"file": file, "index": index} for file, index in reply["missing"]]
        return cast(IncomingView, reply | {"missing": missing})

    def write(self, node: str, to: tuple[str, str], file: str, index: int, data: bytes) -> None:
        self._agents.call(node, "write_checkpoint_chunk", *to, file, index, data, timeout_s=CHUNK_S)

    def leave(self, node: str, folder: str, name: str) -> None:
        self._agents.call(node, "close_checkpoint_upload", folder, name)

    def commit(self, node: str, folder: str, name: str) -> CommittedView:
        self._agents.call(node, "commit_checkpoint_upload", folder, name, timeout_s=VERIFY_S)
        facts = self._agents[node].facts
        return cast(CommittedView, reference_fields(facts.pool if facts else "", f"{folder}/{name}"))

    def tool(self, verb: str, named: "dict[str, str]", options: "dict[str, Any]", progress: Progress) -> Any:
        """Run a tool (workers.checkpoint.tools) on a node that reaches its locations: {argument: POOL:PATH or URI}.

        The location that the tool writes decides the pool; a node of it that has the data to read runs the tool. All
        other locations must be readable on that node. A checkpoint in the result has `pool`, `path` and `ref`.
        """
        if verb in ("prune", "pin") and (stored := self._run_in_store(verb, named, options, progress)):
            return stored
        arguments: dict[str, Any] = dict(options)
        reached: list[tuple[str, str]] = []
        for name, text in named.items():
            use = TOOLS[verb].locations[name]
            location = (
                checkpoint_location.parse_location(text, name)
                if use.allows_stores
                else checkpoint_location.parse_pool_path(text, name)
            )
            if location.scheme:
                arguments[name] = {"uri": str(location)}
                continue
            match = None if use.is_written or use.is_exact else self._find(str(location), name)
            if match:
                if verb == "verify" and (result := self._verify_stored(match, progress)):
                    return result
                self.stage(match.node, match.location, progress)
            if use.is_written and use.is_exact:
                location = self._storages.resolve_folder(location)
            arguments[name] = {"pool": location.pool, "path": match.location.path if match else location.path}
            reached.insert(0 if use.is_written else len(reached), (location.pool, match.node if match else ""))
        if not reached:
            raise SpecError("places", "none of them is in a pool", "run it on paths of this machine, without a fleet")
        pool = reached[0][0]
        node_with_data = next((node for of, node in reached if of == pool and node), "")
        result = self.run_tool(node_with_data or self.node_of(pool), verb, arguments, progress)
        return result | split_reference(result["path"]) if "path" in result else result

    def _run_in_store(
        self, verb: str, named: "dict[str, str]", options: "dict[str, Any]", progress: Progress
    ) -> "dict[str, Any] | None":
        """Run `prune` or `pin` in a pool with an object store; None for any other pool."""
        ((name, text),) = named.items()
        location = checkpoint_location.parse_pool_path(text, name)
        facts = self._agents.facts_of(self.node_of(location.pool, name))
        if facts is None or not facts.object_store:
            return None
        tools = StoredPoolTools(self._agents, self._storages, self.run_tool, facts.object_store)
        if verb == "prune":
            return tools.prune(self._storages.resolve_folder(location), options, progress)
        return tools.pin(self._find(text, name), bool(options.get("remove")))

    def _verify_stored(self, match: CheckpointMatch, progress: Progress) -> "dict[str, Any] | None":
        """Verify the copy in the pool's object store; None if the pool has none, or nothing was uploaded yet."""
        facts = self._agents.facts_of(match.node)
        if facts is None or not facts.object_store or facts.pool != match.location.pool:
            return None
        copy_there = {"uri": f"{facts.object_store}/{match.location.path}"}
        try:
            verification: dict[str, Any] = self.run_tool(match.node, "verify", {"place": copy_there}, progress)
        except NotFound:
            return None
        return verification | reference_fields(match.location.pool, match.location.path)

    def discard(self, location: CheckpointLocation) -> None:
        """Remove a checkpoint from every storage of its pool."""
        for node in self._storages.nodes_of(location.pool):
            self.run_tool(
                node, "discard", {"path": {"pool": location.pool, "path": location.path}}, lambda done, total: None
            )

    def run_tool(self, node: str, verb: str, arguments: "dict[str, Any]", progress: Progress) -> Any:
        """Run a tool on a node and return its result. Raises Conflict if the node runs its maximum number of tools."""
        number, cursor = self._agents.call(node, "start_tool", verb, arguments), 0
        try:
            while True:
                status = self._agents.call(node, "poll_tool", number, cursor, TOOL_POLL_S, timeout_s=TOOL_POLL_S + 30)
                if status["result"] is not None:
                    return status["result"]
                cursor = status["seen"]
                progress(*(status["progress"] or (0, 0)))
        except BaseException:
            with suppress(PolyfleetError):
                self._agents.call(node, "stop_tool", number)
            raise

    def node_of(self, pool: str, field: str = "pool") -> str:
        """A node that serves the pool's storage. Raises FleetError, SpecError."""
        return self._storages.node_of(pool, field)

    def _find(self, ref: str, field: str = "checkpoint") -> CheckpointMatch:
        return self._storages.find(checkpoint_location.parse_pool_path(ref, field), field)
