"""Replay a trace with the full controller, in virtual time.

The controller's `step` gets nodes, jobs and their reports; its commands take effect at once. Slower than replay.py,
which calls only the planner's decision. In addition it simulates jobs on nodes, gangs that must be divided among nodes,
rules against starvation, pauses between plans, equal jobs that are moved only now and then, and completion times that
are estimated from reports.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np

from cluster.errors import PolyfleetError, UserError
from orchestrator.core.controller import commands as c
from orchestrator.core.controller import messages as m
from orchestrator.core.model import Policy
from orchestrator.simulation.fleets import Failures, Fleet, Nodes
from orchestrator.simulation.instant_fleet import START_S, InstantFleet, RunningAttempt
from orchestrator.simulation.replay import TOGETHER_S, Replayed, Stays
from orchestrator.simulation.trace_jobs import STORAGE, TraceJobs
from orchestrator.simulation.traces import Trace

STEPS_PER_S = 10_000
"""Steps per second that a job reports on its fastest kind, because the trace's own steps may be fractions.

So a step is as much work for each job of a workload, as the controller assumes.
"""

PER_NODE = 8

WARM_S = (0.0, 1.0, 2.0, 3.0)
"""Seconds after its first step at which a job reports a step, so that its rate can be measured."""


class ControllerReplay(InstantFleet):
    """A replay.

    `left`: remaining steps of each job, of the trace. `total_steps`: all steps of a job, in the unit of its messages.
    """

    def __init__(self, trace: Trace, fleet: Fleet, policy: Policy, restart_s: float):
        self.trace, self.restart_s, self.jobs = trace, restart_s, TraceJobs(trace, fleet)
        super().__init__(fleet, policy, self.jobs.throughput)
        self.left = trace.steps.astype(np.float64).copy()
        self.total_steps = np.ceil(trace.steps / trace.rate.max(axis=0) * STEPS_PER_S).astype(np.int64)
        self.end_s = np.full(trace.jobs, np.nan)
        self.submitted, self.ended = 0, 0
        self.stays: list[tuple[int, int, float, float]] = []
        self.history: list[tuple[float, Any, int, int]] = []

    def run(self) -> Replayed:
        start_s = time.perf_counter()
        self.join()
        while self.ended < self.trace.jobs:
            self._advance_to_next_event()
            self.plan_until_stable()
            self._keep_history()
        wall_s = time.perf_counter() - start_s
        arrays = [np.array(values) for values in zip(*self.stays, strict=True)]
        at_s, used, waiting, present = (np.array(values) for values in zip(*self.history, strict=True))
        return Replayed(
            self.end_s, Stays(*arrays), at_s, used, waiting, present, np.array(self.planning_s), wall_s
        )  # fmt: skip

    def _step(self, job: int) -> int:
        fraction, total = 1.0 - float(self.left[job] / self.trace.steps[job]), int(self.total_steps[job])
        return min(total - 1, max(0, int(fraction * total)))

    def add_rank_events(self) -> None:
        """Report the progress of each job; at first also the steps that show its rate, and a checkpoint."""
        for attempt in self.running.values():
            if self.now_s < attempt.progress_start_s + WARM_S[-1]:
                continue
            step, total = self._step(attempt.job), int(self.total_steps[attempt.job])
            if not attempt.has_rate:
                attempt.has_rate = True
                steps_per_s = total * self._rate(attempt) / float(self.trace.steps[attempt.job])
                first_step = step - steps_per_s * (self.now_s - attempt.progress_start_s)
                for after_s in WARM_S:
                    reported_step = max(0, int(first_step + steps_per_s * after_s))
                    attempt.add_event("report", attempt.progress_start_s + after_s, step=reported_step, of=total)
                self._checkpoint(attempt)
            attempt.add_event("report", self.now_s, step=step, of=total)

    def _checkpoint(self, attempt: RunningAttempt) -> None:
        if self._may_save(attempt):
            step = self._step(attempt.job)
            attempt.add_event("checkpoint", self.now_s, path=f"{STORAGE}/j{attempt.job}/step", step=step)

    def _may_save(self, attempt: RunningAttempt) -> bool:
        return self.trace.unsaved is None or not self.trace.unsaved[attempt.job]

    def start_attempt(self, command: c.Launch) -> RunningAttempt:
        job, kind = int(command.job[1:]), self.fleet.kinds.index(command.pool)
        return RunningAttempt(job, command.epoch, kind, command.nodes, self.now_s, self.now_s + self.restart_s)

    def save_attempt(self, attempt: RunningAttempt) -> None:
        """Save a checkpoint; a job that cannot save starts again from the beginning."""
        if self._may_save(attempt):
            self._checkpoint(attempt)
        else:
            self.left[attempt.job] = self.trace.steps[attempt.job]

    def leave_devices(self, attempt: RunningAttempt) -> None:
        self.stays.append((attempt.job, attempt.kind, attempt.placed_s - START_S, self.now_s - START_S))

    def _rate(self, attempt: RunningAttempt) -> float:
        return float(self.trace.rate[attempt.kind, attempt.job])

    def _ends_s(self, attempt: RunningAttempt) -> float:
        return max(attempt.progress_start_s, self.now_s) + float(self.left[attempt.job]) / self._rate(attempt)

    def _advance_to_next_event(self) -> None:
        """Advance to the next end, submission, or plan that may stop or move equal jobs."""
        ends = [(self._ends_s(attempt), job) for job, attempt in self.running.items()]
        arrives_s = self._next_arrival_s()
        decides_s = self.control.full_plan_s + self.policy.every_s if self.control.records else np.inf
        planned_s = decides_s if decides_s > self.now_s and self._has_undecided() else np.inf
        until_s = max(min([arrives_s, planned_s, *(at_s for at_s, _ in ends)]), self.now_s)
        if until_s == np.inf:
            raise PolyfleetError(f"{len(self.control.records)} jobs wait on an idle fleet", "choose another policy")
        for attempt in self.running.values():
            moved_s = max(0.0, until_s - max(attempt.progress_start_s, self.now_s))
            self.left[attempt.job] = max(self.left[attempt.job] - self._rate(attempt) * moved_s, 1e-12)
        self.now_s = until_s
        for at_s, job in ends:
            if at_s <= until_s + TOGETHER_S:
                self._finished(self.running[job])
        self._enter()

    def _has_undecided(self) -> bool:
        """Whether anything has changed since the last plan that could move equal jobs."""
        return self.control.full_plan_s < self.control.planned_s or self.control.needs_plan

    def _finished(self, attempt: RunningAttempt) -> None:
        self.end_s[attempt.job] = self.now_s - START_S
        self.ended += 1
        self.end(attempt, "succeeded")

    def _next_arrival_s(self) -> float:
        has_next = self.submitted < self.trace.jobs
        return float(self.trace.arrival_s[self.submitted]) + START_S if has_next else np.inf

    def _enter(self) -> None:
        first = self.submitted
        while self._next_arrival_s() <= self.now_s:
            self.submitted += 1
        if self.submitted > first:
            self.send(m.Submitted(tuple(self.jobs.record(job) for job in range(first, self.submitted))))

    def _keep_history(self) -> None:
        used = np.zeros(len(self.fleet.kinds), np.int64)
        for attempt in self.running.values():
            used[attempt.kind] += self.trace.gang[attempt.job]
        present = self.submitted - self.ended
        self.history.append((self.now_s - START_S, used, present - len(self.running), present))


def on_nodes(fleet: Fleet, per_node: int | None) -> Fleet:
    """Give the fleet nodes with `per_node` devices, if it declares none.

    Raises UserError for `per_node` if it declares nodes, or if its nodes fail.
    """
    if fleet.failures is not None:
        raise UserError("--faults: not with --controller", "leave one of them out")
    if fleet.nodes is None:
        return replace(fleet, nodes=Failures((Nodes(per_node or PER_NODE),) * len(fleet.kinds)))
    if per_node is not None:
        raise UserError("--per-node: the fleet file already declares the nodes", "leave --per-node out")
    return fleet


def replay_controlled(trace: Trace, fleet: Fleet, policy: str, restart_s: float = 0.0) -> Replayed:
    return ControllerReplay(trace, fleet, replace(Policy(), name=policy), restart_s).run()
