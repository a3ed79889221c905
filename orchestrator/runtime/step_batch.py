"""Steps of the pure controller, made of what came in a turn: all that follows from it is stored at once, or nothing
of it has happened.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from cluster.errors import FleetError
from orchestrator.core import control
from orchestrator.core import messages as m
from orchestrator.core.commands import Command, Refuse
from orchestrator.core.draft import Control
from orchestrator.core.messages import Now
from orchestrator.core.model import Event
from orchestrator.runtime import crash_hook
from orchestrator.runtime.jobs import Jobs, NotStored
from orchestrator.runtime.pending_request import Ask

log = logging.getLogger(__name__)

TICK_SHARE = 0.2
"""Of the controller's time that ticks may take, unless that made one wait longer than TURN_S: with a thousand nodes it
looks at thousands of attempts, and plans.
"""
TURN_S = 0.5


def now() -> Now:
    return Now(time.monotonic(), time.time())


class Steps:
    """`control` is the newest state, and `stored` is told it; the next tick is due at `tick_due_s`. `storing` is called
    before the job store is waited for.
    """

    def __init__(
        self, jobs: Jobs, begun: Control, stored: Callable[[Control], None], storing: Callable[[], None] = lambda: None
    ):
        self._jobs, self._stored, self._storing = jobs, stored, storing
        self.control = begun
        self.tick_due_s = 0.0

    def take(self, items: list[Any]) -> list[Command]:
        """All of a turn is stored at once, or nothing of it has happened. What is done with leaves `items`: raises
        NotStored, with the others in it. Where one of them cannot be stored at all, only that one is dropped.
        """
        try:
            commands = self._take(items)
        except NotStored:
            raise
        except Exception as e:
            if len(items) > 1:
                return self._take_halves(items)
            log.exception("a message of kind %s is dropped: it cannot be stored", _kind(items[0]))
            if isinstance(items[0], Ask):
                items[0].answer(_internal(e))
            commands = []
        del items[:]
        return commands

    def _take_halves(self, items: list[Any]) -> list[Command]:
        """What the first half led to is carried out, also where the store does not take the second just now."""
        middle = len(items) // 2
        first, second = items[:middle], items[middle:]
        try:
            commands = self.take(first)
        finally:
            items[:] = first + second
        try:
            return commands + self.take(second)
        except NotStored as e:
            log.warning("a part of what came waits: %s", e)
            return commands
        finally:
            items[:] = second

    def _take(self, items: list[Any]) -> list[Command]:
        state, events, commands, asks = self.control, list[Event](), list[Command](), list[Ask]()
        at = now()
        waiting = deque(_together(items))
        while waiting:
            item = waiting.popleft()
            message = item.message if isinstance(item, Ask) else item
            try:
                done = self._step(state, message, at)
            except Exception as e:
                if isinstance(message, list):  # of which one is at fault
                    waiting.extendleft(reversed(message))
                    continue
                log.exception("a message of kind %s is dropped", _kind(item))
                if isinstance(item, Ask):
                    item.error = _internal(e)
                    asks.append(item)
                continue
            state = done.control
            events += done.events
            commands += done.commands
            if isinstance(item, Ask):
                item.refused(next((c for c in done.commands if isinstance(c, Refuse)), None))
                asks.append(item)
        self._commit(events)
        self.control = state
        self._stored(state)
        for ask in asks:
            ask.answer(ask.error)
        return commands

    def _step(self, state: Control, message: Any, at: Now) -> control.Step:
        if isinstance(message, list):
            return control.heard(state, (self._known(beat, state) for beat in message), at)
        begun_s = time.monotonic()
        done = control.step(state, self._known(message, state), at)
        if isinstance(message, m.Tick):
            took_s = time.monotonic() - begun_s
            self.tick_due_s = begun_s + min(took_s / TICK_SHARE, took_s + TURN_S)
        return done

    def _commit(self, events: list[Event]) -> None:
        for event in events:
            crash_hook.point(f"event:{event.event}:before")
        if events:
            self._storing()
            self._jobs.commit(events)
        for event in events:
            crash_hook.point(f"event:{event.event}:after")

    def _known(self, message: Any, state: Control) -> Any:
        """An agent's answer with which of its jobs the store has, beside those that are open in `state`."""
        if not isinstance(message, m.Heartbeat):
            return message
        others = {report.job for report in message.reports if report.job not in state.records}
        if not others:
            return message
        return replace(message, known=frozenset(job for job in others if job in self._jobs))


def _together(items: list[Any]) -> Iterator[Any]:
    """In their order; answers of agents that follow each other as a list."""
    for are_beats, some in groupby(items, lambda item: isinstance(item, m.Heartbeat)):
        if are_beats:
            yield list(some)
        else:
            yield from some


def _kind(item: Any) -> str:
    return type(item.message if isinstance(item, Ask) else item).__name__


def _internal(error: Exception) -> FleetError:
    return FleetError(f"internal error: {error!r}", "its traceback is in the server's log")
