"""The real controller, its threads and its store, with simulated agents where Ray's actors are: calls go to a process
of them by a pipe, and Ray's list of nodes, its placement groups and its key-value store are tables in memory.
"""

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from parts.simulated_agents import Habits, serve

from cluster.fleet.fleet_record import FleetRecord
from cluster.host import fences as fence_files
from orchestrator.core.controller.messages import Submitted
from orchestrator.core.jobs.fold import submitted
from orchestrator.core.model import Candidate, Job
from orchestrator.runtime.agents import actors, fences, reservations
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.agents.ray_calls import with_time_limit
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService
from orchestrator.runtime.controller.controller import ControllerThread
from orchestrator.runtime.controller.inbox import Inbox
from orchestrator.runtime.controller.launch import Launcher
from orchestrator.runtime.files.code_archives import ServerCodeArchives
from orchestrator.runtime.files.data_moves import DataMoves
from orchestrator.runtime.files.data_store import DataStore
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.runtime.jobs.log_copies import LogCopies
from orchestrator.runtime.jobs.log_preservation import LogPreservation
from orchestrator.store.events.event_store import EventStore


class Line:
    """As Ray's actor calls: a call is sent at once, and its future is done in another thread."""

    def __init__(self, connection: Connection):
        self._connection, self._lock = connection, threading.Lock()
        self._numbers, self._calls = count(), dict[int, "Future[Any]"]()
        self.answers = 0
        threading.Thread(target=self._read, name="answers", daemon=True).start()

    def call(self, node: str, method: str, arguments: tuple[Any, ...]) -> "Future[Any]":
        number, future = next(self._numbers), Future[Any]()
        self._calls[number] = future
        with self._lock:
            self._connection.send((number, node, method, arguments))
        return future

    def _read(self) -> None:
        while True:
            try:
                answers = self._connection.recv()
            except (EOFError, OSError):
                return
            self.answers += len(answers)
            for number, result in answers:
                self._calls.pop(number).set_result(result)


class Actor:
    def __init__(self, line: Line, node: str):
        self._line, self._node = line, node

    def __getattr__(self, method: str) -> "Method":
        return Method(self._line, self._node, method)


class Method:
    def __init__(self, line: Line, node: str, name: str):
        self._line, self._node, self._name = line, node, name

    def remote(self, *arguments: Any) -> "Call":
        return Call(self._line.call(self._node, self._name, arguments))


class Call:
    def __init__(self, future: "Future[Any]"):
        self._future = future

    def future(self) -> "Future[Any]":
        return self._future


class Joined:
    """In place of runtime/agents/ray_link.py: always in the fleet's cluster."""

    hold_reason = ""

    def __init__(self) -> None:
        self.fleet: FleetRecord | None = None

    def update(self, recorded: FleetRecord | None, give_back: Callable[[], None]) -> str:
        self.fleet = FleetRecord("fleet", "up", "10.0.0.1:6379", "", 0.0, "", pools={"h100": {}})
        return ""

    def close(self) -> None: ...


class Fleet:
    """Of that many nodes with eight devices each. Nothing of it is Ray's; it patches this process."""

    def __init__(self, home: Path, nodes: int, habits: Habits):
        names = [f"node-{n:04d}" for n in range(nodes)]
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.agents_process = context.Process(target=serve, args=(theirs, names, habits), daemon=True)
        self.agents_process.start()
        theirs.close()
        self._connection, self.line = ours, Line(ours)
        self._replace_ray(names)
        self.store = EventStore(f"sqlite:///{home / 'polyfleet.db'}")
        self.jobs, inbox = Jobs(self.store), Inbox()
        agents = Agents(inbox.put)
        checkpoints = CheckpointService(agents)
        data = DataMoves(agents, checkpoints, DataStore(home / "data"))
        launcher = Launcher(agents, ServerCodeArchives(home / "packages"), checkpoints, data)
        keeping = LogPreservation(LogCopies(home / "kept-logs", agents), agents, self.jobs)
        self.runtime = ControllerThread(self.jobs, self.store, agents, launcher, inbox, keeping)
        self.runtime._link = Joined()
        self._submitted = count()

    def start(self) -> None:
        self.runtime.start()

    def close(self) -> None:
        self.runtime.close()
        self._connection.close()
        self.agents_process.terminate()
        self.agents_process.join()
        self.store.close()

    def submit(self, jobs: int) -> None:
        """As a submission over HTTP: stored first, then told to the controller."""
        events = []
        for _ in range(jobs):
            job = Job(f"sweep-{next(self._submitted):08x}", "sweep", "train", (Candidate(("nvidia:H100",), 1, 1),))
            events.append(submitted(job, {"name": "sweep", "task": "train"}, 1e9))
        self.jobs.commit(events)
        self.runtime.post(Submitted(tuple(self.jobs[event.job] for event in events)))

    def end(self, attempts: int) -> None:
        """So many of those that run succeed."""
        self.line.call("", "end", (attempts,))

    def listed(self) -> int:
        """Nodes that have told what runs there."""
        return sum(
            node.facts is not None and node.list_requested_s is not None for node in self.runtime.control.nodes.values()
        )

    def running(self) -> int:
        records = self.runtime.control.records
        return sum(record.job.state == "RUNNING" for record in list(records.values()))

    def _replace_ray(self, names: list[str]) -> None:
        rows = [actors.NodeRow(f"ray-{name}", name, True, True, name, "10.0.0.1", {}, {}) for name in names]
        epochs: dict[str, int] = {}

        def raise_fence(job: str, epoch: int) -> None:
            fence_files.write(fence_files.local_folder(), job, epoch)
            epochs[job] = epoch

        actors.nodes = lambda: rows
        actors.start_agent = lambda ray_id, cpus, deliver: Actor(self.line, ray_id.removeprefix("ray-"))
        actors.get_result = lambda ref, what, timeout_s: ref.future().result(timeout_s)
        fences._read, fences._write = lambda job: epochs.get(job, 0), raise_fence
        reservations.reserve = with_time_limit("reserve devices", 10.0)(lambda *_: None)
        reservations.release = with_time_limit("release devices", 10.0)(lambda *_: None)
        reservations.list_reserved_now = lambda: frozenset()
