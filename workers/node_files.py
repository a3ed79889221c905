"""What an agent answers about the files of its node: packages of jobs, its pool's storage, and checkpoints in it."""

from typing import Any

from cluster.errors import NotFound
from workers.checkpoint_tools import CheckpointTools
from workers.discovery.facts import Place
from workers.incoming_checkpoints import IncomingCheckpoints
from workers.packages import Packages
from workers.storage import Storage
from workers.stored_checkpoints import StoredCheckpoints


class NodeFiles:
    """Its public methods are calls of the agent: arguments and results are plain data."""

    def __init__(self, place: Place):
        self._place = place
        self._storage = Storage(place.storage)
        self._packages = Packages(place.node_dir / "packages")
        self._checkpoints = StoredCheckpoints(self._storage, place.pool)
        self._incoming = IncomingCheckpoints(self._storage, place.pool)
        self._tools = CheckpointTools(self._storage, place.pool, self._readable)

    def has_package(self, sha: str) -> bool:
        return self._packages.has(sha)

    def put_package(self, sha: str, offset: int, data: bytes, last: bool) -> None:
        """One piece of a submitted archive; after the last one it is checked. Raises Conflict, UserError."""
        self._packages.put(sha, offset, data, last)

    def idle_packages(self) -> list[str]:
        """Those that nobody used for an hour."""
        return self._packages.idle()

    def remove_packages(self, names: list[str]) -> None:
        """Those of them that are still idle: no job names them any more."""
        self._packages.remove(map(str, names))

    def read_file(self, path: str, offset: int, limit_bytes: int, pool: str = "") -> bytes:
        return self._readable(pool).read(path, offset, limit_bytes)

    def _readable(self, pool: str) -> Storage:
        """Its own pool's storage (also for ""), or that of a neighbour on the same machine. Raises NotFound."""
        if pool in ("", self._place.pool):
            return self._storage
        if pool not in self._place.neighbours:
            raise NotFound(f"pool {pool!r} cannot be read from node {self._place.node}", "ask a node of that pool")
        return Storage(self._place.neighbours[pool])

    def begin_checkpoint(self, folder: str, name: str, manifest: bytes) -> dict[str, Any]:
        """A checkpoint of that manifest is to arrive in `folder`: which chunks are missing here."""
        return self._incoming.begin(folder, name, manifest)

    def write_chunk(self, folder: str, name: str, file: str, index: int, data: bytes) -> int:
        return self._incoming.write(folder, name, file, index, data)

    def commit_checkpoint(self, folder: str, name: str) -> None:
        self._incoming.commit(folder, name)

    def leave_checkpoint(self, folder: str, name: str) -> None:
        self._incoming.leave(folder, name)

    def start_tool(self, verb: str, arguments: dict[str, Any]) -> str:
        return self._tools.start(verb, arguments)

    def tool_news(self, number: str, seen: int, timeout_s: float) -> dict[str, Any]:
        return self._tools.news(number, seen, timeout_s)

    def stop_tool(self, number: str) -> None:
        self._tools.stop(number)

    def checkpoints(self, prefix: str) -> list[dict[str, Any]]:
        return self._checkpoints.list(prefix)

    def resolve_checkpoint(self, path: str, pool: str = "") -> dict[str, Any]:
        """Which checkpoint is meant: `path` itself, or the newest of a folder of them. No tensor is read."""
        return self._stored(pool).step(path)

    def describe_checkpoint(self, path: str, pool: str = "") -> dict[str, Any]:
        return self._stored(pool).describe(path)

    def verify_checkpoint(self, path: str, pool: str = "") -> dict[str, Any]:
        """Every byte; what is damaged is marked as such. Raises CheckpointError."""
        return self._stored(pool).verify(path)

    def damaged_checkpoints(self) -> list[dict[str, str]]:
        return self._checkpoints.damaged()

    def _stored(self, pool: str) -> StoredCheckpoints:
        return StoredCheckpoints(self._readable(pool), pool or self._place.pool)

    def plan_checkpoint(self, path: str, kind: str, count: int) -> dict[str, Any]:
        return self._checkpoints.plan(path, kind, count)
