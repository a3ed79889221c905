"""Run checkpoint tools on a node, each in a child process that uses the pool's environment."""

import secrets
import threading
import time
from pathlib import Path
from typing import Any

from cluster.errors import Conflict, NotFound, PolyfleetError, UserError, nearest
from cluster.input import checkpoint_location
from workers.checkpoint.tool_table import NODE_TOOLS, TOOLS
from workers.processes.interpreter import interpreter
from workers.storage.pool_paths import error_with_pool_paths, with_pool_paths
from workers.storage.pool_storage import PoolStorage

POLL_TIMEOUT_S = 60.0
"""Time without a poll after which a tool is stopped: client or server is gone. A waiting client polls every 2 s."""
MAX_TOOLS = 4


class CheckpointTools:
    """Starts, polls and stops tools.

    Locations in `arguments` (see `locations` of a Tool) are {"pool", "path"} or {"uri"}. They are
    checked again here, since no client may name a path of the node itself. `readable` returns the storage of a pool.
    """

    def __init__(self, storage: PoolStorage, pool: str, readable: Any, forget_after_s: float = POLL_TIMEOUT_S):
        self._storage, self._pool, self._readable = storage, pool, readable
        self._poll_timeout_s = forget_after_s
        self._running: dict[str, _Running] = {}
        self._lock = threading.Lock()

    def start(self, verb: str, arguments: "dict[str, Any]") -> str:
        """Start a tool and return its id.

        Raises UserError, NotFound for a missing location, Conflict if too many run.
        """
        roots: dict[Path, str] = {}
        if verb not in NODE_TOOLS:
            raise UserError(f"no tool {verb!r} runs on a node", nearest(verb, NODE_TOOLS))
        locations = TOOLS[verb].locations
        resolved = {
            name: self._resolve(verb, name, value, roots) if name in locations else value
            for name, value in arguments.items()
        }
        with self._lock:
            self._drop_unpolled()
            if sum(not r.is_done for r in self._running.values()) >= MAX_TOOLS:
                raise Conflict(f"{MAX_TOOLS} tools run on this node already", "wait until one has finished")
            number = secrets.token_hex(8)
            self._running[number] = _Running(verb, resolved, roots, self._poll_timeout_s)
        return number

    def poll(self, number: str, cursor: int, timeout_s: float) -> "dict[str, Any]":
        """Wait up to `timeout_s` for a change after `cursor`, the `seen` of the last reply.

        Returns {"progress": [done, total] or None, "seen", "result"}. Raises the tool's own error. "result" or error
        are returned once only.
        """
        running = self._running.get(number)
        if running is None:
            raise NotFound(
                "this operation does not run on this node",
                "it was stopped or the agent restarted: run the command again",
            )
        fields = running.poll(cursor, timeout_s)
        if running.is_done:
            with self._lock:
                self._running.pop(number, None)
            if running.error is not None:
                raise error_with_pool_paths(running.error, running.roots)
            fields["result"] = with_pool_paths(running.result, running.roots)
        return fields

    def stop(self, number: str) -> None:
        """Stop a tool; its process ends within half a second."""
        with self._lock:
            running = self._running.pop(number, None)
        if running is not None:
            running.stop()

    def _resolve(self, verb: str, name: str, value: Any, roots: "dict[Path, str]") -> str:
        """Turn a location into the tool's argument. Adds the storage it is in to `roots`, with its pool."""
        use = TOOLS[verb].locations[name]
        match value:
            case {"uri": str(text)} if use.allows_stores and len(value) == 1:
                return str(checkpoint_location.parse_uri(text, name))
            case {"pool": str(pool), "path": str(path)} if len(value) == 2:
                pass
            case _:
                raise UserError(
                    f"{name}: {str(value)[:200]!r} is not a location that `{verb}` accepts", checkpoint_location.FORMS
                )
        if use.is_written and pool != self._pool:
            raise UserError(
                f"pool {pool!r} cannot be written from this node", "send the request to a node of that pool"
            )
        storage: PoolStorage = self._storage if use.is_written else self._readable(pool)
        roots[storage.root] = pool
        if (verb, name) == ("export", "target"):  # made by the tool itself
            return str(storage.create_file(path))
        return str(storage.make_folder(path) if use.is_written else storage.find(path))

    def _drop_unpolled(self) -> None:
        """Stop and drop tools that were not polled for too long, whether they run or have ended."""
        for number, running in list(self._running.items()):
            if running.is_unpolled:
                running.stop()
                del self._running[number]


class _Stopped(Exception):
    pass


class _Running:
    def __init__(self, verb: str, arguments: "dict[str, Any]", roots: "dict[Path, str]", forget_after_s: float):
        self.roots, self._poll_timeout_s = roots, forget_after_s
        self.result: Any = None
        self.error: PolyfleetError | None = None
        self.is_done = False
        self.polled_s = time.monotonic()
        self._progress: list[int] | None = None
        self._count, self._stopped = 0, False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, args=(verb, arguments), name=f"tool-{verb}", daemon=True).start()

    def poll(self, cursor: int, timeout_s: float) -> "dict[str, Any]":
        self.polled_s = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._count > cursor or self.is_done, timeout_s)
            return {"progress": self._progress, "seen": self._count, "result": None}

    @property
    def is_unpolled(self) -> bool:
        return time.monotonic() - self.polled_s > self._poll_timeout_s

    def stop(self) -> None:
        self._stopped = True

    def _run(self, verb: str, arguments: "dict[str, Any]") -> None:
        from workers.checkpoint.tools import run_in_child

        try:
            self.result = run_in_child(verb, arguments, self._on_progress, interpreter(), self._raise_if_stopped)
        except PolyfleetError as e:
            self.error = e
        except _Stopped:
            self.error = UserError("the tool was stopped")
        with self._changed:
            self.is_done = True
            self._changed.notify_all()

    def _raise_if_stopped(self) -> None:
        """Raise if the tool should stop. That ends its child, even while it reports no progress."""
        if self._stopped or self.is_unpolled:
            raise _Stopped

    def _on_progress(self, done: int, total: int) -> None:
        with self._changed:
            self._progress, self._count = [done, total], self._count + 1
            self._changed.notify_all()
