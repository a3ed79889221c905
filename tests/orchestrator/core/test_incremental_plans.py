"""An incremental plan and a full one decide the same, wherever the law of docs/decisions/0021 says so.

1. Capacity: after any sequence of starts and stops, the free capacity that a plan changes by deltas equals one that is
   built from the snapshot with these deltas, and a decision on either is the same.
2. Passes: where no attempt may move for an equal one, and prices are not known yet or the policy needs none, a full
   pass decides the same as an incremental one.
3. Repeats: once a plan of either pass was carried out, an incremental pass starts and stops nothing more.
"""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from orchestrator.core.jobs.expected_duration import expectation
from orchestrator.core.model import Candidate, Devices, Job, Project, Running, Snapshot
from orchestrator.core.placement_slots import PlanMemory
from orchestrator.core.plan.assignment.board import board
from orchestrator.core.plan.assignment.job_order import decide_tier
from orchestrator.core.plan.options.capacity import FreeCapacity
from orchestrator.core.plan.options.host_memory import HostMemory
from orchestrator.core.plan.options.placement_options import list_options, refusal_reasons
from orchestrator.core.plan.options.quota import Quota
from orchestrator.core.plan.plan import ORDER_POLICIES, plan
from orchestrator.core.plan.policies.priced_policies import POLICIES
from tests.orchestrator.core.test_plan_properties import ANYTHING, check_starts, priced

GiB = 2**30
KINDS = ("nvidia:H100-80GB", "nvidia:A100-80GB", "cpu")
QUOTAS = {"vision": Project({"nvidia": 3}), "speech": Project({"cpu": 2, "nvidia:H100": 2})}


# -- 1. capacity


def snapshot_of(chance: Random) -> Snapshot:
    """Nodes of one to four devices, some of which share the memory of a machine; a few attempts, and jobs that wait."""
    devices = [_devices(chance, number) for number in range(chance.randint(1, 5))]
    free = {have.id: list(have.free) for have in devices}
    running = [_attempt(chance, number, devices, free) for number in range(chance.randint(0, 4))]
    jobs = [_job(chance, f"job-{number}", number) for number in range(chance.randint(1, 6))]
    policy, projects = chance.choice(POLICIES), QUOTAS if chance.random() < 0.5 else {}
    return Snapshot(
        100.0,
        tuple(replace(have, free=tuple(free[have.id])) for have in devices),
        tuple(jobs),
        tuple(attempt for attempt in running if attempt.allocation),
        policy=policy,
        projects=projects,
    )


def _devices(chance: Random, number: int) -> Devices:
    kind, total = chance.choice(KINDS), chance.randint(1, 4)
    shared = chance.choice(["", "one/10.0.0.1", f"own-{number}/10.0.0.2"])
    backend, memory_bytes = kind.partition(":")[0], 16 * GiB
    where = (f"n{number}/{kind}", f"n{number}", "pool", "torch", backend, kind, tuple(range(total)), total)
    return Devices(*where, memory_bytes, host=shared, host_memory_bytes=32 * GiB if shared else 0)


def _job(chance: Random, name: str, number: int) -> Job:
    wants = []
    for _ in range(chance.randint(1, 2)):
        low = chance.randint(1, 3)
        wants.append(
            Candidate(
                (chance.choice(["nvidia", "any", "cpu", "nvidia:H100"]),),
                low + chance.randint(0, 2),
                low,
                nodes=chance.choice([1, 1, 2]),
                memory_bytes=chance.choice([0, 0, 8, 16]) * GiB,
                exclusive=chance.random() < 0.1,
            )
        )
    project = chance.choice(["", "", *QUOTAS])
    return Job(name, name, "train", tuple(wants), priority=chance.randint(0, 2), number=number, project=project)


