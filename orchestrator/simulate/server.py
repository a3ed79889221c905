"""The server, simulated: the real `step` over an inbox, turns of one transaction each, commands carried out after. It
makes its turns as runtime/controller.py does.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from orchestrator.core import control as core
from orchestrator.core import messages as m
from orchestrator.core import points
from orchestrator.core.commands import Command
from orchestrator.core.draft import Control
from orchestrator.core.fold import submitted
from orchestrator.core.model import Event, Job
from orchestrator.simulate.carrying import Carrying
from orchestrator.simulate.machine import Machine
from orchestrator.simulate.storing import NotStored

if TYPE_CHECKING:
    from orchestrator.simulate.world import World

TICK_S = 0.5
LIST_S = 1.0
RESERVED_S = 30.0
TURN_S = (0.002, 0.02, 0.02, 0.3)
"""What comes within this time shares a turn; the last is of a server that has much to do."""
AGAIN_S = 0.5
UNHEARD_S = 4.0
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
)


class Dead(Exception):
    """The process ended here."""


class Server:
    """`life` numbers its processes: what an earlier one began and had not sent is not done. `agents` are Ray ids."""

    def __init__(self, world: "World"):
        self.world, self.store = world, world.store
        self.control = Control()
        self.up = self.frozen = False
        self.life = self.generation = 0
        self.clock_s = 0.0
        self.inbox: list[tuple[m.Message, Callable[[], None] | None]] = []
        self.agents: dict[str, str] = {}
        self.joined = False
        self._heard: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._held: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._turn_s = world.rng.choice(TURN_S)
        self._ticks_each_turn = world.rng.random() < 0.25  # an idle server does, a busy one has no time for it
        self._turning = False
        self._carrying = Carrying(self)

    def now(self) -> m.Now:
        return m.Now(self.world.now_s + self.clock_s, self.world.wall_s)

    def start(self) -> None:
        """A new process: what it knows comes from the store."""
        if self.up:
            return
        self.life += 1
        self.up, self.frozen, self.joined, self._turning = True, False, False, False
        self.inbox, self.agents, self._held = [], {}, []
        self._heard, self._asked = {}, {}
        self._carrying = Carrying(self)
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
            self.reach(points.of_event("submitted", points.BEFORE))
            stored = self.store.append([submitted(job, {}, self.world.wall_s)])
            self.world.checks.stored(stored, had)
            self.reach(points.of_event("submitted", points.AFTER))
        except NotStored:
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
                    self.reach(points.of_event(event.event, points.BEFORE))
                stored = self.store.append(events)
                self.world.checks.stored(stored, had)
                for event in events:
                    self.world.note(event, now.s)
                for event in events:
                    self.reach(points.of_event(event.event, points.AFTER))
        except NotStored:
            self.inbox = [(x, done) for x, done in taken if not isinstance(x, m.Tick)] + self.inbox
            self.later(AGAIN_S, self._turn)
            return
        self._turning = False
        self.control = control
        self.world.checks.turned(control, events)
        for _, done in taken:
            if done:
                done()
        for command in commands:
            self.world.note(command, now.s)
            self.reach(points.of_command(command, points.BEFORE))
            self._carrying.out(command)
            self.reach(points.of_command(command, points.AFTER))

    def _step(self, control: Control, together: list[m.Message], now: m.Now) -> core.Step:
        try:
            if isinstance(together[0], m.Heartbeat):
                return core.heard(control, (self._known(beat, control) for beat in together), now)
            return core.step(control, together[0], now)
        except Exception as e:
            self.world.checks.failed(together[0], e)

    def _known(self, beat: Any, control: Control) -> m.Heartbeat:
        """An agent's answer with which of its jobs the store has, beside those that are open."""
        others = {report.job for report in beat.reports} - control.records.keys()
        return replace(beat, known=frozenset(others & self.store.records.keys())) if others else beat

    def _tick(self) -> None:
        self.later(TICK_S, self._tick)
        self.receive(self._time_passed())

    def _time_passed(self) -> m.Tick:
        if not self.joined:
            return m.Tick(trouble="no fleet is up")
        return m.Tick(trouble="Ray's head does not answer" if self.world.ray.away else "")

    def _list(self) -> None:
        self.later(LIST_S, self._list)
        ray = self.world.ray
        away_s = self.world.now_s - ray.away_s if ray.away else 0.0
        if self.joined and (away_s > PARTED_S or ray.head != self._head):
            self.joined = False
            over = ray.head != self._head
            if over:
                self.agents = {}
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

    def follow(self, node: str, ray_id: str) -> None:
        """Watch that agent from now on."""
        self.agents[node] = ray_id
        self._heard[node] = 0
        self._watch(node, ray_id)

    def _watch(self, node: str, ray_id: str) -> None:
        machine = self.world.ray.by_id.get(ray_id)
        if self.agents.get(node) != ray_id:
            return
        number = self._asked[node] = self._asked.get(node, 0) + 1
        self.later(UNHEARD_S, self._unheard, node, ray_id, number)
        if machine is None or machine.ray_id != ray_id:
            return
        asked_s, heard, generation, life = self.now().s, self._heard[node], self.generation, self.life
        cursors, phases = core.watch_of(self.control, node)
        known = {key: (cursor, phases[key]) for key, cursor in cursors.items()}

        def answered(told: Any) -> None:
            self.world.from_node(
                machine, lambda: self._mine(life, self._answered, (node, ray_id, number, asked_s, told))
            )

        self.world.to_node(machine, ray_id, lambda: machine.watch(generation, known, heard, answered))

    def _answered(self, node: str, ray_id: str, number: int, asked_s: float, told: Any) -> None:
        if self.agents.get(node) != ray_id:
            return
        answer, facts, reports, attempts, epochs = told
        rng, spoiled = self.world.rng, 0.0 if self.world.healed else self.world.faults.spoiled
        good = tuple(r for r in reports if not spoiled or rng.random() >= spoiled)
        for report in reports:
            if report not in good:
                self.world.spoiled.add(report.job)
                ended = report.phase == "ended"
                self.tell(
                    m.Spoiled(report.job, report.epoch, report.node_rank, "its events cannot be read", None, ended)
                )
        self.tell(m.Heartbeat(node, ray_id, asked_s, facts, good, attempts, epochs))
        self._heard[node] = max(self._heard[node], answer)
        if number == self._asked.get(node):
            self._asked[node] += 1
            self.later(AGAIN_S if self.store.refuses else 0.015, self._watch, node, ray_id)

    def _unheard(self, node: str, ray_id: str, number: int) -> None:
        if number == self._asked.get(node):
            self._watch(node, ray_id)

    def died(self, machine: Machine, ray_id: str, gone: bool) -> None:
        """Ray tells that the agent's process ended."""
        for node, known in self.agents.items():
            if known == ray_id:
                self._heard[node] = 0
                self.tell(m.AgentDied(node, ray_id, gone))


def _together(messages: list[m.Message]) -> Iterator[list[m.Message]]:
    """Submissions first, as one; then all others in their order, answers of agents that follow each other at once."""
    if new := tuple(record for told in messages if isinstance(told, m.Submitted) for record in told.records):
        yield [m.Submitted(new)]
    others = (message for message in messages if not isinstance(message, m.Submitted))
    for are_beats, some in groupby(others, lambda message: isinstance(message, m.Heartbeat)):
        if are_beats:
            yield list(some)
        else:
            yield from ([message] for message in some)
