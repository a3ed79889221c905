"""Simulated fleet that executes the controller's commands at once, in virtual time.

Nodes always reply, and attempts start and stop immediately.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import PolyfleetError
from orchestrator.core.controller import commands as c
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.draft import Control
from orchestrator.core.model import Policy
from orchestrator.core.step.control import step, step_replies
from orchestrator.core.step.placement import FREE_JOBS, INTERVAL_PER_JOB_S, MIN_INTERVAL_S, PLAN_EVERY_S
from orchestrator.core.throughput import Throughput
from orchestrator.simulation.fleets import Fleet
from orchestrator.simulation.replay import TOGETHER_S
from orchestrator.simulation.trace_jobs import facts, node_names
from workers.protocol.messages import AttemptStatus, Outcome, RankEvent

START_S = 1.0
"""Start of the trace on the controller's clock; for the controller, 0 means never."""

MAX_PLANS = 1000
"""Maximum number of plans at one moment; normally a few suffice until nothing changes."""


@dataclass(slots=True)
class RunningAttempt:
    """A running attempt.

    `progress_start_s`: time from which it makes progress. `events`: events not sent yet; `at`: number of all so far.
    """

    job: int
    epoch: int
    kind: int
    nodes: tuple[str, ...]
    placed_s: float
    progress_start_s: float
    at: int = 0
    has_rate: bool = False
    ends: str = ""
    events: list[RankEvent] = field(default_factory=list)

    def add_event(self, name: str, t: float, **data: Any) -> None:
        self.at += 1
        self.events.append(RankEvent(name, 0, t, self.at, data))


class InstantFleet(ABC):
    """Drives the controller.

    `now_s`: monotonic time. `running`: attempts by job. Subclasses define what jobs do.
    """

    def __init__(self, fleet: Fleet, policy: Policy, throughput: Throughput):
        self.fleet, self.policy, self.throughput = fleet, policy, throughput
        self.control, self.now_s = Control(), START_S
        self.running: dict[str, RunningAttempt] = {}
        self.ended_attempts: list[tuple[RunningAttempt, str]] = []
        self.planning_s: list[float] = []
        self.commands: list[c.Command] = []
        self.nodes = list(node_names(fleet))

    @abstractmethod
    def start_attempt(self, command: c.Launch) -> RunningAttempt: ...

    @abstractmethod
    def save_attempt(self, attempt: RunningAttempt) -> None:
        """Save the progress of an attempt that was requested to stop."""

    @abstractmethod
    def leave_devices(self, attempt: RunningAttempt) -> None:
        """Record that an attempt has released its devices."""

    @abstractmethod
    def add_rank_events(self) -> None:
        """Add the events that the attempts' ranks write now."""

    def _now(self) -> m.Now:
        return m.Now(self.now_s, self.now_s)

    def send(self, *messages: m.Message) -> None:
        for message in messages:
            step_result = step(self.control, message, self._now())
            self.control = step_result.control
            self.commands += step_result.commands

    def join(self) -> None:
        self.send(m.ClusterJoined())
        self.send(m.NodesListed(tuple(m.ListedNode(f"ray-{name}", name, pool=kind) for name, kind, _ in self.nodes)))
        for name, kind, devices in self.nodes:
            self.send(m.AgentStarted(name, f"ray-{name}"))
            self.send(m.Heartbeat(name, f"ray-{name}", self.now_s, facts=facts(name, kind, devices)))

    def _reply_all(self) -> None:
        """Let all nodes reply with their running attempts, the events of these, and the ended attempts."""
        statuses: dict[str, list[AttemptStatus]] = {}
        running_on: dict[str, set[str]] = {}
        for attempt, state in [*((attempt, "") for attempt in self.running.values()), *self.ended_attempts]:
            for status, node in self._statuses(attempt, state):
                statuses.setdefault(node, []).append(status)
                running_on.setdefault(node, set()).add(status.key)
            attempt.events = []
        self.ended_attempts = []
        beats = [
            m.Heartbeat(
                name,
                f"ray-{name}",
                self.now_s,
                None,
                tuple(statuses.get(name, ())),
                frozenset(running_on.get(name, ())),
            )
            for name, _, _ in self.nodes
        ]
        step_result = step_replies(self.control, beats, self._now())
        self.control = step_result.control
        self.commands += step_result.commands

    def _statuses(self, attempt: RunningAttempt, state: str) -> Iterable[tuple[AttemptStatus, str]]:
        job, phase = f"j{attempt.job}", "ended" if state else "running"
        for rank, node in enumerate(attempt.nodes):
            outcome = Outcome(job, attempt.epoch, rank, state, {}) if state else None
            events = tuple(attempt.events) if rank == 0 else ()
            yield AttemptStatus(job, attempt.epoch, rank, phase, events, attempt.at if rank == 0 else 0, outcome), node

    def plan_until_stable(self) -> None:
        """Plan, and execute commands, until nothing changes any more at this moment. Raises PolyfleetError."""
        self.add_rank_events()
        for _ in range(MAX_PLANS):
            self._reply_all()
            before, start_s = self.control.planned_s, time.process_time()
            self.send(m.Tick(self.throughput, policy=self.policy))
            if self.control.planned_s != before:
                self.planning_s.append(time.process_time() - start_s)
            if not self._execute() and self.control.planned_s != before:
                return
            beyond_few = max(0, len(self.control.records) - FREE_JOBS)
            self.now_s += min(MIN_INTERVAL_S + beyond_few * INTERVAL_PER_JOB_S, PLAN_EVERY_S) + TOGETHER_S
        raise PolyfleetError(f"the planner finds no stable plan at {self.now_s:.0f} s", "open an issue with the trace")

    def _execute(self) -> bool:
        """Execute the commands; return whether an attempt was started or stopped."""
        commands, self.commands = self.commands, []
        has_acted = False
        for command in commands:
            match command:
                case c.Launch():
                    self._launch(command)
                    has_acted = True
                case c.Stop():
                    has_acted |= self._stop(command)
                case c.Release():
                    sent = command.requested_s, command.number
                    self.send(m.ReleaseAnswered(command.reservation_name, "", *sent))
                case c.Fence():
                    sent = command.requested_s, command.number
                    self.send(m.FenceAnswered(command.job, command.epoch, command.epoch, "", *sent))
                case c.StartAgent():
                    self.send(m.AgentStarted(command.node, command.ray_id))
        return has_acted

    def _launch(self, command: c.Launch) -> None:
        self.running[command.job] = self.start_attempt(command)
        self.send(m.Launched(command.job, command.epoch, replies_to=command.number))

    def _stop(self, command: c.Stop) -> bool:
        sent = command.requested_s, command.number
        self.send(m.StopAnswered(command.node, command.job, command.epoch, command.how, "", *sent))
        attempt = self.running.get(command.job)
        if attempt is None or attempt.epoch != command.epoch:
            return False
        self.save_attempt(attempt)
        self.end(attempt, "preempted")
        return True

    def end(self, attempt: RunningAttempt, state: str) -> None:
        del self.running[f"j{attempt.job}"]
        self.ended_attempts.append((attempt, state))
        self.leave_devices(attempt)