def _attempt(chance: Random, number: int, devices: list[Devices], free: dict[str, list[int]]) -> Running:
    have = chance.choice(devices)
    count = chance.randint(0, len(free[have.id]))
    numbers, free[have.id] = free[have.id][:count], free[have.id][count:]
    want = Candidate((have.kind,), max(count, 1), 1, memory_bytes=chance.choice([0, 8]) * GiB)
    priority = chance.randint(0, 2)
    spec = Job(f"run-{number}", "run", "train", (want,), priority=priority, project=chance.choice(["", *QUOTAS]))
    held = ((have.id, tuple(numbers)),) if numbers else ()
    return Running(spec.id, priority, 50 + number, held, chance.random() < 0.8, spec=spec, saves=True)


def check_deltas(chance: Random) -> int:
    """Start and stop in any order, and compare with a fresh build after each delta. Return the number of deltas."""
    seen, made = snapshot_of(chance), 0
    capacity = FreeCapacity(seen)
    for _ in range(chance.randint(1, 6)):
        changed = (_start if chance.random() < 0.7 else _stop)(chance, seen, capacity)
        if changed is not None:
            seen, made = changed, made + 1
            assert facts(capacity, seen) == facts(FreeCapacity(seen), seen)
    return made


def _start(chance: Random, seen: Snapshot, capacity: FreeCapacity) -> Snapshot | None:
    job = chance.choice(seen.jobs) if seen.jobs else None
    options = list_options(job, capacity) if job else []
    if not job or not options:
        return None
    option = chance.choice(options)
    capacity.allocate(job.candidates[option.candidate], option)
    capacity.quota.allocate(job, option)
    given_out = dict(option.allocation)
    devices = tuple(replace(d, free=tuple(sorted({*d.free} - {*given_out.get(d.id, ())}))) for d in seen.devices)
    attempt = Running(job.id, job.priority, job.number, option.allocation, False, spec=job, candidate=option.candidate)
    others = tuple(other for other in seen.jobs if other.id != job.id)
    return replace(seen, devices=devices, jobs=others, running=(*seen.running, attempt))


def _stop(chance: Random, seen: Snapshot, capacity: FreeCapacity) -> Snapshot | None:
    if not (going := [attempt for attempt in seen.running if attempt.job in capacity.running]):
        return None
    victim = chance.choice(going)
    capacity.count_as_stopping(victim)
    return replace(seen, running=tuple(replace(r, stopping=r.stopping or r is victim) for r in seen.running))


def facts(capacity: FreeCapacity, seen: Snapshot) -> dict[str, object]:
    """All that a later decision reads, and the decision itself."""
    expect, lowest = expectation(seen), min((job.priority for job in seen.jobs), default=0)
    arrays = board(seen, seen.jobs, (), capacity, lowest, expect)
    work, machines = arrays.work, arrays.work.machines
    decided = decide_tier(seen, seen.jobs, (), capacity, lowest, expect)
    return {
        "devices": [(have.id, have.free, capacity.available_soon(have.id)) for have in capacity.devices.values()],
        "memory": (capacity.memory.free_bytes, capacity.memory.freeing_bytes),
        "victims": {level: [r.job for r in capacity.lower_priority(level)] for level in range(4)},
        "options": {job.id: list_options(job, capacity) for job in seen.jobs},
        "refusals": {job.id: refusal_reasons(job, capacity) for job in seen.jobs},
        "quota": {
            (job.id, kind): (capacity.quota.refusal_reason(job, 1, kind), capacity.quota.is_within(job, 1, kind))
            for job in seen.jobs
            for kind in KINDS
        },
        "board": (arrays.islands, arrays.places, arrays.capacity.tolist(), work.devices.tolist(), arrays.nodes),
        "durations": work.remaining_s.tolist(),
        "machines": machines and (machines.free_bytes.tolist(), machines.free.tolist()),
        "decision": (decided.first, decided.then, decided.places, decided.nodes, decided.value),
    }


@settings(max_examples=150, deadline=None, suppress_health_check=ANYTHING)
@given(seed=st.integers(0, 2**32 - 1))
def test_capacity_that_is_changed_by_deltas_equals_a_fresh_one_and_a_decision_on_either_is_the_same(seed):
    event(f"{check_deltas(Random(seed))} deltas")


def _every_second(original):
    """A method of which every second call is lost."""
    calls = []

    def method(self, *args):
        calls.append(args)
        return original(self, *args) if len(calls) % 2 else None

    return method


