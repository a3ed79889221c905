"""A placement on several nodes: what concerns them all is done on all of them at once. Ray is recorded."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from patience import LIMIT_S

from cluster.errors import FleetError
from orchestrator.core.controller.commands import Launch
from orchestrator.core.controller.messages import AgentStarted, Launched, LaunchFailed
from orchestrator.core.controller.nodes import Node
from orchestrator.runtime.agents import actors, fences, reservations
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService
from orchestrator.runtime.controller.launch import Launcher
from orchestrator.runtime.files.code_archives import ServerCodeArchives
from orchestrator.runtime.files.data_moves import DataMoves
from orchestrator.runtime.files.data_store import DataStore
from workers.protocol.messages import Order

NODES = ("a", "b", "c")


class RecordedActor:
    """Each method of it returns once that of all nodes was called."""

    def __init__(self, node, gates, threads):
        self.node, self.gates, self.threads = node, gates, threads

    def __getattr__(self, name):
        return Method(self, name)


class Method:
    def __init__(self, actor, name):
        self.actor, self.name = actor, name

    def remote(self, *_):
        return self.actor.threads.submit(self._run)

    def _run(self):
        if self.name == "rendezvous_address":
            return "127.0.0.1", 1
        self.actor.gates[self.name].wait(LIMIT_S)
        return True


@pytest.fixture
def gates():
    return {name: threading.Barrier(len(NODES)) for name in ("has_code_archive", "start")}


@pytest.fixture
def launcher(gates, monkeypatch, tmp_path):
    def answer(future: Future, what: str, timeout_s: float):
        try:
            return future.result(LIMIT_S)
        except threading.BrokenBarrierError:
            raise FleetError(f"{what}: not all nodes were asked at once") from None

    made = threading.Semaphore(0)
    with ThreadPoolExecutor(len(NODES)) as threads:
        monkeypatch.setattr(actors, "start_agent", lambda ray_id, cpus, deliver: RecordedActor(ray_id, gates, threads))
        monkeypatch.setattr(actors, "get_result", answer)
        monkeypatch.setattr(reservations, "reserve", lambda *_: None)
        monkeypatch.setattr(fences, "_read", lambda job: 0)
        monkeypatch.setattr(fences, "_write", lambda job, epoch: None)
        agents = Agents(lambda told: made.release() if isinstance(told, AgentStarted) else None)
        agents.nodes = {name: Node(name, f"ray-{name}", 0.0) for name in NODES}
        for name in NODES:
            agents.start(name, f"ray-{name}")
            assert made.acquire(timeout=LIMIT_S)
        checkpoints = CheckpointService(agents)
        data = DataMoves(agents, checkpoints, DataStore(tmp_path / "data"))
        yield Launcher(agents, ServerCodeArchives(tmp_path / "packages"), checkpoints, data)
        for gate in gates.values():
            gate.abort()


def asked(package=""):
    rows = [("job", 1, "run", "cpu", "cpu", False, (0,), rank, 3, rank, 1, 3, "", 0) for rank in range(len(NODES))]
    return Launch("job", 1, NODES, tuple(Order(*row) for row in rows), ({},) * 3, "cpu", "place", code_archive=package)


def test_code_and_orders_go_to_all_nodes_at_once(launcher):
    assert launcher.launch(asked("0" * 64)) == Launched("job", 1, None)


def test_nodes_that_cannot_be_reached_are_told_with_the_first_error(launcher, gates):
    gates["start"].abort()
    failed = launcher.launch(asked())
    assert isinstance(failed, LaunchFailed) and failed.maybe_started == NODES
    assert failed.message == "node a: start: not all nodes were asked at once"
