"""A trace replayed by the whole controller: its `step` is told of nodes, jobs and their reports in virtual time, and
what it commands is done at once.

Slower than replay.py, which asks the planner's decision alone, and with all that a fleet does beside that decision:
jobs on nodes, gangs that have to be divided among them, rules against starving, plans that rest between each other and
decide about equals once in a while, times to completion that are reported and not known.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np

from cluster.errors import PolyfleetError, UserError
from orchestrator.core import commands as c
from orchestrator.core import messages as m
from orchestrator.core.policy import Policy
from orchestrator.simulate.fleets import Failures, Fleet, Nodes
from orchestrator.simulate.instant_fleet import BEGINS_S, Controlling, Runs
from orchestrator.simulate.replay import TOGETHER_S, Replayed, Stays
from orchestrator.simulate.trace_jobs import STORAGE, AsJobs
from orchestrator.simulate.traces import Trace

WHOLE = 10**9
"""Steps of each job, as it reports them: the trace's may be fractions."""

PER_NODE = 8

WARM_S = (0.0, 1.0, 2.0, 3.0)
"""After its first step a job reports so often; then its rate is known."""


class Controlled(Controlling):
    """`left` steps of each job, as the trace counts them."""

    def __init__(self, trace: Trace, fleet: Fleet, policy: Policy, restart_s: float):
        self.trace, self.restart_s, self.jobs = trace, restart_s, AsJobs(trace, fleet)
        super().__init__(fleet, policy, self.jobs.throughput)
        self.left = trace.steps.astype(np.float64).copy()
        self.end_s = np.full(trace.jobs, np.nan)
        self.submitted, self.ended = 0, 0
        self.stays: list[tuple[int, int, float, float]] = []
        self.history: list[tuple[float, Any, int, int]] = []

    def run(self) -> Replayed:
        began_s = time.perf_counter()
        self.join()
        while self.ended < self.trace.jobs:
            self._to_the_next_event()
            self.settle()
            self._keep_history()
        wall_s = time.perf_counter() - began_s
        columns = [np.array(column) for column in zip(*self.stays, strict=True)]
        at_s, used, waiting, present = (np.array(column) for column in zip(*self.history, strict=True))
        return Replayed(
            self.end_s, Stays(*columns), at_s, used, waiting, present, np.array(self.planning_s), wall_s
        )  # fmt: skip

    def _step(self, job: int) -> int:
        done = 1.0 - float(self.left[job] / self.trace.steps[job])
        return min(WHOLE - 1, max(0, int(done * WHOLE)))

    def report(self) -> None:
        """Of each job how far it is; first what makes its rate known, and that it has a checkpoint."""
        for runs in self.running.values():
            if self.now_s < runs.moves_s + WARM_S[-1]:
                continue
            step = self._step(runs.job)
            if not runs.warm:
                runs.warm = True
                per_s = WHOLE * self._rate(runs) / float(self.trace.steps[runs.job])
                first = step - per_s * (self.now_s - runs.moves_s)
                for after_s in WARM_S:
                    told = max(0, int(first + per_s * after_s))
                    runs.tell("report", runs.moves_s + after_s, step=told, of=WHOLE)
                self._checkpoint(runs)
            runs.tell("report", self.now_s, step=step, of=WHOLE)

    def _checkpoint(self, runs: Runs) -> None:
        if self._may_save(runs):
            step = self._step(runs.job)
            runs.tell("checkpoint", self.now_s, path=f"{STORAGE}/j{runs.job}/step", step=step)

    def _may_save(self, runs: Runs) -> bool:
        return self.trace.stays is None or not self.trace.stays[runs.job]

    def starts(self, command: c.Launch) -> Runs:
        job, kind = int(command.job[1:]), self.fleet.kinds.index(command.pool)
        return Runs(job, command.epoch, kind, command.nodes, self.now_s, self.now_s + self.restart_s)

    def saves(self, runs: Runs) -> None:
        """One that cannot begins anew."""
        if self._may_save(runs):
            self._checkpoint(runs)
        else:
            self.left[runs.job] = self.trace.steps[runs.job]

    def leaves(self, runs: Runs) -> None:
        self.stays.append((runs.job, runs.kind, runs.placed_s - BEGINS_S, self.now_s - BEGINS_S))

    def _rate(self, runs: Runs) -> float:
        return float(self.trace.rate[runs.kind, runs.job])

    def _ends_s(self, runs: Runs) -> float:
        return max(runs.moves_s, self.now_s) + float(self.left[runs.job]) / self._rate(runs)

    def _to_the_next_event(self) -> None:
        """An end, a submission, or a plan that may stop or move equals."""
        ends = [(self._ends_s(runs), job) for job, runs in self.running.items()]
        arrives_s = self._next_arrival_s()
        decides_s = self.control.decided_s + self.policy.every_s if self.control.records else np.inf
        late = decides_s if decides_s > self.now_s and self._undecided() else np.inf
        until_s = max(min([arrives_s, late, *(at_s for at_s, _ in ends)]), self.now_s)
        if until_s == np.inf:
            raise PolyfleetError(f"{len(self.control.records)} jobs wait on an idle fleet", "choose another policy")
        for runs in self.running.values():
            moved_s = max(0.0, until_s - max(runs.moves_s, self.now_s))
            self.left[runs.job] = max(self.left[runs.job] - self._rate(runs) * moved_s, 1e-12)
        self.now_s = until_s
        for at_s, job in ends:
            if at_s <= until_s + TOGETHER_S:
                self._finished(self.running[job])
        self._enter()

    def _undecided(self) -> bool:
        """Whether anything has changed since the last plan in which equals could move."""
        return self.control.decided_s < self.control.planned_s or self.control.changed

    def _finished(self, runs: Runs) -> None:
        self.end_s[runs.job] = self.now_s - BEGINS_S
        self.ended += 1
        self.end(runs, "succeeded")

    def _next_arrival_s(self) -> float:
        waits = self.submitted < self.trace.jobs
        return float(self.trace.arrival_s[self.submitted]) + BEGINS_S if waits else np.inf

    def _enter(self) -> None:
        first = self.submitted
        while self._next_arrival_s() <= self.now_s:
            self.submitted += 1
        if self.submitted > first:
            self.tell(m.Submitted(tuple(self.jobs.record(job) for job in range(first, self.submitted))))

    def _keep_history(self) -> None:
        used = np.zeros(len(self.fleet.kinds), np.int64)
        for runs in self.running.values():
            used[runs.kind] += self.trace.gang[runs.job]
        present = self.submitted - self.ended
        self.history.append((self.now_s - BEGINS_S, used, present - len(self.running), present))


def on_nodes(fleet: Fleet, per_node: int | None) -> Fleet:
    """`per_node`: where the fleet does not say what nodes there are. Raises UserError where it does, or nodes fail."""
    if fleet.failures is not None:
        raise UserError("--faults: not with --controller", "leave one of them out")
    if fleet.nodes is None:
        return replace(fleet, nodes=Failures((Nodes(per_node or PER_NODE),) * len(fleet.kinds)))
    if per_node is not None:
        raise UserError("--per-node: the fleet's file says what nodes there are", "leave --per-node out")
    return fleet


def controlled(trace: Trace, fleet: Fleet, policy: str, restart_s: float = 0.0) -> Replayed:
    return Controlled(trace, fleet, replace(Policy(), name=policy), restart_s).run()
