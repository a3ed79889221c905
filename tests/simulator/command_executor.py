"""Simulated execution of commands: each takes time, may fail, and may be half done at a crash."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orchestrator.core.controller import commands as c
from orchestrator.core.controller import messages as m
from tests.simulator.fences import FenceChange, SimulatedFences
from tests.simulator.launch import SimulatedLaunch
from tests.simulator.machine import Refused, SimulatedNode

if TYPE_CHECKING:
    from tests.simulator.server import SimulatedServer

REPLY_S = 3.0
Then = Callable[[Exception | None], None]


class SimulatedTimeout(Exception):
    """An agent did not reply within the time limit."""


class SimulatedExecutor:
    def __init__(self, server: "SimulatedServer"):
        self.server, self.world = server, server.world
        self.fences = SimulatedFences(server, lambda: server._executor is self)
        self.agent_ids: dict[str, str] = {}
        self.reservations_in_use: set[str] = set()
        self.copied: set[str] = set()

    def execute(self, command: c.Command) -> None:
        HANDLERS[type(command)](self, command)

    def call_agent(self, node: str, limit_s: float, act: Callable[[SimulatedNode], Any], on_result: Then) -> None:
        """Call `act` at the node's agent, then `on_result` at the server, once, with the error or None."""
        server, world = self.server, self.world
        ray_id, life = server.polling.agents.get(node, ""), server.life
        machine = world.ray.node_by_id.get(ray_id)
        pending = [True]

        def finish(error: Exception | None) -> None:
            if pending:
                pending.clear()
                on_result(error)

        def run() -> None:
            error: Exception | None = None
            try:
                act(machine)  # type: ignore[arg-type]
            except Refused as e:
                error = e
            world.from_node(machine, lambda: server._run_in_life(life, finish, (error,)))  # type: ignore[arg-type]

        server.later(limit_s, finish, SimulatedTimeout(f"node {node} did not respond within {limit_s:.0f} s"))
        if machine is None:
            server.later(0.05, finish, Refused(f"node {node} has no agent"))
        else:
            world.to_node(machine, ray_id, run)

    def stop(self, command: c.Stop) -> None:
        node, job, epoch, mode = command.node, command.job, command.epoch, command.how
        generation = self.server.generation

        def then(error: Exception | None) -> None:
            text, number = str(error) if error else "", command.number
            self.server.receive_external(m.StopAnswered(node, job, epoch, mode, text, command.requested_s, number))

        self.call_agent(node, REPLY_S, lambda machine: machine.stop(generation, job, epoch, mode), then)

    def remove_files(self, command: c.RemoveFiles) -> None:
        generation = self.server.generation

        def act(machine: SimulatedNode) -> None:
            machine.remove_files(generation, command.job, command.epoch)

        self.call_agent(command.node, REPLY_S, act, lambda error: None)

    def fence(self, command: c.Fence) -> None:
        epoch = command.epoch

        def write(current_epoch: int) -> int:
            if command.lower:
                return current_epoch if current_epoch > epoch + 1 else epoch
            return max(current_epoch, epoch)

        def post_result(_: int, current_epoch: int, error: str) -> None:
            sent = command.requested_s, command.number
            self.server.receive_external(m.FenceAnswered(command.job, epoch, current_epoch, error, *sent))

        self.fences.change(command.job, FenceChange(write, post_result))

    def release(self, command: c.Release) -> None:
        self.reservations_in_use.discard(command.reservation_name)
        self.server.later(self.world.rng.uniform(0.01, 0.5), self._released, command)

    def _released(self, command: c.Release) -> None:
        """Release devices, unless the next attempt has taken over their reservation."""
        ray, sent = self.world.ray, (command.requested_s, command.number)
        if ray.is_away:
            error = "Ray's head does not respond"
            self.server.receive_external(m.ReleaseAnswered(command.reservation_name, error, *sent))
            return
        if command.reservation_name not in self.reservations_in_use:
            ray.reserved.pop(command.reservation_name, None)
        self.server.receive_external(m.ReleaseAnswered(command.reservation_name, "", *sent))

    def replicate(self, command: c.Replicate) -> None:
        """Copy a checkpoint. The first copy of each job fails because the disk is full."""
        error = "" if command.job in self.copied else "no space"
        self.copied.add(command.job)
        path = f"{command.job}/step-{command.step}"
        message = m.Replicated(command.job, command.step, command.node, path, error, command.number)
        self.server.later(0.5, self.server.receive_external, message)

    def start_agent(self, command: c.StartAgent) -> None:
        self.agent_ids[command.node] = command.ray_id
        self.server.later(self.world.rng.uniform(0.05, 0.6), self._agent_started, command, self.world.now_s)

    def _agent_started(self, command: c.StartAgent, since_s: float) -> None:
        world, node, ray_id = self.world, command.node, command.ray_id
        machine = world.ray.node_by_id.get(ray_id)
        if self.agent_ids.get(node) != ray_id:
            return
        if world.ray.is_away or machine is None or machine.ray_id != ray_id:
            self.server.receive_external(m.AgentStarted(node, ray_id, "Ray did not start it"))
        elif machine.frozen or machine.cut_in or machine.cut_out:
            if world.now_s - since_s > 10.0:
                self.server.receive_external(m.AgentStarted(node, ray_id, "it did not start within 10 s"))
            else:
                self.server.later(0.5, self._agent_started, command, since_s)
        else:
            machine.agent_up, machine.agent_gone = True, False
            self.server.receive_external(m.AgentStarted(node, ray_id))
            self.server.polling.start(node, ray_id)

    def restart_agent(self, command: c.RestartAgent) -> None:
        machine = self.world.ray.node_by_id.get(command.ray_id)
        if machine and machine.ray_id == command.ray_id and not (machine.frozen or machine.cut_in):
            self.world.kill_agent(machine, gone=False)

    def restart_node(self, command: c.RestartNode) -> None:
        self.server.later(self.world.rng.uniform(0.01, 0.5), self._restart_node, command)

    def _restart_node(self, command: c.RestartNode) -> None:
        """Restart a node, after checking again that Ray keeps its resources reserved."""
        ray = self.world.ray
        machine = ray.node_by_id.get(command.ray_id)
        is_present = machine is not None and machine.ray_id == command.ray_id and machine.powered
        if machine is None or not is_present or ray.is_away or not ray.has_stuck_resources(command.ray_id):
            self.server.receive_external(m.NodeNotRestarted(command.node, command.ray_id))
            return
        self.world.checks.check_restart(machine)
        self.world.injector.raylet_out(machine)

    def unwatch_agent(self, command: c.UnwatchAgent) -> None:
        if self.agent_ids.get(command.node) == command.ray_id:
            del self.agent_ids[command.node]
        if self.server.polling.agents.get(command.node) == command.ray_id:
            del self.server.polling.agents[command.node]

    def end_idle_agent(self, command: c.EndIdleAgent) -> None:
        self.unwatch_agent(c.UnwatchAgent(command.node, command.ray_id))
        self.server.later(self.world.rng.uniform(0.01, 0.5), self._end_idle_agent, command.ray_id)

    def _end_idle_agent(self, ray_id: str) -> None:
        machine = self.world.ray.node_by_id.get(ray_id)
        if machine is not None and not self.world.ray.is_away:
            machine.end_agent()

    def request_nodes(self, command: c.RequestNodes) -> None:
        self.server.later(self.world.rng.uniform(0.01, 0.5), self._request_nodes, command)

    def _request_nodes(self, command: c.RequestNodes) -> None:
        if self.world.ray.is_away:
            self.server.receive_external(m.NodeRequestAnswered("Ray's head does not respond"))
            return
        self.world.ray.requested_nodes = len(command.requests)
        self.server.receive_external(m.NodeRequestAnswered())

    def store_report(self, command: c.StoreReport) -> None:
        if not self.server.store.refuses_writes:
            self.server.store.report(command.job, command.epoch, command.at)

    def ignore(self, command: c.Command) -> None:
        """Commands without an effect on the world."""

    def launch(self, command: c.Launch) -> None:
        self.reservations_in_use.add(command.reservation_name)
        SimulatedLaunch(self, command).reserve(0.0)


HANDLERS: dict[type, Callable[[SimulatedExecutor, Any], None]] = {
    c.Launch: SimulatedExecutor.launch,
    c.Stop: SimulatedExecutor.stop,
    c.RemoveFiles: SimulatedExecutor.remove_files,
    c.Fence: SimulatedExecutor.fence,
    c.Release: SimulatedExecutor.release,
    c.StartAgent: SimulatedExecutor.start_agent,
    c.RestartAgent: SimulatedExecutor.restart_agent,
    c.RestartNode: SimulatedExecutor.restart_node,
    c.UnwatchAgent: SimulatedExecutor.unwatch_agent,
    c.EndIdleAgent: SimulatedExecutor.end_idle_agent,
    c.RequestNodes: SimulatedExecutor.request_nodes,
    c.StoreReport: SimulatedExecutor.store_report,
    c.Replicate: SimulatedExecutor.replicate,
    c.Reject: SimulatedExecutor.ignore,
    c.LogWarning: SimulatedExecutor.ignore,
}
