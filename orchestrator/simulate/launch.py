"""A launch, simulated: devices are reserved, the fence is written, and every node is asked to start its part."""

from typing import TYPE_CHECKING, Any

from orchestrator.core import commands as c
from orchestrator.core import messages as m
from orchestrator.simulate.fences import FenceChange
from orchestrator.simulate.machine import Refused, RefusedForUser, SimulatedNode

if TYPE_CHECKING:
    from orchestrator.simulate.command_executor import CommandExecutor

START_S = 8.0
RESERVE_S = 6.0
FENCE_S = 2.0


class UploadConflict(Refused):
    """Somebody else sends the same code to a node."""


def newest_epoch(error: Exception) -> int:
    """That a node's refusal names; 0 where a newer attempt is not why it refused."""
    return getattr(error, "seen", 0)


class SimulatedLaunch:
    """One launch: reserve, fence, send the code, start everywhere at once, answer."""

    def __init__(self, carrying: "CommandExecutor", command: c.Launch):
        self.carrying, self.command = carrying, command
        self.server, self.world = carrying.server, carrying.world
        self.left = len(command.orders)
        self.maybe: set[str] = set()
        self.failed: set[str] = set()
        self.errors: dict[str, Exception] = {}

    def fail(self, message: str, kind: str = "launch", seen: int = 0) -> None:
        nodes, failed = tuple(sorted(self.maybe)), tuple(sorted(self.failed))
        self.server.tell(m.LaunchFailed(self.command.job, self.command.epoch, kind, message, nodes, seen, failed))

    def reserve(self, waited_s: float) -> None:
        """A reservation stands once no other holds the same devices."""
        command, ray, wanted = self.command, self.world.ray, self._wanted()
        if not ray.away and not wanted & (self._taken() | ray.withheld):
            ray.reserved[command.place] = wanted
            self.server.later(self.world.rng.uniform(0.01, 0.2), self.fence)
        elif waited_s >= RESERVE_S:
            self._no_room(wanted)
        else:
            self.server.later(0.5, self.reserve, waited_s + 0.5)

    def _no_room(self, wanted: frozenset[tuple[str, int]]) -> None:
        """Ray says whom it reserves devices for, where it is there."""
        ray, taken = self.world.ray, self._taken()
        names = {self.server.watching.agents.get(node, ""): node for node in self.command.nodes}
        lacking = {node for node, _ in wanted & (taken | ray.withheld)}
        short, unheld = (
            tuple(sorted(names[node] for node in nodes if not ray.away))
            for nodes in (lacking, lacking - {node for node, _ in wanted & taken})
        )
        job, epoch, why = self.command.job, self.command.epoch, "Ray did not reserve its devices"
        self.server.tell(m.LaunchFailed(job, epoch, "launch", why, short=short, unheld=unheld))

    def _wanted(self) -> frozenset[tuple[str, int]]:
        orders = zip(self.command.nodes, self.command.orders, strict=True)
        return frozenset(
            (self.server.watching.agents.get(node, ""), number) for node, o in orders for number in o.devices
        )

    def _taken(self) -> frozenset[tuple[str, int]]:
        """Devices that are reserved for others."""
        others = (held for place, held in self.world.ray.reserved.items() if place != self.command.place)
        return frozenset(device for held in others for device in held)

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
                self.server.later(world.rng.uniform(0.01, 0.3), self.send)

        def late() -> None:
            if not answered:
                self.carrying.fences.give_up(command.job, change)
                self.fail("the fence cannot be written in time")

        answered: list[bool] = []
        change = FenceChange(lambda stands: stands if refused(stands) else command.epoch, told)
        self.server.later(FENCE_S, late)
        self.carrying.fences.change(command.job, change)

    def send(self) -> None:
        """Nothing is started before every node has the code."""
        world, chance = self.world, self.world.faults.upload_conflicts
        if chance and not world.healed and world.rng.random() < chance:
            self._failed(UploadConflict("piece at byte 4194304 of an upload that has 8388608"))
        else:
            self.start()

    def start(self) -> None:
        number, generation = self.world.next_launch(), self.server.generation
        for node, order in zip(self.command.nodes, self.command.orders, strict=True):
            self.maybe.add(node)

            def act(machine: SimulatedNode, order: Any = order) -> None:
                machine.start(generation, order, number)

            self.carrying.ask(node, START_S, act, lambda error, node=node: self.started(node, error))  # type: ignore[misc]

    def started(self, node: str, error: Exception | None) -> None:
        self.left -= 1
        if error:
            self.errors[node] = error
            if isinstance(error, Refused):
                self.maybe.discard(node)
            else:
                self.failed.add(node)
        if self.left:
            return
        if self.errors:
            causes = [self.errors[node] for node in self.command.nodes if node in self.errors]
            self._failed(next(filter(newest_epoch, causes), causes[0]))
        else:
            step = self.world.newest_step(self.command.job)
            self.server.tell(m.Launched(self.command.job, self.command.epoch, step or None))

    def _failed(self, cause: Exception) -> None:
        kind = "user" if isinstance(cause, RefusedForUser) else "launch"
        self.fail(str(cause), kind, newest_epoch(cause))