LOST = [
    (FreeCapacity, "_remove"),
    (HostMemory, "allocate"),
    (HostMemory, "count_as_stopping"),
    (Quota, "allocate"),
    (Quota, "count_as_stopping"),
]


@pytest.mark.parametrize(("of", "name"), LOST, ids=[f"{of.__name__}.{name}" for of, name in LOST])
def test_a_delta_that_is_lost_is_found(of, name, monkeypatch):
    monkeypatch.setattr(of, name, _every_second(getattr(of, name)))
    for seed in range(500):
        try:
            check_deltas(Random(seed))
        except AssertionError:
            return
    pytest.fail(f"500 seeds did not find that every second {name} is lost")


# -- 2. passes


def decided(found) -> tuple[object, ...]:
    return found.start, found.preempt, found.why_not, found.value, found.bound


@settings(max_examples=150, deadline=None, suppress_health_check=ANYTHING)
@given(seen=priced())
def test_where_no_attempt_may_move_and_no_prices_are_known_both_passes_decide_the_same(seen):
    seen = replace(seen, memory=PlanMemory(), running=tuple(replace(r, saves=False) for r in seen.running))
    assert decided(plan(seen)) == decided(plan(seen, full=True))


@settings(max_examples=150, deadline=None, suppress_health_check=ANYTHING)
@given(seen=priced(), policy=st.sampled_from(sorted(ORDER_POLICIES)))
def test_a_policy_of_order_decides_the_same_in_both_passes_whatever_runs_and_was_decided_before(seen, policy):
    seen = replace(seen, policy=policy)
    seen = replace(seen, memory=plan(seen, full=True).memory)
    assert decided(plan(seen)) == decided(plan(seen, full=True))


# -- 3. repeats


def carried_out(seen: Snapshot, done) -> Snapshot:
    """The snapshot after a plan's starts, with its memory; those who stop are stopping."""
    given_out = {}
    for start in done.start:
        for devices_id, numbers in start.allocation:
            given_out.setdefault(devices_id, set()).update(numbers)
    jobs = {job.id: job for job in seen.jobs}
    victims = {preempt.victim for preempt in done.preempt}
    started = [
        Running(s.job, jobs[s.job].priority, 99, s.allocation, spec=jobs[s.job], candidate=s.candidate)
        for s in done.start
    ]
    return replace(
        seen,
        devices=tuple(replace(d, free=tuple(sorted({*d.free} - given_out.get(d.id, set())))) for d in seen.devices),
        jobs=tuple(job for job in seen.jobs if job.id not in {start.job for start in done.start}),
        running=(*(replace(r, stopping=r.stopping or r.job in victims) for r in seen.running), *started),
        memory=done.memory,
    )


def awaited(memory: PlanMemory) -> dict[str, object]:
    """Where each blocked job waits."""
    return {**memory.waits_on, **{job: reservation.place for job, reservation in memory.reserved.items()}}


@settings(max_examples=200, deadline=None, suppress_health_check=ANYTHING)
@given(seen=priced(), full=st.booleans())
def test_a_plan_that_was_carried_out_leaves_nothing_to_start_or_stop(seen, full):
    """Unless a blocked job now waits elsewhere, where it lacks fewer devices because of an attempt that stops.

    Two kinds of plans may leave jobs to start. After stops, devices of a stopping attempt replace free ones that were
    reserved. After starts, a policy that values jobs may change the order of the remaining ones. Both plans get the
    same drains, which decide which jobs starve.
    """
    seen = replace(seen, memory=replace(seen.memory, drains_s=plan(seen, full=True).memory.drains_s))
    done = plan(seen, full=full)
    after = carried_out(seen, done)
    again = plan(after)
    check_starts(after, again)
    before = awaited(done.memory)
    if all(before.get(job, where) == where for job, where in awaited(again.memory).items()):
        assert again.preempt == ()
        is_final = not done.preempt and (seen.policy in ORDER_POLICIES or not done.start)
        assert not is_final or {start.job for start in again.start} <= done.memory.reserved.keys()
