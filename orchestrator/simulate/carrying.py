"""Commands carried out, simulated: each takes time, may fail, and may be half done when its server ends."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.core import commands as c
from orchestrator.core import messages as m
from orchestrator.simulate.machine import Machine, Refused

if TYPE_CHECKING:
    from orchestrator.simulate.server import Server

ANSWER_S = 3.0
START_S = 8.0
RESERVE_S = 6.0
FENCE_S = 2.0
Then = Callable[[Exception | None], None]


@dataclass(eq=False, slots=True)
class Change:
    """Of a fence. `write` gets what stands and returns what is to stand; `told` gets both and "" or an error."""

    write: Callable[[int], int]
    told: Callable[[int, int, str], None]


class Unanswered(Exception):
    """No answer within its limit."""


class Carrying:
    def __init__(self, server: "Server"):
        self.server, self.world = server, server.world
        self._fences: dict[str, list[Change]] = {}
        self.wanted: dict[str, str] = {}
        self.taken: set[str] = set()

    def out(self, command: c.Command) -> None:
        HANDLERS[type(command)](self, command)

    def ask(self, node: str, limit_s: float, act: Callable[[Machine], Any], then: Then) -> None:
        """`act` at the node's agent; `then` here, once, with what went wrong."""
        server, world = self.server, self.world
        ray_id, life = server.watching.agents.get(node, ""), server.life
        machine = world.ray.by_id.get(ray_id)
        waiting = [True]

        def finish(error: Exception | None) -> None:
            if waiting:
                waiting.clear()
                then(error)

        def run() -> None:
            error: Exception | None = None
            try:
                act(machine)  # type: ignore[arg-type]
            except Refused as e:
                error = e
            world.from_node(machine, lambda: server._mine(life, finish, (error,)))  # type: ignore[arg-type]

        server.later(limit_s, finish, Unanswered(f"node {node} gave no answer within {limit_s:.0f} s"))
        if machine is None:
            server.later(0.05, finish, Refused(f"node {node} has no agent"))
        else:
            world.to_node(machine, ray_id, run)

    def stop(self, command: c.Stop) -> None:
        node, job, epoch, how = command.node, command.job, command.epoch, command.how
        generation = self.server.generation

        def then(error: Exception | None) -> None:
            self.server.tell(m.Stopped(node, job, epoch, how, str(error) if error else ""))

        self.ask(node, ANSWER_S, lambda machine: machine.stop(generation, job, epoch, how), then)

    def forget(self, command: c.Forget) -> None:
        generation = self.server.generation
        act: Callable[[Machine], None] = lambda machine: machine.forget(generation, command.job, command.epoch)  # noqa: E731
        self.ask(command.node, ANSWER_S, act, lambda error: None)

    def fence(self, command: c.Fence) -> None:
        epoch = command.epoch

        def write(stands: int) -> int:
            if command.lower:
                return epoch if stands == epoch + 1 else stands
            return max(stands, epoch)

        def told(_: int, stands: int, error: str) -> None:
            self.server.tell(m.Fenced(command.job, epoch, stands, error, command.asked_s))

        self.change_fence(command.job, Change(write, told))

    def change_fence(self, job: str, change: "Change") -> None:
        """One is under way at a time; of those that wait, the newest counts."""
        queue = self._fences.setdefault(job, [])
        if len(queue) == 2:
            queue.pop().told(0, 0, "a newer change took its place")
        queue.append(change)
        if len(queue) == 1:
            self._begin_fence(job)

    def give_up_fence(self, job: str, change: "Change") -> None:
        """Nobody waits for it any more: it is not begun; under way it may still be made."""
        change.told = lambda before, after, error: None
        if change in (queue := self._fences.get(job, []))[1:]:
            queue.remove(change)

    def forget_fences(self) -> None:
        """The cluster was left."""
        fences, self._fences = self._fences, {}
        for change in [change for queue in fences.values() for change in queue]:
            change.told(0, 0, "the cluster was left")

    def _begin_fence(self, job: str) -> None:
        change = self._fences[job][0]
        self.server.later(self.world.rng.uniform(0.002, 0.05), self._write_fence, job, change)

    def _write_fence(self, job: str, change: "Change") -> None:
        """A head that does not answer may do it later, do it without telling so, or not do it."""
        ray, rng = self.world.ray, self.world.rng
        if change not in self._fences.get(job, [])[:1]:
            return
        error = ""
        if ray.away or ray.fences_away:
            if (what := rng.random()) < 0.2:
                before = ray.fences.get(job, 0)
                self._arrive(job, change, before, change.write(before), ray.head)
                return
            if what < 0.8:
                self.server.later(0.5, self._write_fence, job, change)
                return
            error = "the fence cannot be written"
            if what < 0.9:
                self.server.later(0.005, self._fenced, job, change, 0, 0, error)
                return
        before = ray.fences.get(job, 0)
        ray.fences[job] = after = change.write(before)
        self.server.later(0.005, self._fenced, job, change, before, 0 if error else after, error)

    def _arrive(self, job: str, change: "Change", before: int, after: int, head: int) -> None:
        """What the head has got it does, also when the server has ended meanwhile, or left."""
        ray = self.world.ray
        if ray.away or ray.fences_away:
            self.world.after(0.1, self._arrive, job, change, before, after, head)
        elif ray.head == head:
            ray.fences[job] = after
            if self.server._carrying is self:
                self.server.later(0.005, self._fenced, job, change, before, after, "")

    def _fenced(self, job: str, change: "Change", before: int, after: int, error: str) -> None:
        queue = self._fences.get(job, [])
        if change not in queue[:1]:
            return
        queue.pop(0)
        change.told(before, after, error)
        if queue:
            self._begin_fence(job)
        else:
            del self._fences[job]

    def release(self, command: c.Release) -> None:
        self.taken.discard(command.place)
        self.server.later(self.world.rng.uniform(0.01, 0.5), self._released, command.place)

    def _released(self, place: str) -> None:
        """Unless the next attempt has taken it over meanwhile."""
        ray = self.world.ray
        if ray.away:
            self.server.tell(m.Released(place, "Ray's head does not answer"))
            return
        if place not in self.taken:
            ray.reserved.pop(place, None)
        self.server.tell(m.Released(place))

    def make_agent(self, command: c.MakeAgent) -> None:
        self.wanted[command.node] = command.ray_id
        self.server.later(self.world.rng.uniform(0.05, 0.6), self._made, command, self.world.now_s)

    def _made(self, command: c.MakeAgent, since_s: float) -> None:
        world, node, ray_id = self.world, command.node, command.ray_id
        machine = world.ray.by_id.get(ray_id)
        if self.wanted.get(node) != ray_id:
            return
        if world.ray.away or machine is None or machine.ray_id != ray_id:
            self.server.tell(m.AgentMade(node, ray_id, "Ray did not start it"))
        elif machine.frozen or machine.cut_in or machine.cut_out:
            if world.now_s - since_s > 10.0:
                self.server.tell(m.AgentMade(node, ray_id, "it did not start within 10 s"))
            else:
                self.server.later(0.5, self._made, command, since_s)
        else:
            machine.agent_up, machine.agent_gone = True, False
            self.server.tell(m.AgentMade(node, ray_id))
            self.server.watching.follow(node, ray_id)

    def restart_agent(self, command: c.RestartAgent) -> None:
        machine = self.world.ray.by_id.get(command.ray_id)
        if machine and machine.ray_id == command.ray_id and not (machine.frozen or machine.cut_in):
            self.world.kill_agent(machine, gone=False)

    def drop_agent(self, command: c.DropAgent) -> None:
        if self.wanted.get(command.node) == command.ray_id:
            del self.wanted[command.node]
        if self.server.watching.agents.get(command.node) == command.ray_id:
            del self.server.watching.agents[command.node]

    def store_report(self, command: c.StoreReport) -> None:
        if not self.server.store.refuses:
            self.server.store.report(command.job, command.epoch, command.at)

    def nothing(self, command: c.Command) -> None:
        """It only says something."""

    def launch(self, command: c.Launch) -> None:
        self.taken.add(command.place)
        Launching(self, command).reserve(0.0)


