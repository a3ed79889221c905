"""How a simulated server follows its agents: one question at a time to each, until it is answered or asked anew."""

from typing import TYPE_CHECKING, Any

from orchestrator.core import control as core
from orchestrator.core import messages as m
from orchestrator.simulate.machine import SimulatedNode

if TYPE_CHECKING:
    from orchestrator.simulate.server import Server

UNHEARD_S = 4.0
AGAIN_S = 0.5
"""Where an agent fails, or the store refuses: so long until the next try."""
SOON_S = 0.015


class AgentPolling:
    """`agents` are Ray ids by node."""

    def __init__(self, server: "Server"):
        self._server = server
        self.agents: dict[str, str] = {}
        self._heard: dict[str, int] = {}
        self._asked: dict[str, int] = {}

    def follow(self, node: str, ray_id: str) -> None:
        """Watch that agent from now on."""
        self.agents[node] = ray_id
        self._heard[node] = 0
        self._watch(node, ray_id)

    def _watch(self, node: str, ray_id: str) -> None:
        machine = self._server.world.ray.by_id.get(ray_id)
        if self.agents.get(node) != ray_id:
            return
        number = self._asked[node] = self._asked.get(node, 0) + 1
        self._server.later(UNHEARD_S, self._unheard, node, ray_id, number)
        if machine is None or machine.ray_id != ray_id:
            return
        server, asked_s, heard = self._server, self._server.now().s, self._heard[node]
        generation, life = server.generation, server.life
        cursors, phases = core.watch_of(self._server.control, node)
        known = {key: (cursor, phases[key]) for key, cursor in cursors.items()}

        def answered(told: Any) -> None:
            arguments = (node, ray_id, number, asked_s, told)
            server.world.from_node(machine, lambda: server._mine(life, self._answered, arguments))

        server.world.to_node(machine, ray_id, lambda: machine.watch(generation, known, heard, answered))

    def _answered(self, node: str, ray_id: str, number: int, asked_s: float, told: Any) -> None:
        server = self._server
        if self.agents.get(node) != ray_id:
            return
        if told is None:
            self._heard[node] = 0
            server.tell(m.AgentFailed(node, ray_id, "its agent fails: KeyError('cursors')"))
        else:
            self._told(node, ray_id, asked_s, *told)
        if number == self._asked.get(node):
            self._asked[node] += 1
            server.later(AGAIN_S if told is None or server.store.refuses else SOON_S, self._watch, node, ray_id)

    def _told(self, node: str, ray_id: str, asked_s: float, answer: int, facts: Any, reports: Any, *more: Any) -> None:
        """A report that cannot be read concerns its attempt only."""
        rng, spoiled = self._server.world.rng, 0.0 if self._server.world.healed else self._server.world.faults.spoiled
        good = tuple(r for r in reports if not spoiled or rng.random() >= spoiled)
        for report in reports:
            if report not in good:
                self._server.world.spoiled.add(report.job)
                ended = report.phase == "ended"
                self._server.tell(
                    m.Spoiled(report.job, report.epoch, report.node_rank, "its events cannot be read", None, ended)
                )
        self._server.tell(m.Heartbeat(node, ray_id, asked_s, facts, good, *more))
        self._heard[node] = max(self._heard[node], answer)

    def _unheard(self, node: str, ray_id: str, number: int) -> None:
        if number == self._asked.get(node):
            self._watch(node, ray_id)

    def died(self, machine: SimulatedNode, ray_id: str, gone: bool) -> None:
        """Ray tells that the agent's process ended."""
        for node, known in self.agents.items():
            if known == ray_id:
                self._heard[node] = 0
                self._server.tell(m.AgentDied(node, ray_id, gone))
