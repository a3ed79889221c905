"""Calls into Ray, each in a thread of its own: while the head does not answer they do not return, and take no time-out.

Calls of an actor's methods are not among them: they go to the actor's process, also while the head is away.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from cluster.errors import FleetError

log = logging.getLogger(__name__)

MOST_THREADS = 32
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Blocked:
    """A call that takes longer than it may: what it asks Ray for, and for how long it has waited."""

    name: str
    waiting_s: float


@dataclass(eq=False, slots=True)
class _Call:
    """`done` gets the value or the exception once, in the thread that made the call; `given_up` gets a value for which
    nobody waits any more (`over`).
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
        """Does not wait. `answered` gets the value or the exception, in another thread; past `limit_s` it is late."""
        self._begin(_Call(name, make, limit_s, lambda value, e: answered(value if e is None else e), _ignore))

    def run(
        self, name: str, make: Callable[[], Any], timeout_s: float, given_up: Callable[[Any], None] | None = None
    ) -> Any:
        """What `make` returns or raises. Raises FleetError after `timeout_s`; a value that comes later goes to
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
            value, error = answer.get()
        if error is not None:
            raise error
        return value

    def forget(self) -> None:
        """The cluster was left: nobody waits for what is still asked of it, and the threads in there do not count."""
        with self._changed:
            self._generation += 1
            for call in self._calls:
                call.over = True
            self._calls.clear()
            self._waiting.clear()
            self._threads = self._idle = 0
            self._changed.notify_all()

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
        while (call := self._next(generation)) is not None:
            try:
                self._answer(call)
            except Exception:
                log.exception("the answer to %s is dropped", call.name)

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
        if not call.over:
            try:
                value = call.make()
            except BaseException as e:
                error = e
        with self._changed:
            self._calls.discard(call)
            late, call.over = call.over, True
        if not late:
            call.done(value, error)
        elif value is not None:
            call.given_up(value)


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
