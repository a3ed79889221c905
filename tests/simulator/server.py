"""Simulated server: applies the real `step` to an inbox, then executes the commands.

Each cycle is one transaction. Cycles work as in runtime/controller/step_batch.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from orchestrator.core.attempt.story import lines_of
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import Command
from orchestrator.core.controller.draft import Control
from orchestrator.core.jobs.fold import submitted
from orchestrator.core.model import Event, Job
from orchestrator.core.step import control as core
from orchestrator.runtime import crash_points
from tests.simulator.agent_poller import RETRY_S, AgentPolling
from tests.simulator.command_executor import SimulatedExecutor
from tests.simulator.state_changes import StateWatch
from tests.simulator.store import SimulatedStoreError

if TYPE_CHECKING:
    from tests.simulator.world import Simulation

TICK_S = 0.5
LIST_S = 1.0
RESERVED_S = 30.0
CYCLE_S = (0.002, 0.02, 0.02, 0.3)
"""Choices for the time within which messages share a cycle; the last is that of a busy server."""
DISCONNECT_S = 8.0
"""Seconds without Ray after which the server counts as disconnected from the cluster."""
DOUBLED = (
    m.Heartbeat,
    m.Launched,
    m.LaunchFailed,
    m.StopAnswered,
    m.FenceAnswered,
    m.ReleaseAnswered,
    m.ReservationsListed,
    m.AgentStarted,
    m.AgentDied,
    m.NodeRequestAnswered,
)


class ProcessEnded(Exception):
    """The server's process ends at this point."""


