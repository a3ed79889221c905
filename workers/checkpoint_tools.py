"""Tools for checkpoints on a node: each runs in a child of the pool's environment, and whoever asked looks in on it."""

import secrets
import threading
import time
from pathlib import Path
from typing import Any

from cluster import checkpoint_location
from cluster.checkpoint_location import TOOLS
from cluster.errors import Conflict, NotFound, PolyfleetError, UserError, nearest
from workers.interpreter import interpreter
from workers.pool_paths import error_with_pool_paths, with_pool_paths
from workers.pool_storage import PoolStorage

FORGET_AFTER_S = 60.0
"""A tool nobody asks about is ended: its client is gone, or the server is. One that waits asks every 2 s."""
MOST = 4


class CheckpointTools:
    """Places in `arguments` (cluster.checkpoint_location.TOOLS) are {"pool", "path"} or {"uri"}; `readable` gives
    the storage of a pool. They are parsed again here: a path of the node itself is nobody's to name from afar.
    """

    def __init__(self, storage: PoolStorage, pool: str, readable: Any, forget_after_s: float = FORGET_AFTER_S):
        self._storage, self._pool, self._readable = storage, pool, readable
        self._forget_after_s = forget_after_s
        self._running: dict[str, _Running] = {}
        self._lock = threading.Lock()

    def start(self, verb: str, arguments: "dict[str, Any]") -> str:
        """An id for `news`. Raises UserError, NotFound for a place that is not there, Conflict when too many run."""
        roots: dict[Path, str] = {}
        if verb not in TOOLS:
            raise UserError(f"no tool {verb!r} runs on a node", nearest(verb, tuple(TOOLS)))
        resolved = {
            name: self._resolve(verb, name, value, roots) if name in TOOLS[verb] else value
            for name, value in arguments.items()
        }
        with self._lock:
            self._drop_forgotten()
            if sum(not r.done for r in self._running.values()) >= MOST:
                raise Conflict(f"{MOST} tools run on this node already", "let one finish")
            number = secrets.token_hex(8)
            self._running[number] = _Running(verb, resolved, roots, self._forget_after_s)
        return number

    def news(self, number: str, seen: int, timeout_s: float) -> "dict[str, Any]":
        """{"progress": [done, total] or None, "seen", "result"} at news after `seen`, else after `timeout_s`.

        Raises the tool's own error. Both "result" and error are told once.
        """
        running = self._running.get(number)
        if running is None:
            raise NotFound(
                "this operation does not run on this node",
                "it was stopped or the agent restarted: run the command again",
            )
        told = running.news(seen, timeout_s)
        if running.done:
            with self._lock:
                self._running.pop(number, None)
            if running.error is not None:
                raise error_with_pool_paths(running.error, running.roots)
            told["result"] = with_pool_paths(running.result, running.roots)
        return told

    def stop(self, number: str) -> None:
        """Its process is ended within half a second."""
        with self._lock:
            running = self._running.pop(number, None)
        if running is not None:
            running.stop()

    def _resolve(self, verb: str, name: str, value: Any, roots: "dict[Path, str]") -> str:
        """What the tool is given for a place; a storage that it reaches is added to `roots`, with its pool."""
        use = TOOLS[verb][name]
        match value:
            case {"uri": str(text)} if use.stores and len(value) == 1:
                return str(checkpoint_location.parse_uri(text, name))
            case {"pool": str(pool), "path": str(path)} if len(value) == 2:
                pass
            case _:
                raise UserError(
                    f"{name}: {str(value)[:200]!r} is no place that `{verb}` takes", checkpoint_location.FORMS
                )
        if use.written and pool != self._pool:
            raise UserError(f"pool {pool!r} is not written from here", "ask a node of that pool")
        storage: PoolStorage = self._storage if use.written else self._readable(pool)
        roots[storage.root] = pool
        if (verb, name) == ("export", "target"):  # made by the tool itself
            return str(storage.new(path))
        return str(storage.make(path) if use.written else storage.find(path))

    def _drop_forgotten(self) -> None:
        """Those that ended because nobody asked, or that ended and nobody asked how."""
        for number, running in list(self._running.items()):
            if running.forgotten:
                running.stop()
                del self._running[number]


class _Stopped(Exception):
    pass


class _Running:
    def __init__(self, verb: str, arguments: "dict[str, Any]", roots: "dict[Path, str]", forget_after_s: float):
        self.roots, self._forget_after_s = roots, forget_after_s
        self.result: Any = None
        self.error: PolyfleetError | None = None
        self.done = False
        self.asked_s = time.monotonic()
        self._progress: list[int] | None = None
        self._count, self._stopped = 0, False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, args=(verb, arguments), name=f"tool-{verb}", daemon=True).start()

    def news(self, seen: int, timeout_s: float) -> "dict[str, Any]":
        self.asked_s = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._count > seen or self.done, timeout_s)
            return {"progress": self._progress, "seen": self._count, "result": None}

    @property
    def forgotten(self) -> bool:
        return time.monotonic() - self.asked_s > self._forget_after_s

    def stop(self) -> None:
        self._stopped = True

    def _run(self, verb: str, arguments: "dict[str, Any]") -> None:
        from workers.checkpoint.tools import run_in_child

        try:
            self.result = run_in_child(verb, arguments, self._tell, interpreter(), self._end_unwanted)
        except PolyfleetError as e:
            self.error = e
        except _Stopped:
            self.error = UserError("the tool was stopped")
        with self._changed:
            self.done = True
            self._changed.notify_all()

    def _end_unwanted(self) -> None:
        """The child is ended by what this raises, also while it tells no progress."""
        if self._stopped or self.forgotten:
            raise _Stopped

    def _tell(self, done: int, total: int) -> None:
        with self._changed:
            self._progress, self._count = [done, total], self._count + 1
            self._changed.notify_all()
