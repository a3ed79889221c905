"""Simulated launch: reserve devices, write the fence, and request every node to start its part."""

from typing import TYPE_CHECKING, Any

from orchestrator.core.controller import commands as c
from orchestrator.core.controller import messages as m
from tests.simulator.fences import FenceChange
from tests.simulator.machine import Refused, RefusedForUser, SimulatedNode

if TYPE_CHECKING:
    from tests.simulator.command_executor import SimulatedExecutor

START_S = 8.0
RESERVE_S = 6.0
FENCE_S = 2.0


class UploadConflict(Refused):
    """Another launch is sending the same code to the node."""


def newest_epoch(error: Exception) -> int:
    """Epoch of the newer attempt that made a node refuse; 0 if it refused for another reason."""
    return getattr(error, "newest_epoch", 0)


class SimulatedLaunch:
    """One launch: reserve, fence, send the code, start all parts at once, report the result."""

    def __init__(self, executor: "SimulatedExecutor", command: c.Launch):
        self.executor, self.command = executor, command
        self.server, self.world = executor.server, executor.world
        self.pending = len(command.orders)
        self.maybe_started: set[str] = set()
        self.unanswered: set[str] = set()
        self.errors: dict[str, Exception] = {}

    def fail(self, message: str, kind: str = "launch", newest: int = 0) -> None:
        nodes, failed = tuple(sorted(self.maybe_started)), tuple(sorted(self.unanswered))
        attempt, number = (self.command.job, self.command.epoch), self.command.number
        self.server.receive_external(m.LaunchFailed(*attempt, kind, message, nodes, newest, failed, replies_to=number))

    def reserve(self, waited_s: float) -> None:
        """Reserve the devices; retry while others hold them, up to RESERVE_S."""
        command, ray, devices = self.command, self.world.ray, self._devices()
        if not ray.is_away and not devices & (self._reserved_devices() | ray.stuck):
            ray.reserved[command.reservation_name] = devices
            self.server.later(self.world.rng.uniform(0.01, 0.2), self.fence)
        elif waited_s >= RESERVE_S:
            self._fail_reservation(devices)
        else:
            self.server.later(0.5, self.reserve, waited_s + 0.5)

    def _fail_reservation(self, devices: frozenset[tuple[str, int]]) -> None:
        """Fail, with the nodes whose devices Ray has reserved, unless Ray is away."""
        ray, reserved = self.world.ray, self._reserved_devices()
        names = {self.server.polling.agents.get(node, ""): node for node in self.command.nodes}
        lacking = {node for node, _ in devices & (reserved | ray.stuck)}
        short, unheld = (
            tuple(sorted(names[node] for node in nodes if not ray.is_away))
            for nodes in (lacking, lacking - {node for node, _ in devices & reserved})
        )
        job, epoch, message = self.command.job, self.command.epoch, "Ray did not reserve its devices"
        failed = m.LaunchFailed(
            job, epoch, "launch", message, lacking=short, stuck=unheld, replies_to=self.command.number
        )
        self.server.receive_external(failed)

    def _devices(self) -> frozenset[tuple[str, int]]:
        orders = zip(self.command.nodes, self.command.orders, strict=True)
        return frozenset(
            (self.server.polling.agents.get(node, ""), number) for node, o in orders for number in o.devices
        )

    def _reserved_devices(self) -> frozenset[tuple[str, int]]:
        """Devices that are reserved under other names."""
        others = (held for place, held in self.world.ray.reserved.items() if place != self.command.reservation_name)
        return frozenset(device for held in others for device in held)

    def fence(self) -> None:
        command, world = self.command, self.world
        if world.faults.secret_missing and world.scripts[command.job].secret_missing:
            self.fail("secrets.X is not set", "user")
            return

        def refused(epoch: int) -> bool:
            return epoch > command.epoch or (epoch == command.epoch and not command.fence_is_ours)

        def finish(before: int, after: int, error: str) -> None:
            answered.append(True)
            if error:
                self.fail(error)
            elif refused(before):
                self.fail(f"the fence is at {before}", newest=before)
            else:
                self.server.later(world.rng.uniform(0.01, 0.3), self.send)

        def late() -> None:
            if not answered:
                self.executor.fences.withdraw(command.job, change)
                self.fail("the fence cannot be written in time")

        answered: list[bool] = []
        change = FenceChange(lambda epoch: epoch if refused(epoch) else command.epoch, finish)
        self.server.later(FENCE_S, late)
        self.executor.fences.change(command.job, change)

    def send(self) -> None:
        """Send the code to all nodes, then start the parts."""
        world, chance = self.world, self.world.faults.upload_conflicts
        if chance and not world.healed and world.rng.random() < chance:
            self._failed(UploadConflict("piece at byte 4194304 of an upload that has 8388608"))
        else:
            self.start()

    def start(self) -> None:
        number, generation = self.world.next_launch(), self.server.generation
        for node, order in zip(self.command.nodes, self.command.orders, strict=True):
            self.maybe_started.add(node)

            def act(machine: SimulatedNode, order: Any = order) -> None:
                machine.start(generation, order, number)

            self.executor.call_agent(node, START_S, act, lambda error, node=node: self.started(node, error))  # type: ignore[misc]

    def started(self, node: str, error: Exception | None) -> None:
        self.pending -= 1
        if error:
            self.errors[node] = error
            if isinstance(error, Refused):
                self.maybe_started.discard(node)
            else:
                self.unanswered.add(node)
        if self.pending:
            return
        if self.errors:
            causes = [self.errors[node] for node in self.command.nodes if node in self.errors]
            self._failed(next(filter(newest_epoch, causes), causes[0]))
        else:
            step = self.world.newest_step(self.command.job)
            job, epoch, number = self.command.job, self.command.epoch, self.command.number
            self.server.receive_external(m.Launched(job, epoch, step or None, replies_to=number))

    def _failed(self, cause: Exception) -> None:
        kind = "user" if isinstance(cause, RefusedForUser) else "launch"
        self.fail(str(cause), kind, newest_epoch(cause))
