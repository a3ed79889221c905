"""Replay a trace in continuous time, with the planner's real decision at every submission and end.

A job is a rigid gang on one kind of device, with the rate that it has there alone. Each start, resume and move costs a
pause without progress, in which the devices are held. A failing node removes its devices and stops the jobs on them;
the planner decides again when it fails and when it comes back.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.errors import PolyfleetError, UserError, nearest
from orchestrator.core.plan.arrays.planner_jobs import WAITS, Work
from orchestrator.core.plan.assignment.decision import PriceMemory, decide
from orchestrator.core.plan.policies.plugins import INSTALLED
from orchestrator.core.plan.policies.priced_policies import POLICIES
from orchestrator.simulation.fleets import Fleet
from orchestrator.simulation.node_failures import FailingNodes
from orchestrator.simulation.traces import Trace
from orchestrator.spec import installed_policies

TOGETHER_S = 1e-6
"""Ends within this time are one event, because rounding separates equal times."""

MIN_STEPS = 1e-12
"""Minimum of remaining steps: rounding must not leave 0 to a job that has not ended."""

MAX_FAILURES = 50_000
"""Number of failures without an end of a job after which the replay gives up."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stays:
    """Stays of jobs on devices, one per start, resume and move; all (stays,).

    `job` and `kind` are indices.
    """

    job: Integers
    kind: Integers
    start_s: Floats
    stop_s: Floats


