"""Simulated Ray: a node list that lags, a key-value store that may not respond, and reservations."""

from typing import TYPE_CHECKING

from orchestrator.core.controller.messages import ListedNode

if TYPE_CHECKING:
    from tests.simulator.machine import SimulatedNode
    from tests.simulator.world import Simulation


class SimulatedRay:
    """Ray's state.

    `reserved`: devices (Ray id, number) by name of the reservation. `stuck`: devices reserved for nothing.

    `requested_nodes`: number of nodes requested from the autoscaler. `fences`: fences in Ray's store; `folder`: those
    on the server's machine, which ranks read before they save; `raised_by`: life of the server that raised each.
    """

    def __init__(self, world: "Simulation"):
        self.world = world
        self.node_by_id: dict[str, SimulatedNode] = {}
        self.listed: dict[str, ListedNode] = {}
        self.hidden: set[str] = set()
        self.reserved: dict[str, frozenset[tuple[str, int]]] = {}
        self.stuck: set[tuple[str, int]] = set()
        self.fences: dict[str, int] = {}
        self.folder: dict[str, int] = {}
        self.raised_by: dict[str, int] = {}
        self.is_away = False
        self.away_s = 0.0
        self.head = 1
        self.requested_nodes = 0
        self.fences_away = False
        self._joined = 0

    def has_stuck_resources(self, ray_id: str) -> bool:
        """Whether nothing is reserved on the node, and yet not all of it is free."""
        is_reserved = any(node == ray_id for devices in self.reserved.values() for node, _ in devices)
        return not is_reserved and any(node == ray_id for node, _ in self.stuck)

    def fence(self, job: str) -> int | None:
        """Epoch of a job's fence; None while it cannot be read."""
        return None if self.is_away or self.fences_away else self.fences.get(job, 0)

    def highest_fence(self, job: str) -> int:
        """The highest epoch of the job's fence that a rank or an agent may read."""
        return max(self.fences.get(job, 0), self.folder.get(job, 0))

    def join(self, machine: "SimulatedNode") -> None:
        """Start a raylet; it is listed a little later, with a new id."""
        self._joined += 1
        ray_id = machine.ray_id = f"{self.world.rng.getrandbits(32):08x}{self._joined}"
        self.node_by_id[ray_id] = machine
        machine.agent_up = machine.agent_gone = False
        self.world.after(self.world.rng.uniform(0.1, 1.0), self._list, machine, ray_id)

    def _list(self, machine: "SimulatedNode", ray_id: str) -> None:
        if machine.ray_id == ray_id:
            self.listed[ray_id] = ListedNode(ray_id, machine.label, pool=machine.pool)

    def end_raylet(self, machine: "SimulatedNode") -> None:
        """End a node's raylet, and its actor with it. Ray notices after some seconds."""
        ray_id, machine.ray_id = machine.ray_id, ""
        machine.end_agent()
        if ray_id:
            self.world.after(self.world.rng.choice((0.2, 2.0, 9.0)), self._unlist, ray_id)

    def _unlist(self, ray_id: str) -> None:
        self.listed.pop(ray_id, None)
        self.node_by_id.pop(ray_id, None)
        self.stuck = {(node, number) for node, number in self.stuck if node != ray_id}
        for name, devices in list(self.reserved.items()):
            if any(node == ray_id for node, _ in devices):
                self.reserved.pop(name)

    def declare_dead(self, machine: "SimulatedNode") -> None:
        """Declare a frozen or cut off node dead; its raylet ends as soon as it learns of that."""
        ray_id = machine.ray_id
        if ray_id:
            self.listed.pop(ray_id, None)

    def nodes(self) -> tuple[ListedNode, ...]:
        return tuple(row for ray_id, row in self.listed.items() if ray_id not in self.hidden)

    def lose_all(self, keeps_fences: bool) -> None:
        """Lose the head permanently; a new one starts empty."""
        self.listed.clear()
        self.node_by_id.clear()
        self.reserved.clear()
        self.stuck.clear()
        if not keeps_fences:
            self.fences.clear()