class Launching:
    """One launch: reserve, fence, start everywhere at once, answer."""

    def __init__(self, carrying: Carrying, command: c.Launch):
        self.carrying, self.command = carrying, command
        self.server, self.world = carrying.server, carrying.world
        self.left = len(command.orders)
        self.maybe: set[str] = set()
        self.failed: set[str] = set()
        self.errors: list[Exception] = []

    def fail(self, message: str, kind: str = "launch", seen: int = 0) -> None:
        nodes, failed = tuple(sorted(self.maybe)), tuple(sorted(self.failed))
        self.server.tell(m.LaunchFailed(self.command.job, self.command.epoch, kind, message, nodes, seen, failed))

    def reserve(self, waited_s: float) -> None:
        """A reservation stands once no other holds the same devices."""
        command, ray = self.command, self.world.ray
        if not ray.away and not self._taken():
            ray.reserved[command.place] = self._wanted()
            self.server.later(self.world.rng.uniform(0.01, 0.2), self.fence)
        elif waited_s >= RESERVE_S:
            self.fail("Ray did not reserve its devices")
        else:
            self.server.later(0.5, self.reserve, waited_s + 0.5)

    def _wanted(self) -> frozenset[tuple[str, int]]:
        orders = zip(self.command.nodes, self.command.orders, strict=True)
        return frozenset(
            (self.server.watching.agents.get(node, ""), number) for node, o in orders for number in o.devices
        )

    def _taken(self) -> bool:
        wanted, reserved = self._wanted(), self.world.ray.reserved
        return any(wanted & held for place, held in reserved.items() if place != self.command.place)

    def fence(self) -> None:
        command, world = self.command, self.world
        if world.faults.secret_missing and world.scripts[command.job].secret_missing:
            self.fail("secrets.X is not set", "user")
            return

        def refused(stands: int) -> bool:
            return stands > command.epoch or (stands == command.epoch and not command.fenced)

        def told(before: int, after: int, error: str) -> None:
            answered.append(True)
            if error:
                self.fail(error)
            elif refused(before):
                self.fail(f"the fence stands at {before}", seen=before)
            else:
                self.server.later(world.rng.uniform(0.01, 0.3), self.start)

        def late() -> None:
            if not answered:
                self.carrying.give_up_fence(command.job, change)
                self.fail("the fence cannot be written in time")

        answered: list[bool] = []
        change = Change(lambda stands: stands if refused(stands) else command.epoch, told)
        self.server.later(FENCE_S, late)
        self.carrying.change_fence(command.job, change)

    def start(self) -> None:
        number, generation = self.world.next_launch(), self.server.generation
        for node, order in zip(self.command.nodes, self.command.orders, strict=True):
            self.maybe.add(node)

            def act(machine: Machine, order: Any = order) -> None:
                machine.start(generation, order, number)

            self.carrying.ask(node, START_S, act, lambda error, node=node: self.started(node, error))  # type: ignore[misc]

    def started(self, node: str, error: Exception | None) -> None:
        self.left -= 1
        if error:
            self.errors.append(error)
            if isinstance(error, Refused):
                self.maybe.discard(node)
            else:
                self.failed.add(node)
        if self.left:
            return
        if self.errors:
            self.fail(str(self.errors[0]), seen=max(getattr(e, "seen", 0) for e in self.errors))
        else:
            step = self.world.newest_step(self.command.job)
            self.server.tell(m.Launched(self.command.job, self.command.epoch, step or None))


HANDLERS: dict[type, Callable[[Carrying, Any], None]] = {
    c.Launch: Carrying.launch,
    c.Stop: Carrying.stop,
    c.Forget: Carrying.forget,
    c.Fence: Carrying.fence,
    c.Release: Carrying.release,
    c.MakeAgent: Carrying.make_agent,
    c.RestartAgent: Carrying.restart_agent,
    c.DropAgent: Carrying.drop_agent,
    c.StoreReport: Carrying.store_report,
    c.Refuse: Carrying.nothing,
    c.Warn: Carrying.nothing,
}
