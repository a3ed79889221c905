"""A trace replayed on a fleet in continuous time, by the planner's own decision at every submission and every end.

A job is a rigid gang on one kind of devices, at the rate it has alone there. Each start, resume and move costs a pause
without progress, during which the devices are held. A node that fails takes its devices along, and stops the jobs on
them; the planner decides again when it fails and when it comes back.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.errors import PolyfleetError, UserError, nearest
from orchestrator import installed_policies
from orchestrator.core.planner.decision import Memory, decide
from orchestrator.core.planner.planner_jobs import WAITS, Work
from orchestrator.core.planner.plugins import KNOWN
from orchestrator.core.planner.policies import POLICIES
from orchestrator.simulate.fleets import Fleet
from orchestrator.simulate.node_failures import FailingNodes
from orchestrator.simulate.traces import Trace

TOGETHER_S = 1e-6
"""Ends so close to each other are one event: rounding sets equal ones apart."""

LEAST_STEPS = 1e-12
"""What rounding leaves to a job that has not ended is never nothing."""

MOST_FAILURES = 50_000
"""While no job ends: then none will."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stays:
    """One for each start, resume and move, all (stays,): the index of the job, that of the kind, from when to when."""

    job: Integers
    kind: Integers
    start_s: Floats
    stop_s: Floats


@dataclass(frozen=True, slots=True)
class Faults:
    """Failures of nodes until the last job ended, how often one stopped a job, and how many device-seconds jobs held
    since their last checkpoint then, or since they were placed.
    """

    nodes: int
    stopped: int
    lost_device_s: float


@dataclass(frozen=True, slots=True)
class Replayed:
    """`end_s` (jobs,) in the order of the trace; `stays` of jobs on devices. What follows an event, until the next one:
    `at_s`, `waiting` and `present` jobs (events,), `used` devices (events, kinds). `planning_s` of CPU by decision.
    `faults` is None where no node can fail.
    """

    end_s: Floats
    stays: "Stays"
    at_s: Floats
    used: Integers
    waiting: Integers
    present: Integers
    planning_s: Floats
    wall_s: float
    faults: Faults | None = None


def replay(
    trace: Trace, fleet: Fleet, policy: str, restart_s: float = 0.0, noise: float = 0.0, seed: int = 0
) -> Replayed:
    """`noise`: the decision sees remaining work times a log-normal factor of this sigma, one per job, from `seed`."""
    check_policy(policy)
    factors = np.exp(noise * np.random.default_rng(seed).standard_normal(trace.jobs))
    return _Replay(trace, fleet, policy, restart_s, factors).run()


def check_policy(policy: str) -> None:
    installed_policies.load()
    known = (*POLICIES, *sorted(KNOWN))
    if policy not in known:
        raise UserError(f"--policy: unknown policy {policy!r}", nearest(policy, known))


