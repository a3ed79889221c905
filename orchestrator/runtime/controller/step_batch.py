"""Apply the messages of one cycle to the pure controller; store their events and metrics in one transaction.

If the transaction fails, none of the messages has had an effect.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from cluster.errors import FleetError
from orchestrator.core.attempt import story
from orchestrator.core.attempt.story import StoryLine
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import Command, Reject, StoreReport
from orchestrator.core.controller.draft import Control
from orchestrator.core.controller.messages import Now
from orchestrator.core.model import Event
from orchestrator.core.step import control
from orchestrator.runtime import crash_points
from orchestrator.runtime.clock import now
from orchestrator.runtime.controller.pending_request import PendingRequest
from orchestrator.runtime.jobs.jobs import Jobs, StoreUnavailable

log = logging.getLogger(__name__)

TICK_SHARE = 0.2
"""Maximum share of the controller's time for ticks, but a tick is delayed by at most CYCLE_S. With a thousand nodes a
tick checks thousands of attempts, and plans.
"""
CYCLE_S = 0.5

MAX_STORY_LINES = 10_000


class StoryRing:
    """The newest lines of the story of all jobs, for other threads (see core/attempt/story.py)."""

    def __init__(self, maximum: int = MAX_STORY_LINES):
        self._lock = threading.Lock()
        self._lines: deque[StoryLine] = deque(maxlen=maximum)

    def add(self, lines: list[StoryLine]) -> None:
        with self._lock:
            self._lines.extend(lines)

    def lines(self) -> list[StoryLine]:
        with self._lock:
            return list(self._lines)


class StepBatch:
    """Applies messages.

    `control`: the newest stored state. `story`: what followed from the newest messages. `tick_due_s`: when the next
    tick is due (monotonic).

    `stored` is called with each new state, `storing` before each write to the job store.
    """

    def __init__(
        self,
        jobs: Jobs,
        control: Control,
        stored: Callable[[Control], None],
        storing: Callable[[], None] = lambda: None,
    ):
        self._jobs, self._on_state, self._before_write = jobs, stored, storing
        self.control = control
        self.story = StoryRing()
        self.story.add([story.note("the server started", now().wall_s)])
        self.tick_due_s = 0.0

    def apply(self, items: list[Any]) -> list[Command]:
        """Apply the items, store their events and metrics, and return the other commands.

        Processed items are removed from `items`.

        Raises StoreUnavailable, with unprocessed items left in `items`. An item that can never be stored is dropped.
        """
        try:
            commands = self._apply(items)
        except StoreUnavailable:
            raise
        except Exception as e:
            if len(items) > 1:
                return self._apply_halves(items)
            log.exception("a message of kind %s is dropped: it cannot be stored", _kind(items[0]))
            if isinstance(items[0], PendingRequest):
                items[0].finish(_internal_error(e))
            commands = []
        del items[:]
        return commands

    def _apply_halves(self, items: list[Any]) -> list[Command]:
        """Apply two halves separately.

        Return the first half's commands even if the second cannot be stored now.
        """
        middle = len(items) // 2
        first, second = items[:middle], items[middle:]
        try:
            commands = self.apply(first)
        finally:
            items[:] = first + second
        try:
            return commands + self.apply(second)
        except StoreUnavailable as e:
            log.warning("some messages wait for the next cycle: %s", e)
            return commands
        finally:
            items[:] = second

    def _apply(self, items: list[Any]) -> list[Command]:
        state, events, commands, requests = self.control, list[Event](), list[Command](), list[PendingRequest]()
        at, lines = now(), list[story.StoryLine]()
        waiting = deque(_group_replies(items))
        while waiting:
            item = waiting.popleft()
            message = item.message if isinstance(item, PendingRequest) else item
            try:
                step = self._step(state, message, at)
            except Exception as e:
                if isinstance(message, list):  # one of them causes the error: apply them one by one
                    waiting.extendleft(reversed(message))
                    continue
                log.exception("a message of kind %s is dropped", _kind(item))
                if isinstance(item, PendingRequest):
                    item.error = _internal_error(e)
                    requests.append(item)
                continue
            lines += _story_lines(message, step, at)
            state = step.control
            events += step.events
            commands += step.commands
            if isinstance(item, PendingRequest):
                item.set_refusal(next((c for c in step.commands if isinstance(c, Reject)), None))
                requests.append(item)
        metrics = [command for command in commands if isinstance(command, StoreReport)]
        self._commit(events, metrics, state)
        self.story.add(lines)
        self._on_state(state)
        for request in requests:
            request.finish(request.error)
        return [command for command in commands if not isinstance(command, StoreReport)]

    def _step(self, state: Control, message: Any, at: Now) -> control.Step:
        if isinstance(message, list):
            return control.step_replies(state, (self._with_stored_jobs(beat, state) for beat in message), at)
        start_s = time.monotonic()
        step = control.step(state, self._with_stored_jobs(message, state), at)
        if isinstance(message, m.Tick):
            took_s = time.monotonic() - start_s
            self.tick_due_s = start_s + min(took_s / TICK_SHARE, took_s + CYCLE_S)
        return step

    def _commit(self, events: list[Event], metrics: list[StoreReport], state: Control) -> None:
        """Store the events, and with them the metrics: a user who sees that a job has ended can read all its metrics,
        and finds its devices free, because `state` is set before.

        Metrics without events are stored soon, because nothing waits for them.
        """
        _reach_crash_points(events, metrics, crash_points.BEFORE)
        if events:
            self._before_write()
            self._jobs.commit(events, metrics, lambda: self._set_state(state))
        else:
            self._jobs.queue_metrics(metrics)
            self._set_state(state)
        _reach_crash_points(events, metrics, crash_points.AFTER)

    def _set_state(self, state: Control) -> None:
        self.control = state

    def _with_stored_jobs(self, message: Any, state: Control) -> Any:
        """Add to an agent's reply which of its jobs are in the store, in addition to those open in `state`."""
        if not isinstance(message, m.Heartbeat):
            return message
        unknown = {status.job for status in message.reports if status.job not in state.records}
        if not unknown:
            return message
        return replace(message, stored_jobs=frozenset(job for job in unknown if job in self._jobs))


def _reach_crash_points(events: list[Event], metrics: list[StoreReport], side: str) -> None:
    for event in events:
        crash_points.point(crash_points.event_point(event.event, side))
    for command in metrics:
        crash_points.point(crash_points.command_point(command, side))


def _story_lines(message: Any, step: control.Step, at: Now) -> list[story.StoryLine]:
    messages = message if isinstance(message, list) else [message]
    return story.lines_of(messages, step.control.messages, step.transitions, step.commands, at.wall_s)


def _group_replies(items: list[Any]) -> Iterator[Any]:
    """Yield items in order, with consecutive replies of agents as one list."""
    for are_beats, group in groupby(items, lambda item: isinstance(item, m.Heartbeat)):
        if are_beats:
            yield list(group)
        else:
            yield from group


def _kind(item: Any) -> str:
    return type(item.message if isinstance(item, PendingRequest) else item).__name__


def _internal_error(error: Exception) -> FleetError:
    return FleetError(f"internal error: {error!r}", "its traceback is in the server's log")
