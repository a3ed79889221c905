"""The server, simulated: the real `step` over an inbox, turns of one transaction each, commands carried out after. It
makes its turns as runtime/step_batch.py does.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from orchestrator.core import control as core
from orchestrator.core import crash_points
from orchestrator.core import messages as m
from orchestrator.core.commands import Command
from orchestrator.core.draft import Control
from orchestrator.core.fold import submitted
from orchestrator.core.model import Event, Job
from orchestrator.simulate.agent_poller import AGAIN_S, AgentPolling
from orchestrator.simulate.command_executor import CommandExecutor
from orchestrator.simulate.store import SimulatedStoreError

if TYPE_CHECKING:
    from orchestrator.simulate.world import Simulation

TICK_S = 0.5
LIST_S = 1.0
RESERVED_S = 30.0
TURN_S = (0.002, 0.02, 0.02, 0.3)
"""What comes within this time shares a turn; the last is of a server that has much to do."""
PARTED_S = 8.0
"""Ray away for so long: we are no longer joined."""
DOUBLED = (
    m.Heartbeat,
    m.Launched,
    m.LaunchFailed,
    m.Stopped,
    m.Fenced,
    m.Released,
    m.Reserved,
    m.AgentMade,
    m.AgentDied,
    m.NodesAsked,
)


class Dead(Exception):
    """The process ended here."""


class Server:
    """`life` numbers its processes: what an earlier one began and had not sent is not done."""

    def __init__(self, world: "Simulation"):
        self.world, self.store = world, world.store
        self.control = Control()
        self.up = self.frozen = False
        self.life = self.generation = 0
        self.clock_s = 0.0
        self.inbox: list[tuple[m.Message, Callable[[], None] | None]] = []
        self.joined = False
        self._held: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._turn_s = world.rng.choice(TURN_S)
        self._ticks_each_turn = world.rng.random() < 0.25  # an idle server does, a busy one has no time for it
        self._turning = False
        self._carrying, self.watching = CommandExecutor(self), AgentPolling(self)

    def now(self) -> m.Now:
        return m.Now(self.world.now_s + self.clock_s, self.world.wall_s)

    def start(self) -> None:
        """A new process: what it knows comes from the store."""
        if self.up:
            return
        self.life += 1
        self.up, self.frozen, self.joined, self._turning = True, False, False, False
        self.inbox, self._held = [], []
        self._carrying, self.watching = CommandExecutor(self), AgentPolling(self)
        self.clock_s = self.world.rng.uniform(0.0, 1e5)
        self.generation = self.store.next_generation(max(g.generation for g in self.world.machines))
        records = self.store.open()
        self.control = core.resumed(records, self.store.drained(), self.store.told_at, self.now())
        self.later(0.2, self._tick)
        self.later(0.3, self._list)
        self.later(5.0, self._reserved)

    def kill(self) -> None:
        if self.up:
            self.up = False
            self.life += 1
            self.world.note("server", "killed")
            self.world.after(self.world.rng.choice((0.5, 2.0, 15.0)), self.start)

    def freeze(self, seconds: float) -> None:
        if self.up and not self.frozen:
            self.frozen = True
            self.world.after(seconds, self._thaw, self.life)

    def _thaw(self, life: int) -> None:
        if life == self.life and self.frozen:
            self.frozen = False
            held, self._held = self._held, []
            for action, arguments in held:
                self.later(0.0, action, *arguments)

    def later(self, delay_s: float, action: Callable[..., Any], *arguments: Any) -> None:
        """In this process, or not at all."""
        self.world.after(delay_s, self._mine, self.life, action, arguments)

    def _mine(self, life: int, action: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if life != self.life:
            return
        if self.frozen:
            self._held.append((action, arguments))
            return
        try:
            action(*arguments)
        except Dead:
            self.kill()

    def reach(self, point: str) -> None:
        """Raises Dead where the world wants the process to end."""
        if self.world.crashes_at(point):
            raise Dead(point)

    def answered(self, job: Job) -> bool:
        """Whether the key of this request has an answer: it comes again, however its job stands by now."""
        return job.id in self.store.records

    def submit(self, job: Job) -> bool:
        """As the threads of HTTP do it. Once this returns True the job is acknowledged."""
        if not self.up or self.frozen:
            return False
        if self.answered(job):
            return True
        had = {job.id: self.store.records.get(job.id)}
        try:
            self.reach(crash_points.of_event("submitted", crash_points.BEFORE))
            stored = self.store.append([submitted(job, {}, self.world.wall_s)])
            self.world.checks.stored(stored, had)
            self.reach(crash_points.of_event("submitted", crash_points.AFTER))
        except SimulatedStoreError:
            return False
        except Dead:
            self.kill()
            return False
        self.receive(m.Submitted((self.store.records[job.id],)))
        return True

    def receive(self, message: m.Message, done: Callable[[], None] | None = None) -> None:
        if not self.up:
            return
        self.inbox.append((message, done))
        if not self._turning:
            self._turning = True
            self.later(self._turn_s, self._turn)

    def tell(self, message: m.Message) -> None:
        """From elsewhere: it may come twice, the second time much later."""
        self.receive(message)
        faults, rng = self.world.faults, self.world.rng
        if faults.doubled and isinstance(message, DOUBLED) and rng.random() < faults.doubled:
            self.later(rng.choice((0.01, 1.0, 10.0, 30.0)), self.receive, message)

    def _turn(self) -> None:
        taken, self.inbox = self.inbox, []
        if self._ticks_each_turn and not any(isinstance(message, m.Tick) for message, _ in taken):
            taken.append((self._time_passed(), None))
        control, now = self.control, self.now()
        events: list[Event] = []
        commands: list[Command] = []
        for together in _together([message for message, _ in taken]):
            for message in together:
                self.world.note(message, now.s)
            was = control
            control, told, asked = self._step(was, together, now)
            if told or asked:
                self.world.checks.stepped(was, told, asked, control)
            events += told
            commands += asked
        try:
            if events:
                had = {event.job: self.store.records.get(event.job) for event in events}
                for event in events:
                    self.reach(crash_points.of_event(event.event, crash_points.BEFORE))
                stored = self.store.append(events)
                self.world.checks.stored(stored, had)
                for event in events:
                    self.world.note(event, now.s)
                for event in events:
                    self.reach(crash_points.of_event(event.event, crash_points.AFTER))
        except SimulatedStoreError:
            self.inbox = [(x, done) for x, done in taken if not isinstance(x, m.Tick)] + self.inbox
            self.later(AGAIN_S, self._turn)
            return
        self._turning = False
        was, self.control = self.control, control
        self.world.checks.turned(was, control, [message for message, _ in taken], events)
        for _, done in taken:
            if done:
                done()
        for command in commands:
            self.world.note(command, now.s)
            self.reach(crash_points.of_command(command, crash_points.BEFORE))
            self._carrying.out(command)
            self.reach(crash_points.of_command(command, crash_points.AFTER))

    def _step(self, control: Control, together: Sequence[m.Message], now: m.Now) -> core.Step:
        try:
            if isinstance(together[0], m.Heartbeat):
                beats = (self._known(beat, control) for beat in together if isinstance(beat, m.Heartbeat))
                return core.heard(control, beats, now)
            return core.step(control, together[0], now)
        except Exception as e:
            self.world.checks.failed(together[0], e)

    def _known(self, beat: m.Heartbeat, control: Control) -> m.Heartbeat:
        """An agent's answer with which of its jobs the store has, beside those that are open."""
        others = {report.job for report in beat.reports} - control.records.keys()
        return replace(beat, known=frozenset(others & self.store.records.keys())) if others else beat

    def _tick(self) -> None:
        self.later(TICK_S, self._tick)
        self.receive(self._time_passed())

    def _time_passed(self) -> m.Tick:
        if not self.joined:
            return m.Tick(trouble="no fleet is up")
        living = frozenset(machine.label for machine in self.world.machines if machine.ray_id)
        recorded = frozenset(machine.label for machine in self.world.machines if machine not in self.world.grown)
        trouble = "Ray's head does not answer" if self.world.ray.away else ""
        told: dict[str, Any] = {"expected": living, "recorded": recorded, "repairs": True}
        return m.Tick(trouble=trouble, groups=self.world.groups, **told)

    def _list(self) -> None:
        self.later(LIST_S, self._list)
        ray = self.world.ray
        away_s = self.world.now_s - ray.away_s if ray.away else 0.0
        if self.joined and (away_s > PARTED_S or ray.head != self._head):
            self.joined = False
            over = ray.head != self._head
            self._carrying.fences.forget()
            if over:
                self.watching.agents = {}
                self._carrying.wanted = {}
            self.receive(m.Parted(over))
        elif not self.joined and not ray.away:
            self.joined, self._head = True, ray.head
            self.receive(m.Joined())
        if self.joined and not ray.away:
            self.tell(m.NodesSeen(ray.nodes()))

    _head = 0

    def _reserved(self) -> None:
        self.later(RESERVED_S, self._reserved)
        if self.joined and not self.world.ray.away:
            self.tell(m.Reserved(frozenset(self.world.ray.reserved)))


def _together(messages: list[m.Message]) -> Iterator[Sequence[m.Message]]:
    """Submissions first, as one; then all others in their order, answers of agents that follow each other at once."""
    if new := tuple(record for told in messages if isinstance(told, m.Submitted) for record in told.records):
        yield [m.Submitted(new)]
    others = (message for message in messages if not isinstance(message, m.Submitted))
    for are_beats, some in groupby(others, lambda message: isinstance(message, m.Heartbeat)):
        if are_beats:
            yield list(some)
        else:
            yield from ([message] for message in some)