class SimulatedServer:
    """The server.

    `life`: number of its current process; actions that an earlier process had not sent are dropped.
    """

    def __init__(self, world: "Simulation"):
        self.world, self.store = world, world.store
        self.control = Control()
        self.watch = StateWatch()
        self.up = self.frozen = False
        self.life = self.generation = 0
        self.clock_s = 0.0
        self.inbox: list[tuple[m.Message, Callable[[], None] | None]] = []
        self.joined = False
        self._delayed: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._cycle_s = world.rng.choice(CYCLE_S)
        self._ticks_each_turn = world.rng.random() < 0.25  # as an idle server does; a busy one has no time for it
        self._is_in_cycle = False
        self._executor, self.polling = SimulatedExecutor(self), AgentPolling(self)

    def now(self) -> m.Now:
        return m.Now(self.world.now_s + self.clock_s, self.world.wall_s)

    def start(self) -> None:
        """Start a new process, with its state from the store."""
        if self.up:
            return
        self.life += 1
        self.up, self.frozen, self.joined, self._is_in_cycle = True, False, False, False
        self.inbox, self._delayed = [], []
        self._executor, self.polling = SimulatedExecutor(self), AgentPolling(self)
        self.clock_s = self.world.rng.uniform(0.0, 1e5)
        self.generation = self.store.next_generation(max(g.generation for g in self.world.machines))
        records = self.store.open()
        self.control = core.control_from_log(records, self.store.drained(), self.store.last_position, self.now())
        self.later(0.2, self._tick)
        self.later(0.3, self._list)
        self.later(5.0, self._reserved)

    def kill(self) -> None:
        if self.up:
            self.up = False
            self.life += 1
            self.world.note("the server's process ended")
            self.world.after(self.world.rng.choice((0.5, 2.0, 15.0)), self.start)

    def freeze(self, seconds: float) -> None:
        if self.up and not self.frozen:
            self.frozen = True
            self.world.after(seconds, self._thaw, self.life)

    def _thaw(self, life: int) -> None:
        if life == self.life and self.frozen:
            self.frozen = False
            delayed, self._delayed = self._delayed, []
            for action, arguments in delayed:
                self.later(0.0, action, *arguments)

    def later(self, delay_s: float, action: Callable[..., Any], *arguments: Any) -> None:
        """Run an action later, unless this process has ended by then."""
        self.world.after(delay_s, self._run_in_life, self.life, action, arguments)

    def _run_in_life(self, life: int, action: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if life != self.life:
            return
        if self.frozen:
            self._delayed.append((action, arguments))
            return
        try:
            action(*arguments)
        except ProcessEnded:
            self.kill()

    def pass_crash_point(self, point: str) -> None:
        """Pass a crash point. Raises ProcessEnded if the world wants the process to end here."""
        if self.world.crashes_at(point):
            raise ProcessEnded(point)

    def answered(self, job: Job) -> bool:
        """Whether the key of this request has a stored response, which does not depend on the job's state."""
        return job.id in self.store.records

    def submit(self, job: Job) -> bool:
        """Submit a job as the HTTP threads do. The job is acknowledged once this returns True."""
        if not self.up or self.frozen:
            return False
        if self.answered(job):
            return True
        before = {job.id: self.store.records.get(job.id)}
        try:
            self.pass_crash_point(crash_points.event_point("submitted", crash_points.BEFORE))
            stored = self.store.append([submitted(job, {}, self.world.wall_s)])
            self.world.checks.check_transaction(stored, before)
            self.pass_crash_point(crash_points.event_point("submitted", crash_points.AFTER))
        except SimulatedStoreError:
            return False
        except ProcessEnded:
            self.kill()
            return False
        self.receive(m.Submitted((self.store.records[job.id],)))
        return True

    def receive(self, message: m.Message, on_done: Callable[[], None] | None = None) -> None:
        if not self.up:
            return
        self.inbox.append((message, on_done))
        if not self._is_in_cycle:
            self._is_in_cycle = True
            self.later(self._cycle_s, self._cycle)

    def receive_external(self, message: m.Message) -> None:
        """Receive a message from outside; it may be doubled, the second one much later."""
        self.receive(message)
        faults, rng = self.world.faults, self.world.rng
        if faults.doubled and isinstance(message, DOUBLED) and rng.random() < faults.doubled:
            self.later(rng.choice((0.01, 1.0, 10.0, 30.0)), self.receive, message)

    def _cycle(self) -> None:
        received, self.inbox = self.inbox, []
        if self._ticks_each_turn and not any(isinstance(message, m.Tick) for message, _ in received):
            received.append((self._time_passed(), None))
        control, now = self.control, self.now()
        events: list[Event] = []
        commands: list[Command] = []
        for group in _group([message for message, _ in received]):
            before = control
            control, step_events, step_commands, transitions = self._step(before, group, now)
            self.world.add_lines(lines_of(group, control.messages, transitions, step_commands, now.wall_s))
            self.world.checks.check_state(control, self.watch.take_problems())
            if step_events or step_commands:
                self.world.checks.check_step(before, step_events, step_commands, control)
            events += step_events
            commands += step_commands
        try:
            if events:
                records_before = {event.job: self.store.records.get(event.job) for event in events}
                for event in events:
                    self.pass_crash_point(crash_points.event_point(event.event, crash_points.BEFORE))
                stored = self.store.append(events)
                self.world.checks.check_transaction(stored, records_before)
                for event in events:
                    self.pass_crash_point(crash_points.event_point(event.event, crash_points.AFTER))
        except SimulatedStoreError:
            self.world.note("the store failed, so these messages are handled again")
            self.inbox = [(x, on_done) for x, on_done in received if not isinstance(x, m.Tick)] + self.inbox
            self.later(RETRY_S, self._cycle)
            return
        self._is_in_cycle = False
        before, self.control = self.control, control
        self.world.checks.check_cycle(before, control, [message for message, _ in received], events)
        for _, on_done in received:
            if on_done:
                on_done()
        for command in commands:
            self.pass_crash_point(crash_points.command_point(command, crash_points.BEFORE))
            self._executor.execute(command)
            self.pass_crash_point(crash_points.command_point(command, crash_points.AFTER))

    def _step(self, control: Control, group: Sequence[m.Message], now: m.Now) -> core.Step:
        try:
            if isinstance(group[0], m.Heartbeat):
                beats = (self._with_stored_jobs(beat, control) for beat in group if isinstance(beat, m.Heartbeat))
                return self.watch.step_replies(control, beats, now)
            return self.watch.step(control, group[0], now)
        except Exception as e:
            self.world.checks.failed(group[0], e)

    def _with_stored_jobs(self, beat: m.Heartbeat, control: Control) -> m.Heartbeat:
        """Add to an agent's reply which of its jobs are in the store, in addition to the open ones."""
        unknown = {status.job for status in beat.reports} - control.records.keys()
        return replace(beat, stored_jobs=frozenset(unknown & self.store.records.keys())) if unknown else beat

    def _tick(self) -> None:
        self.later(TICK_S, self._tick)
        self.receive(self._time_passed())

    def _time_passed(self) -> m.Tick:
        if not self.joined:
            return m.Tick(problem="no fleet is up")
        running = frozenset(machine.label for machine in self.world.machines if machine.ray_id)
        recorded = frozenset(machine.label for machine in self.world.machines if machine not in self.world.grown)
        trouble = "Ray's head does not respond" if self.world.ray.is_away else ""
        fields: dict[str, Any] = {"expected": running, "recorded": recorded, "restarts_nodes": True}
        return m.Tick(problem=trouble, groups=self.world.groups, projects=self.world.projects, **fields)

    def _list(self) -> None:
        self.later(LIST_S, self._list)
        ray = self.world.ray
        away_s = self.world.now_s - ray.away_s if ray.is_away else 0.0
        if self.joined and (away_s > DISCONNECT_S or ray.head != self._head):
            self.joined = False
            is_over = ray.head != self._head
            self._executor.fences.abandon()
            if is_over:
                self.polling.agents = {}
                self._executor.agent_ids = {}
            self.receive(m.ClusterLeft(is_over))
        elif not self.joined and not ray.is_away:
            self.joined, self._head = True, ray.head
            self.receive(m.ClusterJoined())
        if self.joined and not ray.is_away:
            self.receive_external(m.NodesListed(ray.nodes()))

    _head = 0

    def _reserved(self) -> None:
        self.later(RESERVED_S, self._reserved)
        if self.joined and not self.world.ray.is_away:
            self.receive_external(m.ReservationsListed(frozenset(self.world.ray.reserved)))


def _group(messages: list[m.Message]) -> Iterator[Sequence[m.Message]]:
    """Yield submissions as one message, then the others in order; consecutive agent replies are one group."""
    if new := tuple(
        record for submission in messages if isinstance(submission, m.Submitted) for record in submission.records
    ):
        yield [m.Submitted(new)]
    others = (message for message in messages if not isinstance(message, m.Submitted))
    for are_beats, group in groupby(others, lambda message: isinstance(message, m.Heartbeat)):
        if are_beats:
            yield list(group)
        else:
            yield from ([message] for message in group)
