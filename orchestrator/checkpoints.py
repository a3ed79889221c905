"""Checkpoints between pools: found, checked and copied by the agents that see them; nothing is read here.

A reference is `POOL:PATH`, the path relative to the pool's storage: a step folder, or a folder of steps (then its
newest).
"""

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from cluster.errors import FleetError, NotFound, PolyfleetError, SpecError, nearest

if TYPE_CHECKING:
    from orchestrator.runtime.agents import Agents

PIECE_BYTES = 4 << 20
MANIFEST = "MANIFEST.json"
VERIFY_S = 3600.0
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Reference:
    """`path` is relative to the storage of `pool`, without `..`."""

    pool: str
    path: str

    def __str__(self) -> str:
        return f"{self.pool}:{self.path}"


def parse(text: str, field: str = "checkpoint") -> Reference:
    """Raises SpecError when it is not POOL:PATH or the path leaves the pool's storage."""
    pool, colon, path = text.partition(":")
    if not colon or not pool:
        raise SpecError(field, f"{text!r} names no pool", "write POOL:PATH, e.g. cpu:digits-3f9a2c")
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or path.startswith("/") or "\0" in path:
        raise SpecError(
            field, f"path {path!r} is not inside the pool's storage", "write it relative to the storage, without `..`"
        )
    return Reference(pool, str(PurePosixPath(path)))


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
        node, reference = self._locate(ref)
        return {
            "pool": reference.pool,
            **self._agents.call(node, "describe_checkpoint", reference.path, reference.pool),
        }

    def verify(self, ref: str) -> "dict[str, Any]":
        """Every byte against its digest, on a node of that pool. Raises CheckpointError naming file and chunk."""
        node, reference = self._locate(ref)
        return {
            "pool": reference.pool,
            **self._agents.call(node, "verify_checkpoint", reference.path, timeout_s=VERIFY_S),
        }

    def plan(self, ref: str, kind: str, count: int = 1) -> "dict[str, Any]":
        """What a device of `kind` would keep, convert or refuse."""
        node, reference = self._locate(ref)
        planned: dict[str, Any] = self._agents.call(node, "plan_checkpoint", reference.path, kind, count)
        return planned

    def newest(self, reader: str, folder: Reference) -> "dict[str, Any] | None":
        """Pool, path and step of the newest sound checkpoint in a folder, as node `reader` sees it."""
        path = self._agents.call(reader, "resolve_checkpoint", folder.path, folder.pool, timeout_s=VERIFY_S)
        if not path:
            return None
        told = self._agents.call(reader, "describe_checkpoint", path, folder.pool)
        return {"pool": folder.pool, "path": path, "step": told["step"]}

    def copy(self, source: str, target: str, to_kind: str = "", progress: Progress | None = None) -> "dict[str, Any]":
        """Copy one checkpoint into a folder of another pool and verify it there before it becomes visible."""
        started = time.monotonic()
        reader, found = self._locate(source, "source")
        wanted = parse(target, "target")
        writer = self._node_of(wanted.pool, "target")
        final = f"{wanted.path}/{PurePosixPath(found.path).name}"
        moved = self.move((reader, found), writer, final, progress)
        kind = to_kind or self._kind_of(writer)
        return {
            "source": str(found),
            "target": str(Reference(wanted.pool, final)),
            "step": self._agents.call(writer, "describe_checkpoint", final, wanted.pool)["step"],
            **moved,
            "seconds": time.monotonic() - started,
            "to_kind": kind,
            "plan": self.plan(str(Reference(wanted.pool, final)), kind),
        }

    def move(
        self, source: tuple[str, Reference], writer: str, final: str, progress: Progress | None = None
    ) -> "dict[str, Any]":
        """Bytes from agent to agent in bounded pieces; the server holds none. The manifest goes last, the rename
        commits.
        """
        if self._agents.call(writer, "has_checkpoint", final):
            self._agents.call(writer, "verify_checkpoint", final, timeout_s=VERIFY_S)
            return {"files": 0, "bytes": 0, "already_there": True, "verified": True}
        aside = str(PurePosixPath(final).with_name(f".incoming-{secrets.token_hex(4)}"))
        reader, found = source
        files = sorted(
            self._agents.call(reader, "list_files", found.path, found.pool), key=lambda f: f["path"] == MANIFEST
        )
        total, done = sum(f["bytes"] for f in files), 0
        try:
            for file in files:
                for offset in range(0, max(file["bytes"], 1), PIECE_BYTES):
                    piece = Reference(found.pool, f"{found.path}/{file['path']}")
                    done += self._piece((reader, piece), writer, f"{aside}/{file['path']}", offset)
                    if progress:
                        progress(done, total)
            self._agents.call(writer, "verify_checkpoint", aside, timeout_s=VERIFY_S)
            self._agents.call(writer, "commit_folder", aside, final)
        except BaseException:
            with suppress(PolyfleetError):  # the first error is the one to tell
                self._agents.call(writer, "discard_folder", aside)
            raise
        return {"files": len(files), "bytes": total, "already_there": False, "verified": True}

    def _piece(self, source: tuple[str, Reference], writer: str, to: str, offset: int) -> int:
        from orchestrator.runtime.agents import answer

        reader, file = source
        data = self._agents[reader].actor.read_file.remote(file.path, offset, PIECE_BYTES, file.pool)
        written: int = answer(
            self._agents[writer].actor.write_file.remote(to, offset, data), f"node {writer}: write_file", 120
        )
        return written

    def _locate(self, ref: str, field: str = "checkpoint") -> tuple[str, Reference]:
        """The node that serves the reference's pool, and the reference with a step folder for its path."""
        reference = parse(ref, field)
        node = self._node_of(reference.pool, field)
        step = self._agents.call(node, "resolve_checkpoint", reference.path, reference.pool, timeout_s=VERIFY_S)
        if not step:
            here = [row["path"] for row in self._agents.call(node, "checkpoints", "")]
            raise NotFound(f"no checkpoint at {reference}", nearest(reference.path, here))
        return node, Reference(reference.pool, step)

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

    def _kind_of(self, node: str) -> str:
        facts = self._agents[node].facts
        return facts.devices[0].kind if facts and facts.devices else "cpu"
