"""Run calls into Ray in threads, with time limits.

While the head does not respond, such calls block, and they accept no timeout.

Actor method calls do not need this: they go directly to the actor's process, also while the head is away.
"""

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from cluster.errors import FleetError
from cluster.nodes.connect import NO_AUTO_CLUSTER

log = logging.getLogger(__name__)

os.environ.update(NO_AUTO_CLUSTER)  # before anything here imports Ray

MAX_THREADS = 64
"""More than all launches and releases can use at once (runtime/controller/command_executor.py), so that nodes can be
listed and fences raised while every launch waits for free resources.
"""
P = ParamSpec("P")
T = TypeVar("T")


class ClusterLeft(FleetError):
    """The cluster was left during a call. The call may have had an effect."""

    def __init__(self, name: str):
        super().__init__(f"the cluster was left during the call to {name}", "try again")
        self.args = (name,)


@dataclass(frozen=True, slots=True)
class Blocked:
    """A call that has exceeded its time limit."""

    name: str
    waiting_s: float


@dataclass(eq=False, slots=True)
class _Call:
    """A queued or running call.

    The code that sets `is_over` calls `done` once, unless the caller has stopped waiting; `on_late_value` gets a value
    that arrives after `is_over` was set.
    """

    name: str
    make: Callable[[], Any]
    limit_s: float
    done: Callable[[Any, BaseException | None], None]
    on_late_value: Callable[[Any], None]
    requested_s: float = field(default_factory=time.monotonic)
    is_over: bool = False


class RayCalls:
    """Thread pool for calls into Ray.

    Starts a thread if all others are busy, up to `max_threads`; further calls are queued. Thread-safe.
    """

    def __init__(self, max_threads: int = MAX_THREADS):
        self.max_threads = max_threads
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._calls: set[_Call] = set()
        self._threads = self._idle = self._generation = 0
        self._thread_state = threading.local()

    @property
    def cluster(self) -> int:
        """In the thread of a call: number of the cluster that the call is for.

        Elsewhere: of the current cluster.
        """
        return int(getattr(self._thread_state, "generation", self._generation))

    @property
    def is_left(self) -> bool:
        """In the thread of a call: whether the cluster that the call is for has been left."""
        return self.cluster != self._generation

    @property
    def is_late(self) -> bool:
        """In the thread of a call: whether its caller has stopped waiting for it."""
        call: _Call | None = getattr(self._thread_state, "call", None)
        return call is not None and call.is_over

    @property
    def exhausted(self) -> bool:
        """Whether every thread is in a call, so that further calls wait until one returns."""
        return self._threads - self._idle >= self.max_threads

    def blocked(self) -> list[Blocked]:
        """Calls that have exceeded their time limit, longest first."""
        now = time.monotonic()
        with self._changed:
            late_calls = [Blocked(c.name, now - c.requested_s) for c in self._calls if now - c.requested_s > c.limit_s]
        return sorted(late_calls, key=lambda b: -b.waiting_s)

    def submit(self, name: str, make: Callable[[], Any], limit_s: float, on_result: Callable[[Any], None]) -> None:
        """Start a call without waiting.

        `on_result` gets the value or exception once, in another thread, even if it arrives after `limit_s`. If the
        cluster is left, it gets ClusterLeft in the thread that leaves.
        """
        self._enqueue(_Call(name, make, limit_s, lambda value, e: on_result(value if e is None else e), _ignore))

    def call(
        self, name: str, make: Callable[[], Any], timeout_s: float, on_late_value: Callable[[Any], None] | None = None
    ) -> Any:
        """Call `make` in a pool thread and return its result.

        Raises its error, FleetError after `timeout_s`, or ClusterLeft. `on_late_value` gets a value that arrives later.
        """
        replies: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        call = _Call(name, make, timeout_s, lambda value, e: replies.put((value, e)), on_late_value or _ignore)
        self._enqueue(call)
        try:
            value, error = replies.get(timeout=timeout_s)
        except queue.Empty:
            with self._changed:
                is_late, call.is_over = not call.is_over, True
            if is_late:
                raise FleetError(
                    f"Ray did not respond to the request to {name} within {timeout_s:.0f} s",
                    "`polyfleet doctor` shows what the server waits for",
                ) from None
            value, error = replies.get()  # the call has just finished and is about to put its result
        if error is not None:
            raise error
        return value

    def abandon(self) -> None:
        """Abandon all calls to a cluster that was left.

        Waiting callers get ClusterLeft, and threads that are still in a call no longer count.
        """
        with self._changed:
            self._generation += 1
            abandoned = [call for call in self._calls if not call.is_over]
            for call in abandoned:
                call.is_over = True
            self._calls.clear()
            self._waiting.clear()
            self._threads = self._idle = 0
            self._changed.notify_all()
        for call in abandoned:
            _call_done(call, None, ClusterLeft(call.name))

    def _enqueue(self, call: _Call) -> None:
        with self._changed:
            self._calls.add(call)
            self._waiting.append(call)
            if self._idle >= len(self._waiting):
                self._changed.notify()
            elif self._threads < self.max_threads:
                self._threads += 1
                threading.Thread(target=self._work, args=(self._generation,), name="ray-calls", daemon=True).start()

    def _work(self, generation: int) -> None:
        self._thread_state.generation = generation
        while self._execute_next(generation):
            pass

    def _execute_next(self, generation: int) -> bool:
        """Return False if the thread shall end. A thread that waits holds nothing of its last call."""
        call = self._next(generation)
        if call is not None:
            self._execute(call)
        return call is not None

    def _next(self, generation: int) -> _Call | None:
        with self._changed:
            if generation != self._generation:
                return None
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or generation != self._generation)
            if generation != self._generation:
                return None
            self._idle -= 1
            return self._waiting.popleft()

    def _execute(self, call: _Call) -> None:
        value, error = None, None
        self._thread_state.call = call
        if not call.is_over:
            try:
                value = call.make()
            except BaseException as e:
                error = e
        self._thread_state.call = None
        with self._changed:
            self._calls.discard(call)
            is_late, call.is_over = call.is_over, True
        if not is_late:
            _call_done(call, value, error)
        elif value is not None:
            _call_late(call, value)


def _call_done(call: _Call, value: Any, error: BaseException | None) -> None:
    try:
        call.done(value, error)
    except Exception:
        log.exception("the result of the call to %s is dropped", call.name)


def _call_late(call: _Call, value: Any) -> None:
    try:
        call.on_late_value(value)
    except Exception:
        log.exception("the resources that a late call to %s returned could not be released", call.name)


def _ignore(_: Any) -> None: ...


RAY = RayCalls()
"""One for the process, as there is one Ray connection."""


def with_time_limit(
    name: str, timeout_s: float, on_late_value: Callable[[Any], None] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: run a function that calls Ray in a thread of RAY. It raises FleetError after `timeout_s`."""

    def bound(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def bounded(*args: P.args, **kwargs: P.kwargs) -> T:
            result: T = RAY.call(name, lambda: function(*args, **kwargs), timeout_s, on_late_value)
            return result

        return bounded

    return bound
