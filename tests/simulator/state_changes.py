"""Every change of an attempt, of a part or of a stop request, held to the tables of core/attempt/attempt_states.py.

A `StateWatch` makes steps with the real controller. It sees each write to the table of attempts, also those that a
later write of the same step hides, and each event that a message contains.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import cache, partial
from typing import Any, NamedTuple

from orchestrator.core.attempt.attempt_states import (
    ATTEMPT,
    FIRST,
    IGNORED_BY_ATTEMPT,
    IGNORED_BY_PART,
    IGNORED_BY_STOP,
    PART,
    STOP,
    AttemptState,
    PartState,
    stop_state,
)
from orchestrator.core.attempt.transitions import UNEXPECTED
from orchestrator.core.controller import commands as c
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.attempts import PHASE_ORDER, LiveAttempt, StopRequest
from orchestrator.core.controller.draft import Control, CopyOnWriteDict, Draft
from orchestrator.core.step import control as core
from tests.simulator.state_events import events_of

Problem = tuple[str, str]
"""(job, what is wrong)"""
Row = tuple[StrEnum, str]
Targets = Mapping[Row, StrEnum]

TABLES: dict[str, Targets] = {
    "attempt": {row: after for row, (after, _) in ATTEMPT.items()},
    "part": PART,
    "stop request": {row: after for row, (after, _) in STOP.items()},
}
COMMANDS = {row: command for table in (ATTEMPT, STOP) for row, (_, command) in table.items() if command}
IGNORED: frozenset[Row] = IGNORED_BY_ATTEMPT | IGNORED_BY_PART | IGNORED_BY_STOP
MESSAGES: dict[str, tuple[type, ...]] = {
    "launched": (m.Launched,),
    "launch_failed": (m.LaunchFailed,),
    "rejoined": (m.ClusterJoined,),
    "suspected": (m.Tick, m.FenceAnswered),
    "recovered": (m.Tick,),
    "timed_out": (m.Tick,),
    "fence_clear": (m.FenceAnswered,),
    "own_fence_read": (m.FenceAnswered,),
    "fence_above": (m.FenceAnswered,),
    "fence_raised": (m.FenceAnswered,),
    "fence_lowered": (m.FenceAnswered,),
    "concluded": (m.Heartbeat, m.PartUnreadable, m.Tick, m.FenceAnswered, m.Launched, m.LaunchFailed),
    "reported_starting": (m.Heartbeat,),
    "reported_running": (m.Heartbeat,),
    "reported_ended": (m.Heartbeat, m.PartUnreadable),
    "listed_unreported": (m.Heartbeat,),
    "listed_starting": (m.Heartbeat,),
    "listed_running": (m.Heartbeat,),
    "listed_unreadable": (m.Heartbeat,),
    "not_listed": (m.Heartbeat,),
    "unreadable": (m.PartUnreadable, m.Heartbeat),
    "start_unanswered": (m.LaunchFailed,),
    "not_started": (m.LaunchFailed,),
    "expired": (m.Tick, m.FenceAnswered),
}
"""Messages after which an event may happen. Events of stop requests are known exactly."""


class Observation(NamedTuple):
    """A change from `before` to `after` while a `message` was handled, or, without `after`, an event that came."""

    machine: str
    before: StrEnum
    after: StrEnum | None
    event: str = ""
    message: type | None = None

    def __str__(self) -> str:
        if self.after is None:
            return f"{self.machine} {self.before} gets the event {self.event}"
        cause = self.event or (self.message.__name__ if self.message else "")
        return f"{self.machine} changes from {self.before} to {self.after} by {cause}"


def explaining_rows(observed: Observation, table: Targets) -> list[Row]:
    """Return the rows of a table by which a change may have happened, or the row of an event that came."""
    if observed.after is None:
        return [row for row in ((observed.before, observed.event),) if row in table]
    rows = [row for row, after in table.items() if row[0] is observed.before and after is observed.after]
    return [row for row in rows if row[1] == observed.event or observed.message in MESSAGES.get(row[1], ())]


def is_explained(observed: Observation, table: Targets) -> bool:
    """Whether the table has a row for a change, or for an event that came, unless that may be ignored."""
    is_ignored = observed.after is None and (observed.before, observed.event) in IGNORED
    return is_ignored or bool(explaining_rows(observed, table))


@cache
def _rows(observed: Observation) -> tuple[Row, ...]:
    return tuple(explaining_rows(observed, TABLES[observed.machine]))


def attempt_state(attempt: LiveAttempt | None) -> AttemptState:
    """Return the state of an attempt; None is one that is no longer tracked."""
    return AttemptState.ENDED if attempt is None else attempt.state


class StateWatch:
    """Makes steps and collects what it sees in `observed`, and what no table explains in `problems`."""

    def __init__(self) -> None:
        self.observed: set[Observation] = set()
        self.problems: list[Problem] = []
        self._message: m.Message = m.Tick()
        self._due: Counter[tuple[str, ...]] = Counter()
        self._sent: Counter[tuple[str, ...]] = Counter()

    def step(self, control: Control, message: m.Message, now: m.Now) -> core.Step:
        """Handle a message as `step` of the controller does."""
        with self._watching(control, [message]):
            return core.step(control, message, now)

    def step_replies(self, control: Control, beats: Iterable[m.Heartbeat], now: m.Now) -> core.Step:
        """Handle replies of agents as `step_replies` of the controller does."""
        beats = list(beats)
        with self._watching(control, beats):
            return core.step_replies(control, beats, now)

    def take_problems(self) -> list[Problem]:
        problems, self.problems = self.problems, []
        return problems

    @contextmanager
    def _watching(self, control: Control, messages: "list[m.Message] | list[m.Heartbeat]") -> Iterator[None]:
        for message in messages:
            for job, machine, state, event in events_of(control, message):
                self._observe(job, Observation(machine, state, None, event))
        self._message, self._due, self._sent = messages[0], Counter(), Counter()
        core.Draft = partial(WatchedDraft, self)  # type: ignore[misc, assignment, attr-defined]
        try:
            yield
        finally:
            core.Draft = Draft  # type: ignore[misc, attr-defined]
        for key in (self._due - self._sent).keys() | (self._sent - self._due).keys():
            due, sent = self._due[key], self._sent[key]
            self.problems.append((key[1], f"its rows command {key} {due} times, and it was sent {sent} times"))

    def changed(self, before: LiveAttempt | None, after: LiveAttempt | None) -> None:
        """Observe a write to the table of attempts."""
        attempt = after or before
        assert attempt is not None
        if before is None:
            self._added(attempt)
            return
        old, new = before.state, attempt_state(after)
        if old is not new:
            self._observe(attempt.job, Observation("attempt", old, new, "", type(self._message)), attempt)
        for part, part_after in zip(before.parts, after.parts if after else (), strict=bool(after)):
            if part is not part_after and (old_part := part.state) is not (new_part := part_after.state):
                self._observe(attempt.job, Observation("part", old_part, new_part, "", type(self._message)))
        if after and before.stop_requests is not after.stop_requests:
            self._stops_changed(before, after)

    def _added(self, attempt: LiveAttempt) -> None:
        states = {attempt.state, *(part.state for part in attempt.parts)}
        if not states <= {AttemptState.LAUNCHING, *FIRST[PartState]}:
            self.problems.append((attempt.job, f"begins as {sorted(states)}"))

    def _stops_changed(self, before: LiveAttempt, after: LiveAttempt) -> None:
        for node in before.stop_requests.keys() | after.stop_requests.keys():
            old, new = before.stop_requests.get(node), after.stop_requests.get(node)
            if old != new:
                event = stop_event(old, new, self._message)
                self._observe(
                    after.job, Observation("stop request", stop_state(old), stop_state(new), event), after, node
                )

    def _observe(self, job: str, observed: Observation, attempt: LiveAttempt | None = None, node: str = "") -> None:
        self.observed.add(observed)
        rows = _rows(observed)
        if not rows and not is_explained(observed, TABLES[observed.machine]):
            self.problems.append((job, f"{observed}, which is in no table"))
        if attempt is not None and rows and (command := COMMANDS.get(rows[0])):
            self._due[command, job, str(attempt.epoch), node] += 1

    def sent(self, draft: Draft, command: c.Command) -> None:
        """Observe a command. Those about no tracked attempt follow no table.

        One about a fence for which no state changed belongs to a row that leads to the same state.
        """
        if isinstance(command, c.LogWarning):
            if command.text.startswith(UNEXPECTED):
                self.problems.append(("", command.text))
        elif isinstance(command, c.RemoveFiles):
            key = ("remove", command.job, str(command.epoch), "")
            if key in self._due:
                self._sent[key] = 1  # one for each part
        elif isinstance(command, c.Fence | c.Stop) and (attempt := draft.attempts.get(command.job)) is not None:
            epoch = str(attempt.epoch)
            if isinstance(command, c.Fence):
                name = "lower" if command.lower else "read" if command.epoch == attempt.epoch else "raise"
                key = (name, command.job, epoch, "")
                self._sent[key] += 1
                if self._sent[key] > self._due[key]:
                    state = attempt.state
                    same = Observation("attempt", state, state, "", type(self._message))
                    self._observe(command.job, same, attempt)
            elif command.epoch == attempt.epoch and command.node in {part.node for part in attempt.parts}:
                self._sent["stop", command.job, epoch, command.node] += 1


def stop_event(before: StopRequest | None, after: StopRequest | None, message: m.Message) -> str:
    """Return the event that changed a stop request."""
    if before is None or after is None:
        return "wanted" if before is None else "voided"
    if before.how != after.how:
        return "mode_changed"
    if isinstance(message, m.StopAnswered):
        return "failed" if message.error else "answered"
    return "timed_out"


class WatchedAttempts(CopyOnWriteDict[str, LiveAttempt]):
    def __init__(
        self, base: Mapping[str, LiveAttempt], changed: Callable[[LiveAttempt | None, LiveAttempt | None], None]
    ):
        super().__init__(base)
        self._changed_attempt = changed

    def __setitem__(self, key: str, value: LiveAttempt) -> None:
        self._changed_attempt(self.get(key), value)
        super().__setitem__(key, value)

    def pop(self, key: str) -> None:
        self._changed_attempt(self.get(key), None)
        super().pop(key)


class WatchedDraft(Draft):
    def __init__(self, watch: StateWatch, control: Control, now: m.Now):
        super().__init__(control, now)
        self._watch = watch
        self.attempts = WatchedAttempts(control.attempts, watch.changed)

    def command(self, *commands: Any) -> None:
        super().command(*commands)
        for command in commands:
            self._watch.sent(self, command)


def find_phase_regressions(before: Mapping[str, LiveAttempt], after: Mapping[str, LiveAttempt]) -> Iterator[Problem]:
    """Find parts whose phase returned to an earlier one. `before`, `after`: attempts before and after a cycle."""
    for job, attempt in after.items():
        previous = before.get(job)
        if previous is None or previous is attempt or previous.epoch != attempt.epoch:
            continue
        for rank, (old, new) in enumerate(zip(previous.parts, attempt.parts, strict=True)):
            if PHASE_ORDER.index(new.phase) < PHASE_ORDER.index(old.phase):
                yield job, f"part {rank} was {old.phase} and is {new.phase or 'unreported'}"
