"""Simulated polling of agents: one poll at a time per agent, repeated after its reply or a timeout."""

from typing import TYPE_CHECKING, Any

from orchestrator.core.controller import messages as m
from orchestrator.core.step import control as core
from tests.simulator.machine import SimulatedNode

if TYPE_CHECKING:
    from tests.simulator.server import SimulatedServer

REPLY_S = 4.0
RETRY_S = 0.5
"""Seconds until the next poll when an agent fails or the store refuses writes."""
POLL_PAUSE_S = 0.015


class AgentPolling:
    """Polls agents. `agents`: Ray ids by node."""

    def __init__(self, server: "SimulatedServer"):
        self._server = server
        self.agents: dict[str, str] = {}
        self._last_reply: dict[str, int] = {}
        self._poll_number: dict[str, int] = {}

    def start(self, node: str, ray_id: str) -> None:
        """Start polling an agent."""
        self.agents[node] = ray_id
        self._last_reply[node] = 0
        self._poll(node, ray_id)

    def _poll(self, node: str, ray_id: str) -> None:
        machine = self._server.world.ray.node_by_id.get(ray_id)
        if self.agents.get(node) != ray_id:
            return
        number = self._poll_number[node] = self._poll_number.get(node, 0) + 1
        self._server.later(REPLY_S, self._handle_timeout, node, ray_id, number)
        if machine is None or machine.ray_id != ray_id:
            return
        server, requested_s, last_reply = self._server, self._server.now().s, self._last_reply[node]
        generation, life = server.generation, server.life
        cursors, phases = core.poll_arguments(self._server.control, node)
        last_phases = {key: (cursor, phases[key]) for key, cursor in cursors.items()}

        def answered(reply: Any) -> None:
            arguments = (node, ray_id, number, requested_s, reply)
            server.world.from_node(machine, lambda: server._run_in_life(life, self._handle_reply, arguments))

        server.world.to_node(machine, ray_id, lambda: machine.poll(generation, last_phases, last_reply, answered))

    def _handle_reply(self, node: str, ray_id: str, number: int, requested_s: float, reply: Any) -> None:
        server = self._server
        if self.agents.get(node) != ray_id:
            return
        if reply is None:
            self._last_reply[node] = 0
            server.receive_external(m.AgentFailed(node, ray_id, "its agent fails: KeyError('cursors')"))
        else:
            self._post_reply(node, ray_id, requested_s, *reply)
        if number == self._poll_number.get(node):
            self._poll_number[node] += 1
            server.later(
                RETRY_S if reply is None or server.store.refuses_writes else POLL_PAUSE_S, self._poll, node, ray_id
            )

    def _post_reply(
        self, node: str, ray_id: str, requested_s: float, reply_number: int, facts: Any, statuses: Any, *more: Any
    ) -> None:
        """Post a reply's contents. An unreadable status affects its own attempt only."""
        rng, unreadable_chance = (
            self._server.world.rng,
            0.0 if self._server.world.healed else self._server.world.faults.unreadable,
        )
        readable = tuple(r for r in statuses if not unreadable_chance or rng.random() >= unreadable_chance)
        for status in statuses:
            if status not in readable:
                self._server.world.unreadable.add(status.job)
                ended = status.phase == "ended"
                self._server.receive_external(
                    m.PartUnreadable(
                        status.job, status.epoch, status.node_rank, "its events cannot be read", None, ended
                    )
                )
        self._server.receive_external(m.Heartbeat(node, ray_id, requested_s, facts, readable, *more))
        self._last_reply[node] = max(self._last_reply[node], reply_number)

    def _handle_timeout(self, node: str, ray_id: str, number: int) -> None:
        if number == self._poll_number.get(node):
            self._poll(node, ray_id)

    def agent_died(self, machine: SimulatedNode, ray_id: str, gone: bool) -> None:
        """Handle Ray's notice that an agent's process has ended."""
        for node, current in self.agents.items():
            if current == ray_id:
                self._last_reply[node] = 0
                self._server.receive_external(m.AgentDied(node, ray_id, gone))
