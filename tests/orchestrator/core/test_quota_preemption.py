"""No attempt stops twice for a job that has not started, in small fleets whose projects have quotas."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.core.model import Project
from orchestrator.core.plan.plan import plan
from orchestrator.core.plan.policies.priced_policies import POLICIES

ARRIVALS = 6
"""Turns in which jobs are submitted."""
MAX_TURNS = 80
STOPS = 0.3
"""Chance that an attempt that is stopping ends in a turn."""


class World:
    """Jobs that never end by themselves. A turn makes a plan, applies it, and lets some stopping attempts end.

    `varied`: some nodes are of another kind, some jobs accept both, numbers of devices or all of a node, or may not be
    stopped, and some plans are full ones.
    """

    def __init__(self, w, seed, varied=False):
        self.w, self.random, self.turn = w, Random(seed), 0
        self.variety = Random(f"variety of {seed}") if varied else None
        self.devices = [w.devices(name, self.random.randint(1, 3)) for name in "abc"[: self.random.randint(2, 3)]]
        self.projects = {
            name: Project({"nvidia": self.random.randint(1, 3)}, borrow=self.random.random() < 0.7) for name in "xy"
        }
        if self.variety and self.variety.random() < 0.5:
            self.devices[-1] = w.devices("other", self.devices[-1].total, kind="amd:MI300X", pool="amd")
            self.projects = {name: replace(p, quota={**p.quota, "amd": 1}) for name, p in self.projects.items()}
        self.policy, self.memory = self.random.choice(POLICIES), w.snapshot([], []).memory
        self.jobs, self.waiting, self.running = {}, [], {}
        self.preempted: Counter[tuple[str, str]] = Counter()
        self.most_often = 0

    def submit(self):
        number, (count, nodes) = len(self.jobs) + 1, (self.random.randint(1, 2), self.random.choice([1, 1, 2]))
        want = self.w.want("nvidia", count=count, nodes=nodes)
        priority, project = self.random.choice([0, 0, 5, 9]), self.random.choice(["x", "x", "y", ""])
        job = self.w.job(f"j{number}", want, number=number, priority=priority, project=project)
        job = self.vary(job) if self.variety else job
        self.jobs[job.id] = job
        self.waiting.append(job.id)

    def vary(self, job):
        [want] = job.candidates
        if self.variety.random() < 0.3:
            want = replace(want, count=want.count + 1)
        elif self.variety.random() < 0.2:
            want = replace(want, count=1, min_count=1, exclusive=True)
        if self.variety.random() < 0.4:
            want = replace(want, kinds=("nvidia", "amd"))
        return replace(job, candidates=(want,), objective="throughput", preemptible=self.variety.random() < 0.8)

    def snapshot(self):
        used = {
            (devices_id, number)
            for attempt in self.running.values()
            for devices_id, numbers in attempt.allocation
            for number in numbers
        }
        devices = [replace(have, free=tuple(n for n in have.free if (have.id, n) not in used)) for have in self.devices]
        waiting, running = [self.jobs[job] for job in self.waiting], list(self.running.values())
        more = {"policy": self.policy, "projects": self.projects, "memory": self.memory}
        return self.w.snapshot(devices, waiting, running, now_s=100.0 + 2.0 * self.turn, **more)

    def step(self):
        """Return False if nothing changes any more."""
        if self.turn == ARRIVALS:
            self.preempted, self.most_often = Counter(), 0  # what comes may change who has quota left
        for _ in range(self.random.randint(0, 2) if self.turn < ARRIVALS else 0):
            self.submit()
        decided = plan(self.snapshot(), full=bool(self.variety and self.turn % 5 == 4))
        self.memory, self.turn = decided.memory, self.turn + 1
        for start in decided.start:
            job = self.jobs[start.job]
            self.waiting.remove(job.id)
            facts = {"priority": job.priority, "order": job.number, "preemptible": job.preemptible, "saves": True}
            self.running[job.id] = self.w.running(job.id, *start.allocation, spec=job, **facts)
            self.preempted = Counter({pair: n for pair, n in self.preempted.items() if pair[1] != job.id})
        for preempt in decided.preempt:
            self.running[preempt.victim] = replace(self.running[preempt.victim], stopping=True)
            self.preempted[preempt.victim, preempt.job] += 1
        self.most_often = max(self.most_often, *self.preempted.values(), 0)
        stopping = [attempt.job for attempt in self.running.values() if attempt.stopping]
        for job in [job for job in stopping if self.random.random() < STOPS]:
            del self.running[job]
            self.waiting.append(job)
        return bool(self.turn <= ARRIVALS or decided.start or decided.preempt or stopping)


def check(w, seed, varied=False):
    world = World(w, seed, varied)
    while world.step() and world.turn < MAX_TURNS:
        pass
    assert world.turn < MAX_TURNS, "the fleet does not settle"
    assert world.most_often <= 1


@pytest.mark.parametrize("seed", [50, 188, 482, 514, 884, 1393, 1657, 2189, 2490])
def test_fleets_settle_in_which_attempts_once_stopped_in_vain(w, seed):
    check(w, seed)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1), varied=st.booleans())
def test_no_attempt_stops_twice_for_a_job_that_has_not_started(w, seed, varied):
    check(w, seed, varied)