@dataclass(frozen=True, slots=True)
class FailureCounts:
    """Number of failures until the last job ended, jobs that they stopped, and lost device-seconds.

    Lost are those that a stopped job held since its last checkpoint or its placement.
    """

    nodes: int
    stopped: int
    lost_device_s: float


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay. `end_s` (jobs,): in the order of the trace.

    State after each event, until the next: time `at_s`, `waiting` and `present` jobs (events,), `used` devices (events,
    kinds). `planning_s`: CPU time of each decision. `faults`: None if no node can fail.
    """

    end_s: Floats
    stays: "Stays"
    at_s: Floats
    used: Integers
    waiting: Integers
    present: Integers
    planning_s: Floats
    wall_s: float
    faults: FailureCounts | None = None


def replay(
    trace: Trace, fleet: Fleet, policy: str, restart_s: float = 0.0, noise: float = 0.0, seed: int = 0
) -> Replayed:
    """Replay a trace.

    `noise`: sigma of a log-normal factor per job, from `seed`, on the remaining work that the planner sees. Raises
    UserError, PolyfleetError.
    """
    check_policy(policy)
    factors = np.exp(noise * np.random.default_rng(seed).standard_normal(trace.jobs))
    return _Replay(trace, fleet, policy, restart_s, factors).run()


def check_policy(policy: str) -> None:
    installed_policies.load()
    choices = (*POLICIES, *sorted(INSTALLED))
    if policy not in choices:
        raise UserError(f"--policy: unknown policy {policy!r}", nearest(policy, choices))


class _Replay:
    """State of a replay.

    `left`: remaining steps; `option`: kind that a job runs on; `progress_start_s`: progress starts.
    """

    def __init__(self, trace: Trace, fleet: Fleet, policy: str, restart_s: float, factors: Floats):
        self.trace, self.fleet, self.policy, self.restart_s, self.factors = trace, fleet, policy, restart_s, factors
        jobs, self.kinds = trace.jobs, len(fleet.kinds)
        self.left = trace.steps.copy()
        self.option = np.full(jobs, WAITS, np.int64)
        self.progress_start_s, self.end_s = np.zeros(jobs), np.full(jobs, np.nan)
        self.placed_s = np.zeros(jobs)
        self.stays: list[tuple[Integers, Integers, Floats, Floats]] = []
        self.isolated_s = trace.isolated_s * factors
        with np.errstate(divide="ignore", over="ignore"):
            self.s_per_step = factors / trace.rate  # as the planner sees it; infinite: cannot run there
        self.present = np.zeros(0, np.int64)  # jobs in the system
        self.submitted, self.now_s = 0, 0.0
        self.memory = PriceMemory()
        self.history: list[tuple[float, Integers, int, int]] = []
        self.planning_s: list[float] = []
        self.nodes = FailingNodes(fleet, fleet.failures) if fleet.failures else None
        self.checkpoint_s = fleet.failures.checkpoint_s if fleet.failures else np.inf
        self.stopped, self.lost_device_s, self.failed_before = 0, 0.0, 0

    def run(self) -> Replayed:
        start_s = time.perf_counter()
        while self.submitted < self.trace.jobs or len(self.present):
            self._advance_to_next_event()
            if len(self.present) and self.capacity.any():
                self._decide()
            self._keep_history()
        wall_s = time.perf_counter() - start_s
        at_s, used, waiting, present = (np.array(arrays) for arrays in zip(*self.history, strict=True))
        planning_s = np.array(self.planning_s)
        stays = Stays(*(np.concatenate(arrays) for arrays in zip(*self.stays, strict=True)))
        faults = FailureCounts(self.nodes.failed, self.stopped, self.lost_device_s) if self.nodes else None
        return Replayed(self.end_s, stays, at_s, used, waiting, present, planning_s, wall_s, faults)

    def _advance_to_next_event(self) -> None:
        running = self.present[self.option[self.present] != WAITS]
        rate = self.trace.rate[self.option[running], running]
        since_s = np.maximum(self.progress_start_s[running], self.now_s)
        ends_s = since_s + self.left[running] / rate
        planned_s = min(float(ends_s.min(initial=np.inf)), self._next_arrival_s())
        if planned_s == np.inf and not (self.nodes and self.nodes.any_down):
            message = f"policy {self.policy!r} leaves all {len(self.present)} jobs waiting on an idle fleet"
            raise PolyfleetError(message, "choose another policy")
        now_s = max(min(planned_s, self._next_failure_s()), self.now_s)
        self.left[running] = np.maximum(self.left[running] - rate * np.maximum(now_s - since_s, 0.0), MIN_STEPS)
        self.now_s = now_s
        self._leave(running[ends_s <= now_s + TOGETHER_S])
        self._fail()
        self._enter()

    def _next_arrival_s(self) -> float:
        has_next = self.submitted < self.trace.jobs
        return float(self.trace.arrival_s[self.submitted]) if has_next else np.inf

    def _next_failure_s(self) -> float:
        """Time of the next failure or repair. Without jobs, failures are ignored."""
        return self.nodes.outages.next_s if self.nodes and len(self.present) else np.inf

    def _leave(self, ended_jobs: Integers) -> None:
        self._stop(ended_jobs)
        self.end_s[ended_jobs] = self.now_s
        self.present = self.present[np.isnan(self.end_s[self.present])]
        self._reset_failure_count(len(ended_jobs))

    def _stop(self, jobs: Integers) -> None:
        self.stays.append((jobs, self.option[jobs], self.placed_s[jobs], np.full(len(jobs), self.now_s)))
        self.option[jobs] = WAITS
        if self.nodes:
            self.nodes.release(jobs.tolist())

    def _fail(self) -> None:
        """Take failed nodes out and bring repaired ones back. Raises UserError after MAX_FAILURES in vain."""
        if (nodes := self.nodes) is None:
            return
        for node, is_failure in nodes.outages.until(self.now_s):
            if is_failure:
                stopped_jobs = np.array(nodes.jobs_on(node), np.int64)
                self._lose(stopped_jobs)
                self._stop(stopped_jobs)
                nodes.take_down(node)
            else:
                nodes.bring_back(node)
        if len(self.present) and nodes.failed - self.failed_before > MAX_FAILURES:
            message = f"nodes failed {MAX_FAILURES} times while none of {len(self.present)} jobs ended"
            raise UserError(f"--faults: {message}", "raise mtbf_h, or lower checkpoint_every_s or --restart-cost")

    def _lose(self, jobs: Integers) -> None:
        """Lose the progress since the last checkpoint.

        The first checkpoint is one period after progress began.
        """
        rate = self.trace.rate[self.option[jobs], jobs]
        ran_s = np.maximum(self.now_s - self.progress_start_s[jobs], 0.0)
        has_saved = ran_s >= self.checkpoint_s
        if self.trace.unsaved is not None:
            has_saved &= ~self.trace.unsaved[jobs]
        lost_s = np.where(has_saved, ran_s % self.checkpoint_s, ran_s)
        self.left[jobs] = np.minimum(self.left[jobs] + rate * lost_s, self.trace.steps[jobs])
        held_s = np.where(has_saved, lost_s, self.now_s - self.placed_s[jobs])
        self.lost_device_s += float((held_s * self.trace.gang[jobs]).sum())
        self.stopped += len(jobs)

    def _enter(self) -> None:
        first = self.submitted
        self.submitted = int(np.searchsorted(self.trace.arrival_s, self.now_s, side="right"))
        self.present = np.concatenate((self.present, np.arange(first, self.submitted)))
        self._reset_failure_count(self.submitted - first)

    def _reset_failure_count(self, changed: int) -> None:
        """Count failures without progress from now on, since jobs came or ended."""
        if self.nodes and changed:
            self.failed_before = self.nodes.failed

    def _decide(self) -> None:
        jobs = self.present
        start_s = time.process_time()
        decision = decide(self._work(jobs), self.capacity, self.policy, self.memory)
        self.planning_s.append(time.process_time() - start_s)
        self.memory = decision.memory
        if decision.fault:
            raise PolyfleetError(decision.fault, "fix the policy, or choose another one")
        changed = decision.option != self.option[jobs]
        self._stop(jobs[changed & (self.option[jobs] != WAITS)])
        started = jobs[changed & (decision.option != WAITS)]
        self.option[jobs] = decision.option
        if self.nodes:
            self.nodes.place({j: (int(self.option[j]), int(self.trace.gang[j])) for j in started.tolist()})
        self.placed_s[started] = self.now_s
        self.progress_start_s[started] = self.now_s + self.restart_s

    @property
    def capacity(self) -> Integers:
        return self.nodes.capacity if self.nodes else self.fleet.devices

    def _work(self, jobs: Integers) -> Work:
        trace, is_running = self.trace, self.option[jobs] != WAITS
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
            fixed=None if trace.unsaved is None else trace.unsaved[jobs] & is_running,
        )

    def _keep_history(self) -> None:
        option = self.option[self.present]
        is_running = option != WAITS
        used = np.bincount(option[is_running], self.trace.gang[self.present[is_running]], minlength=self.kinds).astype(
            np.int64
        )
        self.history.append((self.now_s, used, int((~is_running).sum()), len(self.present)))
