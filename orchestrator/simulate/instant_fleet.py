"""A fleet that does at once what the whole controller commands, in virtual time: nodes that answer, attempts that start
and stop when they are told to.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import PolyfleetError
from orchestrator.core import commands as c
from orchestrator.core import messages as m
from orchestrator.core.control import heard, step
from orchestrator.core.draft import Control
from orchestrator.core.placement import AGAIN_S, FEW, PLAN_EVERY_S, REST_PER_JOB_S
from orchestrator.core.policy import Policy
from orchestrator.core.throughput import Throughput
from orchestrator.simulate.fleets import Fleet
from orchestrator.simulate.replay import TOGETHER_S
from orchestrator.simulate.trace_jobs import facts, node_names
from workers.messages import AttemptStatus, Outcome, RankEvent

BEGINS_S = 1.0
"""When the trace begins by the clock of the controller, for which 0 is before everything."""

ROUNDS = 1000
"""Of plans at one moment; they settle in a few."""


@dataclass(slots=True)
class Runs:
    """An attempt. `moves_s`: when its progress begins; `events` that are not told yet, `at` its position in them."""

    job: int
    epoch: int
    kind: int
    nodes: tuple[str, ...]
    placed_s: float
    moves_s: float
    at: int = 0
    warm: bool = False
    ends: str = ""
    events: list[RankEvent] = field(default_factory=list)

    def tell(self, name: str, t: float, **data: Any) -> None:
        self.at += 1
        self.events.append(RankEvent(name, 0, t, self.at, data))


class Controlling(ABC):
    """`now_s` is monotonic; `running` by job. What an attempt does is told by who knows the jobs."""

    def __init__(self, fleet: Fleet, policy: Policy, throughput: Throughput):
        self.fleet, self.policy, self.throughput = fleet, policy, throughput
        self.control, self.now_s = Control(), BEGINS_S
        self.running: dict[str, Runs] = {}
        self.over: list[tuple[Runs, str]] = []
        self.planning_s: list[float] = []
        self.commands: list[c.Command] = []
        self.nodes = list(node_names(fleet))

    @abstractmethod
    def starts(self, command: c.Launch) -> Runs: ...

    @abstractmethod
    def saves(self, runs: Runs) -> None:
        """It was asked to stop."""

    @abstractmethod
    def leaves(self, runs: Runs) -> None:
        """It holds its devices no longer."""

    @abstractmethod
    def report(self) -> None:
        """What attempts have to tell now."""

    def _now(self) -> m.Now:
        return m.Now(self.now_s, self.now_s)

    def tell(self, *told: m.Message) -> None:
        for message in told:
            done = step(self.control, message, self._now())
            self.control = done.control
            self.commands += done.commands

    def join(self) -> None:
        self.tell(m.Joined())
        self.tell(m.NodesSeen(tuple(m.NodeSeen(f"ray-{name}", name, pool=kind) for name, kind, _ in self.nodes)))
        for name, kind, devices in self.nodes:
            self.tell(m.AgentMade(name, f"ray-{name}"))
            self.tell(m.Heartbeat(name, f"ray-{name}", self.now_s, facts=facts(name, kind, devices)))

    def _beat(self) -> None:
        """All nodes answer: what runs there, what its ranks told, and what has ended."""
        reports: dict[str, list[AttemptStatus]] = {}
        there: dict[str, set[str]] = {}
        for runs, state in [*((runs, "") for runs in self.running.values()), *self.over]:
            for report, node in self._reports(runs, state):
                reports.setdefault(node, []).append(report)
                there.setdefault(node, set()).add(report.key)
            runs.events = []
        self.over = []
        beats = [
            m.Heartbeat(
                name, f"ray-{name}", self.now_s, None, tuple(reports.get(name, ())), frozenset(there.get(name, ()))
            )
            for name, _, _ in self.nodes
        ]
        done = heard(self.control, beats, self._now())
        self.control = done.control
        self.commands += done.commands

    def _reports(self, runs: Runs, state: str) -> Iterable[tuple[AttemptStatus, str]]:
        job, phase = f"j{runs.job}", "ended" if state else "running"
        for rank, node in enumerate(runs.nodes):
            outcome = Outcome(job, runs.epoch, rank, state, {}) if state else None
            events = tuple(runs.events) if rank == 0 else ()
            yield AttemptStatus(job, runs.epoch, rank, phase, events, runs.at if rank == 0 else 0, outcome), node

    def settle(self) -> None:
        """Plans, and what they command, until nothing changes any more at this moment."""
        self.report()
        for _ in range(ROUNDS):
            self._beat()
            before, began_s = self.control.planned_s, time.process_time()
            self.tell(m.Tick(self.throughput, policy=self.policy))
            if self.control.planned_s != before:
                self.planning_s.append(time.process_time() - began_s)
            if not self._carry() and self.control.planned_s != before:
                return
            many = max(0, len(self.control.records) - FEW)
            self.now_s += min(AGAIN_S + many * REST_PER_JOB_S, PLAN_EVERY_S) + TOGETHER_S
        raise PolyfleetError(f"the planner does not settle at {self.now_s:.0f} s", "report this with the trace")

    def _carry(self) -> bool:
        """Whether anything was started or stopped."""
        commands, self.commands = self.commands, []
        acted = False
        for command in commands:
            match command:
                case c.Launch():
                    self._launch(command)
                    acted = True
                case c.Stop():
                    acted |= self._stop(command)
                case c.Release():
                    self.tell(m.Released(command.place, asked_s=command.asked_s))
                case c.Fence():
                    self.tell(m.Fenced(command.job, command.epoch, command.epoch, asked_s=command.asked_s))
                case c.MakeAgent():
                    self.tell(m.AgentMade(command.node, command.ray_id))
        return acted

    def _launch(self, command: c.Launch) -> None:
        self.running[command.job] = self.starts(command)
        self.tell(m.Launched(command.job, command.epoch))

    def _stop(self, command: c.Stop) -> bool:
        self.tell(m.Stopped(command.node, command.job, command.epoch, command.how, asked_s=command.asked_s))
        runs = self.running.get(command.job)
        if runs is None or runs.epoch != command.epoch:
            return False
        self.saves(runs)
        self.end(runs, "preempted")
        return True

    def end(self, runs: Runs, state: str) -> None:
        del self.running[f"j{runs.job}"]
        self.over.append((runs, state))
        self.leaves(runs)