class _Replay:
    """`left` steps; `option` the kind a job runs on; `moves_s` when its progress began or will, after the pause."""

    def __init__(self, trace: Trace, fleet: Fleet, policy: str, restart_s: float, factors: Floats):
        self.trace, self.fleet, self.policy, self.restart_s, self.factors = trace, fleet, policy, restart_s, factors
        jobs, self.kinds = trace.jobs, len(fleet.kinds)
        self.left = trace.steps.copy()
        self.option = np.full(jobs, WAITS, np.int64)
        self.moves_s, self.end_s = np.zeros(jobs), np.full(jobs, np.nan)
        self.placed_s = np.zeros(jobs)
        self.stays: list[tuple[Integers, Integers, Floats, Floats]] = []
        self.isolated_s = trace.isolated_s * factors
        with np.errstate(divide="ignore", over="ignore"):
            self.s_per_step = factors / trace.rate  # as the decision is shown it; infinite: cannot
        self.present = np.zeros(0, np.int64)  # jobs in the system
        self.submitted, self.now_s = 0, 0.0
        self.memory = Memory()
        self.history: list[tuple[float, Integers, int, int]] = []
        self.planning_s: list[float] = []
        self.nodes = FailingNodes(fleet, fleet.failures) if fleet.failures else None
        self.checkpoint_s = fleet.failures.checkpoint_s if fleet.failures else np.inf
        self.stopped, self.lost_device_s, self.failed_before = 0, 0.0, 0

    def run(self) -> Replayed:
        began_s = time.perf_counter()
        while self.submitted < self.trace.jobs or len(self.present):
            self._to_the_next_event()
            if len(self.present) and self.capacity.any():
                self._decide()
            self._keep_history()
        wall_s = time.perf_counter() - began_s
        at_s, used, waiting, present = (np.array(column) for column in zip(*self.history, strict=True))
        planning_s = np.array(self.planning_s)
        stays = Stays(*(np.concatenate(column) for column in zip(*self.stays, strict=True)))
        faults = Faults(self.nodes.failed, self.stopped, self.lost_device_s) if self.nodes else None
        return Replayed(self.end_s, stays, at_s, used, waiting, present, planning_s, wall_s, faults)

    def _to_the_next_event(self) -> None:
        running = self.present[self.option[self.present] != WAITS]
        rate = self.trace.rate[self.option[running], running]
        since_s = np.maximum(self.moves_s[running], self.now_s)
        ends_s = since_s + self.left[running] / rate
        planned_s = min(float(ends_s.min(initial=np.inf)), self._next_arrival_s())
        if planned_s == np.inf and not (self.nodes and self.nodes.any_down):
            message = f"policy {self.policy!r} leaves all {len(self.present)} jobs waiting on an idle fleet"
            raise PolyfleetError(message, "choose another policy")
        now_s = max(min(planned_s, self._next_failure_s()), self.now_s)
        self.left[running] = np.maximum(self.left[running] - rate * np.maximum(now_s - since_s, 0.0), LEAST_STEPS)
        self.now_s = now_s
        self._leave(running[ends_s <= now_s + TOGETHER_S])
        self._fail()
        self._enter()

    def _next_arrival_s(self) -> float:
        waits = self.submitted < self.trace.jobs
        return float(self.trace.arrival_s[self.submitted]) if waits else np.inf

    def _next_failure_s(self) -> float:
        """Or when the next node comes back. While no job is there, nobody has to know."""
        return self.nodes.outages.next_s if self.nodes and len(self.present) else np.inf

    def _leave(self, ended: Integers) -> None:
        self._stop(ended)
        self.end_s[ended] = self.now_s
        self.present = self.present[np.isnan(self.end_s[self.present])]
        self._goes_on(len(ended))

    def _stop(self, jobs: Integers) -> None:
        self.stays.append((jobs, self.option[jobs], self.placed_s[jobs], np.full(len(jobs), self.now_s)))
        self.option[jobs] = WAITS
        if self.nodes:
            self.nodes.release(jobs.tolist())

    def _fail(self) -> None:
        """And what is repaired comes back."""
        if (nodes := self.nodes) is None:
            return
        for node, goes_down in nodes.outages.until(self.now_s):
            if goes_down:
                hit = np.array(nodes.jobs_on(node), np.int64)
                self._lose(hit)
                self._stop(hit)
                nodes.went_down(node)
            else:
                nodes.came_back(node)
        if len(self.present) and nodes.failed - self.failed_before > MOST_FAILURES:
            message = f"nodes failed {MOST_FAILURES} times, and none of {len(self.present)} jobs has ended meanwhile"
            raise UserError(f"--faults: {message}", "raise mtbf_h, or lower checkpoint_every_s or --restart-cost")

    def _lose(self, jobs: Integers) -> None:
        """What they have done since their last checkpoint. The first is one period after progress began."""
        rate = self.trace.rate[self.option[jobs], jobs]
        ran_s = np.maximum(self.now_s - self.moves_s[jobs], 0.0)
        saves = ran_s >= self.checkpoint_s
        if self.trace.stays is not None:
            saves &= ~self.trace.stays[jobs]
        lost_s = np.where(saves, ran_s % self.checkpoint_s, ran_s)
        self.left[jobs] = np.minimum(self.left[jobs] + rate * lost_s, self.trace.steps[jobs])
        held_s = np.where(saves, lost_s, self.now_s - self.placed_s[jobs])
        self.lost_device_s += float((held_s * self.trace.gang[jobs]).sum())
        self.stopped += len(jobs)

    def _enter(self) -> None:
        first = self.submitted
        self.submitted = int(np.searchsorted(self.trace.arrival_s, self.now_s, side="right"))
        self.present = np.concatenate((self.present, np.arange(first, self.submitted)))
        self._goes_on(self.submitted - first)

    def _goes_on(self, changed: int) -> None:
        """Jobs came or ended: failures from here on count as failures in vain."""
        if self.nodes and changed:
            self.failed_before = self.nodes.failed

    def _decide(self) -> None:
        jobs = self.present
        began_s = time.process_time()
        decided = decide(self._work(jobs), self.capacity, self.policy, self.memory)
        self.planning_s.append(time.process_time() - began_s)
        self.memory = decided.memory
        if decided.fault:
            raise PolyfleetError(decided.fault, "mend the policy, or choose another one")
        changed = decided.option != self.option[jobs]
        self._stop(jobs[changed & (self.option[jobs] != WAITS)])
        started = jobs[changed & (decided.option != WAITS)]
        self.option[jobs] = decided.option
        if self.nodes:
            self.nodes.place({j: (int(self.option[j]), int(self.trace.gang[j])) for j in started.tolist()})
        self.placed_s[started] = self.now_s
        self.moves_s[started] = self.now_s + self.restart_s

    @property
    def capacity(self) -> Integers:
        return self.nodes.capacity if self.nodes else self.fleet.devices

    def _work(self, jobs: Integers) -> Work:
        trace, runs = self.trace, self.option[jobs] != WAITS
        return Work.of(
            np.arange(self.kinds),
            np.broadcast_to(trace.gang[jobs], (self.kinds, len(jobs))),
            self.left[jobs] * self.s_per_step[:, jobs],
            self.option[jobs],
            age_s=self.now_s - trace.arrival_s[jobs],
            isolated_s=self.isolated_s[jobs],
            restart_s=np.full(len(jobs), self.restart_s),
            order=jobs,
            priority=None if trace.priority is None else trace.priority[jobs],
            fixed=None if trace.stays is None else trace.stays[jobs] & runs,
        )

    def _keep_history(self) -> None:
        option = self.option[self.present]
        runs = option != WAITS
        used = np.bincount(option[runs], self.trace.gang[self.present[runs]], minlength=self.kinds).astype(np.int64)
        self.history.append((self.now_s, used, int((~runs).sum()), len(self.present)))
