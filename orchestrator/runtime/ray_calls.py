"""Calls into Ray, each in a thread of its own: while the head does not answer they do not return, and take no time-out.

Calls of an actor's methods are not among them: they go to the actor's process, also while the head is away.
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

from cluster.connect import NO_CLUSTER_OF_ITS_OWN
from cluster.errors import FleetError

log = logging.getLogger(__name__)

os.environ.update(NO_CLUSTER_OF_ITS_OWN)  # before anything here imports Ray

MOST_THREADS = 64
"""More than all launches and releases can hold at once (runtime/command_executor.py): nodes are listed and fences
raised also while every launch waits for room.
"""
P = ParamSpec("P")
T = TypeVar("T")


class ClusterLeft(FleetError):
    """Whether what was asked for has happened there is not known."""

    def __init__(self, name: str):
        super().__init__(f"the cluster was left while Ray was asked to {name}", "ask again")
        self.args = (name,)


@dataclass(frozen=True, slots=True)
class Blocked:
    """A call that takes longer than it may: what it asks Ray for, and for how long it has waited."""

    name: str
    waiting_s: float


@dataclass(eq=False, slots=True)
class _Call:
    """Whoever sets `over` calls `done`, once, unless nobody waits any more; `given_up` gets a value that comes after
    that.
    """

    name: str
    make: Callable[[], Any]
    limit_s: float
    done: Callable[[Any, BaseException | None], None]
    given_up: Callable[[Any], None]
    asked_s: float = field(default_factory=time.monotonic)
    over: bool = False


class Engine:
    """Threads are made while all others are at work, up to `most`; further calls wait for one. Safe from any thread."""

    def __init__(self, most: int = MOST_THREADS):
        self.most = most
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._calls: set[_Call] = set()
        self._threads = self._idle = self._generation = 0
        self._here = threading.local()

    @property
    def cluster(self) -> int:
        """For a call, in its own thread: the number of the cluster of which it was asked; elsewhere, of the present."""
        return int(getattr(self._here, "generation", self._generation))

    @property
    def left(self) -> bool:
        """For a call, in its own thread: the cluster of which it was asked was left meanwhile."""
        return self.cluster != self._generation

    @property
    def late(self) -> bool:
        """For a call, in its own thread: nobody waits for what it returns any more."""
        call: _Call | None = getattr(self._here, "call", None)
        return call is not None and call.over

    @property
    def exhausted(self) -> bool:
        """Every thread is in a call: further calls are not made until one returns."""
        return self._threads - self._idle >= self.most

    def blocked(self) -> list[Blocked]:
        """The calls that are late, the longest first."""
        now = time.monotonic()
        with self._changed:
            late = [Blocked(c.name, now - c.asked_s) for c in self._calls if now - c.asked_s > c.limit_s]
        return sorted(late, key=lambda b: -b.waiting_s)

    def ask(self, name: str, make: Callable[[], Any], limit_s: float, answered: Callable[[Any], None]) -> None:
        """Does not wait. `answered` gets the value or the exception once, in another thread, also where that is late:
        past `limit_s`. When the cluster is left, it gets ClusterLeft in the thread that leaves.
        """
        self._begin(_Call(name, make, limit_s, lambda value, e: answered(value if e is None else e), _ignore))

    def run(
        self, name: str, make: Callable[[], Any], timeout_s: float, given_up: Callable[[Any], None] | None = None
    ) -> Any:
        """What `make` returns or raises. Raises FleetError after `timeout_s`, ClusterLeft. What comes later goes to
        `given_up`.
        """
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        call = _Call(name, make, timeout_s, lambda value, e: answer.put((value, e)), given_up or _ignore)
        self._begin(call)
        try:
            value, error = answer.get(timeout=timeout_s)
        except queue.Empty:
            with self._changed:
                late, call.over = not call.over, True
            if late:
                raise FleetError(
                    f"Ray gave no answer to {name} within {timeout_s:.0f} s",
                    "`polyfleet doctor` tells what the server waits for",
                ) from None
            value, error = answer.get()  # whoever was quicker is about to put it
        if error is not None:
            raise error
        return value

    def forget(self) -> None:
        """The cluster was left: whoever waits for what is still asked of it is told so, and the threads in there do not
        count.
        """
        with self._changed:
            self._generation += 1
            waited_for = [call for call in self._calls if not call.over]
            for call in waited_for:
                call.over = True
            self._calls.clear()
            self._waiting.clear()
            self._threads = self._idle = 0
            self._changed.notify_all()
        for call in waited_for:
            _done(call, None, ClusterLeft(call.name))

    def _begin(self, call: _Call) -> None:
        with self._changed:
            self._calls.add(call)
            self._waiting.append(call)
            if self._idle >= len(self._waiting):
                self._changed.notify()
            elif self._threads < self.most:
                self._threads += 1
                threading.Thread(target=self._work, args=(self._generation,), name="ray-calls", daemon=True).start()

    def _work(self, generation: int) -> None:
        self._here.generation = generation
        while (call := self._next(generation)) is not None:
            self._answer(call)

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

    def _answer(self, call: _Call) -> None:
        value, error = None, None
        self._here.call = call
        if not call.over:
            try:
                value = call.make()
            except BaseException as e:
                error = e
        with self._changed:
            self._calls.discard(call)
            late, call.over = call.over, True
        if not late:
            _done(call, value, error)
        elif value is not None:
            _given_up(call, value)


def _done(call: _Call, value: Any, error: BaseException | None) -> None:
    try:
        call.done(value, error)
    except Exception:
        log.exception("the answer to %s is dropped", call.name)


def _given_up(call: _Call, value: Any) -> None:
    try:
        call.given_up(value)
    except Exception:
        log.exception("what %s gave too late is not given back", call.name)


def _ignore(_: Any) -> None: ...


RAY = Engine()
"""Ray is one for the whole process, and so are the threads that wait for it."""


def in_time(
    name: str, timeout_s: float, given_up: Callable[[Any], None] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function that calls Ray is made in a thread of RAY. It may raise FleetError, when it takes too long."""

    def bound(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def bounded(*args: P.args, **kwargs: P.kwargs) -> T:
            made: T = RAY.run(name, lambda: function(*args, **kwargs), timeout_s, given_up)
            return made

        return bounded

    return bound
