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

from cluster import places
from cluster.errors import FleetError, NotFound, PolyfleetError, SpecError, UserError, nearest
from cluster.places import Place
from cluster.vocabulary import Finding
from workers.errors import CheckpointError

if TYPE_CHECKING:
    from orchestrator.runtime.agents import Agents

CHUNK_BYTES = 8 << 20
"""As manifests have them; each fits one call."""
IN_FLIGHT = 4
"""Chunks on their way at once: so much memory a copy takes, in both nodes together."""
MANIFEST = "MANIFEST.json"
LARGEST_MANIFEST_BYTES = 256 << 20
VERIFY_S = 3600.0
TOOL_NEWS_S = 2.0
REPAIR = "copy it again from its source, or delete it; `polyfleet checkpoint verify` takes the mark off a sound one"
Progress = Callable[[int, int], None]


class Checkpoints:
    """Reading and moving. Every method may raise FleetError (no agent sees it) or NotFound."""

    def __init__(self, agents: "Agents"):
        self._agents = agents

    def list(self, pool: str, prefix: str = "") -> "list[dict[str, Any]]":
        """Summaries of all checkpoints below `prefix`, oldest first. Pool "" means every pool."""
        pools = [pool] if pool else sorted({a.facts.pool for _, a in self._agents.ready() if a.facts})
        rows = []
        for name in pools:
            rows += [{"pool": name, **row} for row in self._agents.call(self._node_of(name), "checkpoints", prefix)]
        return rows

    def show(self, ref: str) -> "dict[str, Any]":
        """What its manifest says, `damaged` and `passed_over` what was found out before. No tensor is read."""
        node, reference, passed_over = self._resolved(ref)
        told = self._agents.call(node, "describe_checkpoint", reference.path, reference.pool)
        return {"pool": reference.pool, **told, "passed_over": passed_over}

    def findings(self) -> "builtins.list[tuple[str, Finding]]":
        """(node, finding) of all checkpoints that were found damaged and stay where they are, for `doctor`."""
        found = []
        for pool in sorted({a.facts.pool for _, a in self._agents.ready() if a.facts}):
            with suppress(FleetError):  # a node that does not answer is a finding of its own
                node = self._node_of(pool)
                for row in self._agents.call(node, "damaged_checkpoints"):
                    told = f"is damaged, and nothing resumes from it: {row['reason']}"
                    found.append((node, Finding("warning", f"checkpoint {pool}:{row['path']}", told, REPAIR)))
        return found

    def plan(self, ref: str, kind: str, count: int = 1) -> "dict[str, Any]":
        """What `count` devices of `kind` would keep, convert or refuse, and whether it fits."""
        node, reference = self._locate(ref)
        planned: dict[str, Any] = self._agents.call(node, "plan_checkpoint", reference.path, kind, count)
        return planned

    def newest(self, reader: str, folder: Place) -> "dict[str, Any] | None":
        """Pool, path and step of the newest checkpoint in a folder that is not known to be damaged, and `passed_over`,
        [{"path", "reason"}], the newer ones: as node `reader` sees them. Who loads it proves its bytes."""
        found = self._agents.call(reader, "resolve_checkpoint", folder.path, folder.pool)
        if not found["path"]:
            return None
        told = self._agents.call(reader, "describe_checkpoint", found["path"], folder.pool)
        return {"pool": folder.pool, "step": told["step"], **found}

    def is_sound(self, reader: str, found: Place) -> bool:
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
        reader, found = self._locate(source, "source")
        wanted = places.in_pool(target, "target")
        writer = self._node_of(wanted.pool, "target")
        moved = self.move((reader, found), writer, f"{wanted.path}/{PurePosixPath(found.path).name}", progress)
        name = PurePosixPath(found.path).name
        path = f"{wanted.pool}:{wanted.path}/{name}"
        return {"source": str(found), "target": path, **moved, "seconds": time.monotonic() - started}

    def move(
        self, source: tuple[str, Place], writer: str, final: str, progress: Progress | None = None
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

    def _text(self, reader: str, found: Place) -> bytes:
        """The manifest, in pieces of what one call carries."""
        pieces: list[bytes] = []
        path = f"{found.path}/{MANIFEST}"
        while not pieces or len(pieces[-1]) == CHUNK_BYTES:
            at = len(pieces) * CHUNK_BYTES
            if at > LARGEST_MANIFEST_BYTES:
                raise UserError(
                    f"{found.pool}:{path} has more than {LARGEST_MANIFEST_BYTES} bytes", "is it a checkpoint?"
                )
            pieces.append(self._agents.call(reader, "read_file", path, at, CHUNK_BYTES, found.pool))
        return b"".join(pieces)

    def _send(
        self,
        source: tuple[str, Place],
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

        for file, index in begun["missing"]:
            data = self._agents.actor(reader).read_file.remote(
                f"{found.path}/{file}", index * CHUNK_BYTES, CHUNK_BYTES, found.pool
            )
            pending.append(self._agents.actor(writer).write_chunk.remote(*to, file, index, data))
            if len(pending) >= IN_FLIGHT:
                settle()
        while pending:
            settle()
        return travelled

    def tool(self, verb: str, named: "dict[str, str]", options: "dict[str, Any]", progress: Progress) -> Any:
        """Run a tool (workers.checkpoint.tools) on a node that reaches its places: {argument: POOL:PATH or URI}.

        A place that is written decides on the node; the others must be readable there.
        """
        arguments: dict[str, Any] = dict(options)
        pools: list[str] = []
        for name, text in named.items():
            use = places.TOOLS[verb][name]
            place = places.parse(text, name) if use.stores else places.in_pool(text, name)
            if place.scheme:
                arguments[name] = {"uri": str(place)}
                continue
            path = place.path if use.written or use.whole else self._locate(str(place), name)[1].path
            arguments[name] = {"pool": place.pool, "path": path}
            pools.insert(0 if use.written else len(pools), place.pool)
        if not pools:
            raise SpecError("places", "none of them lies in a pool", "run it on paths of this machine, without a fleet")
        return self._watched(self._node_of(pools[0]), verb, arguments, progress)

    def _watched(self, node: str, verb: str, arguments: "dict[str, Any]", progress: Progress) -> Any:
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

    def _locate(self, ref: str, field: str = "checkpoint") -> tuple[str, Place]:
        """The node that serves the reference's pool, and the reference with a step folder for its path."""
        return self._resolved(ref, field)[:2]

    def _resolved(self, ref: str, field: str = "checkpoint") -> "tuple[str, Place, builtins.list[dict[str, str]]]":
        """As `_locate`, and the newer checkpoints of a folder that are passed over."""
        reference = places.in_pool(ref, field)
        node = self._node_of(reference.pool, field)
        found = self._agents.call(node, "resolve_checkpoint", reference.path, reference.pool)
        if not found["path"]:
            here = [row["path"] for row in self._agents.call(node, "checkpoints", "")]
            raise NotFound(f"no checkpoint at {reference}", nearest(reference.path, here))
        return node, Place(reference.pool, found["path"]), found["passed_over"]

    def _node_of(self, pool: str, field: str = "pool") -> str:
        serving = self._agents.of_pool(pool)
        if serving:
            return serving[0][0]
        known = sorted({a.facts.pool for _, a in self._agents.items() if a.facts})
        if pool in known:
            raise FleetError(
                f"no node of pool {pool!r} is up to reach its storage", "`polyfleet up` restarts lost nodes"
            )
        raise SpecError(field, f"no pool {pool!r}", nearest(pool, known))
