"""Simulated autoscaler: starts and removes machines."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulator.machine import SimulatedNode
    from tests.simulator.world import Simulation

INTERVAL_S = 1.0
IDLE_S = 3.0


class SimulatedAutoscaler:
    """Runs as many of the world's `grown` machines as are requested.

    A machine that is not requested is removed after a while without an agent: for Ray, an agent is work.
    """

    def __init__(self, world: "Simulation"):
        self.world = world
        self._idle_s: dict[str, float] = {}

    def check(self) -> None:
        self.world.after(INTERVAL_S, self.check)
        machines = self.world.grown
        running = [machine for machine in machines if machine.powered]
        if self.world.ray.is_away:
            return
        for machine in running:
            self._idle_s[machine.label] = 0.0 if machine.agent_up else self._idle_s.get(machine.label, 0.0) + INTERVAL_S
        if len(running) < self.world.ray.requested_nodes:
            self._start(next(machine for machine in machines if not machine.powered))
        elif len(running) > self.world.ray.requested_nodes:
            idle = (machine for machine in running if self._idle_s[machine.label] > IDLE_S)
            self._remove(next(idle, None))

    def _start(self, machine: "SimulatedNode") -> None:
        machine.powered, machine.gone = True, False
        self._idle_s[machine.label] = 0.0
        self.world.after(2.0, self.world.ray.join, machine)

    def _remove(self, machine: "SimulatedNode | None") -> None:
        if machine is not None and machine.ray_id:
            machine.powered, machine.gone = False, True
            self.world.ray.end_raylet(machine)
