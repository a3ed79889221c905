"""The memory of a machine whose devices share it is promised once, whichever of them a job gets."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.types import Device
from orchestrator.core.controller.nodes import device_groups
from orchestrator.core.explanation.explain import explain, impossible_reason
from orchestrator.core.jobs.expected_duration import expectation
from orchestrator.core.model import Candidate, Devices, Job, Running, Snapshot
from orchestrator.core.plan.assignment.job_order import decide_tier
from orchestrator.core.plan.options.capacity import FreeCapacity
from orchestrator.core.plan.plan import plan
from orchestrator.core.plan.policies.priced_policies import PRICED

GiB = 1 << 30
SPARK = {"host": "spark/10.0.0.7", "host_memory_bytes": 120 * GiB, "memory_gib": 120}


@pytest.fixture
def spark(w):
    """A DGX Spark: its GPU in one pool, its CPU in another."""
    return w.devices("gpu-0", kind="nvidia:GB10", pool="gpu", **SPARK), w.cpu("cpu-0", 2, **SPARK)


def asks(w, name, kind, gib, count=1, priority=0, number=0, **more):
    want = w.want(kind, count=count, memory_bytes=gib * GiB, **more)
    return w.job(name, want, priority=priority, number=number)


def holds(w, job, *leases, **more):
    return w.running(job.id, *leases, priority=job.priority, spec=job, **more)


def test_two_jobs_of_one_plan_are_not_promised_the_same_memory(w, spark):
    first, second = asks(w, "first", "nvidia:GB10", 80, number=1), asks(w, "second", "cpu", 60, number=2)
    small = asks(w, "small", "cpu", 40, number=3)
    decided = plan(w.snapshot(spark, [first, second, small]))
    assert [start.job for start in decided.start] == ["first"]
    said = decided.why_not["second"][0, "cpu-0/cpu"]
    assert said.startswith("shares the memory of machine spark, of which 40 of 120 GiB are not allocated")
    assert said.endswith(", but the job needs 60 GiB")
    assert decided.why_not["second"][0, ""] == "waits for memory of machine spark on cpu-0/cpu"
    assert "small" in decided.why_not, "what is left is kept for the second, which goes first"


def test_what_a_running_job_of_another_pool_was_promised_counts_until_it_ends(w, spark):
    gpu, cpu = spark
    runs, waits = asks(w, "runs", "cpu", 50, count=2), asks(w, "waits", "nvidia:GB10", 40)
    held = holds(w, runs, ("cpu-0/cpu", (0, 1)))
    busy = w.snapshot([gpu, replace(cpu, free=())], [waits], [held])
    assert plan(busy).start == ()
    [answer] = explain(waits, busy).candidates
    assert answer.fits == () and "of which 20 of 120 GiB are not allocated" in answer.refused["gpu-0/nvidia:GB10"]
    stopping = replace(busy, running=(replace(held, stopping=True),))
    assert plan(stopping).start == ()
    assert [s.job for s in plan(replace(busy, running=())).start] == ["waits"]


def test_a_job_that_moves_keeps_the_memory_of_the_candidate_it_runs_as(w, spark):
    """A migration has replaced its candidates by one that needs less."""
    gpu, cpu = spark
    small, waits = asks(w, "moves", "tpu:v5e", 1), asks(w, "waits", "nvidia:GB10", 40)
    large = w.want("cpu", count=2, memory_bytes=50 * GiB)
    saving = holds(w, small, ("cpu-0/cpu", (0, 1)), stopping=True, candidate=1, former_candidate=large)
    assert plan(w.snapshot([gpu, replace(cpu, free=())], [waits], [saving])).start == ()


def test_a_job_that_asks_for_no_memory_is_promised_none(w, spark):
    jobs = [asks(w, "all", "nvidia:GB10", 120, number=1), asks(w, "none", "cpu", 0, number=2)]
    assert {s.job for s in plan(w.snapshot(spark, jobs)).start} == {"all", "none"}


def test_memory_of_their_own_is_no_machines(w):
    cards = [w.devices("a", 2), w.devices("b", 2)]
    jobs = [asks(w, f"j{i}", "nvidia:H100", 80, count=2) for i in range(2)]
    assert len(plan(w.snapshot(cards, jobs)).start) == 2


def test_a_gang_whose_nodes_stand_on_one_machine_needs_the_memory_of_all(w):
    nodes = [w.cpu("cpu-0", **SPARK), w.cpu("cpu-1", **SPARK)]
    fits, too_much = (asks(w, "gang", "cpu", gib, nodes=2) for gib in (60, 61))
    assert [s.job for s in plan(w.snapshot(nodes, [fits])).start] == ["gang"]
    decided = plan(w.snapshot(nodes, [too_much]))
    assert decided.start == ()
    assert decided.why_not["gang"][0, ""] == "waits for memory of machine spark on cpu-0/cpu, cpu-1/cpu"
    assert impossible_reason(fits, nodes) == ""
    assert impossible_reason(too_much, nodes).endswith(
        "cpu-0/cpu, cpu-1/cpu share the memory of their machines, which is too little for 2 nodes of the job"
    )
    elsewhere = replace(nodes[1], host="other/10.0.0.8")
    assert [s.job for s in plan(w.snapshot([nodes[0], elsewhere], [too_much])).start] == ["gang"]


def test_a_more_urgent_job_has_one_of_another_pool_stopped_for_its_memory(w, spark):
    gpu, cpu = spark
    runs, urgent = asks(w, "runs", "cpu", 100), asks(w, "urgent", "nvidia:GB10", 40, priority=5)
    idle = asks(w, "idle", "cpu", 1)
    held = [holds(w, runs, ("cpu-0/cpu", (0,))), holds(w, idle, ("cpu-0/cpu", (1,)))]
    decided = plan(w.snapshot([gpu, replace(cpu, free=())], [urgent], held))
    assert [p.victim for p in decided.preempt] == ["runs"], "the other gives too little to be worth stopping"
    assert decided.why_not["urgent"][0, ""] == (
        "waits for runs of lower priority, which hold memory of its machine, to save and stop on gpu-0/nvidia:GB10"
    )


def test_a_job_that_needs_more_than_the_machine_has_for_all_devices_is_refused_for_good(w):
    node = w.cpu("cpu-0", 4, **SPARK)
    assert impossible_reason(asks(w, "big", "cpu", 50, count=3), [node]) == (
        "cpu-0/cpu: has 120 GiB that its devices share, but the job needs 150 GiB"
    )
    assert impossible_reason(asks(w, "fits", "cpu", 40, count=3), [node]) == ""


def test_devices_that_share_memory_are_of_their_machine_whatever_their_pool_and_others_are_not(t):
    def group(node, kind, unified):
        backend = kind.partition(":")[0]
        device = Device(backend, kind, 0, kind, total_memory_bytes=100 * GiB, unified_memory=unified)
        return device_groups(replace(t.facts(node), devices=(device,)), node, "", 0.0, {})[0]

    gb10, cpu, h100 = group("a", "nvidia:GB10", True), group("b", "cpu", True), group("c", "nvidia:H100-80GB", False)
    assert (gb10.host, gb10.host_memory_bytes) == (cpu.host, cpu.host_memory_bytes) == ("host/10.0.0.1", 100 * GiB)
    assert h100.host == ""


@st.composite
def machines(draw) -> Snapshot:
    """Nodes on two machines that share memory and one that does not; jobs, some of which run."""
    nodes = []
    for n in range(draw(st.integers(1, 5))):
        host, total = draw(st.sampled_from(["a", "b", ""])), draw(st.integers(1, 3))
        nodes.append((f"n{n}", total, host))
    fleet = [
        Devices(f"{name}/cpu", name, "p", "e", "cpu", "cpu", tuple(range(total)), total, 64 * GiB,
                host=host, host_memory_bytes=64 * GiB if host else 0)
        for name, total, host in nodes
    ]  # fmt: skip
    wants = st.builds(
        lambda gib, low, more, nodes: Candidate(("cpu",), low + more, low, nodes, memory_bytes=gib * GiB),
        st.sampled_from([0, 8, 20, 33, 64]), st.integers(1, 2), st.integers(0, 2), st.integers(1, 3),
    )  # fmt: skip
    jobs = [
        Job(f"j{n}", "j", "train", (draw(wants),), priority=draw(st.integers(0, 2)), number=n)
        for n in range(draw(st.integers(1, 6)))
    ]
    return Snapshot(100.0, tuple(fleet), tuple(jobs))


def promised(seen: Snapshot, leases_of: dict[str, tuple]) -> dict[str, int]:
    """Counted anew, without the code under test."""
    host = {have.id: have.host for have in seen.devices}
    found: dict[str, int] = {}
    for job in seen.jobs:
        for devices_id, numbers in leases_of.get(job.id, ()):
            size = job.candidates[0].memory_bytes * len(numbers)
            found[host[devices_id]] = found.get(host[devices_id], 0) + size
    return found


@given(machines())
@settings(max_examples=150, deadline=None)
def test_no_plan_promises_more_than_a_machine_has_and_one_by_one_all_that_fits_starts(seen):
    decided = plan(seen)
    leases = {start.job: start.allocation for start in decided.start}
    assert all(size <= 64 * GiB for host, size in promised(seen, leases).items() if host)
    running = tuple(
        Running(job.id, job.priority, job.number, leases[job.id], spec=job) for job in seen.jobs if job.id in leases
    )
    taken = {(i, n) for each in leases.values() for i, numbers in each for n in numbers}
    left = tuple(replace(d, free=tuple(n for n in d.free if (d.id, n) not in taken)) for d in seen.devices)
    waiting = tuple(job for job in seen.jobs if job.id not in leases)
    later = plan(replace(seen, devices=left, jobs=waiting, running=running))
    both = leases | {start.job: start.allocation for start in later.start}
    assert all(size <= 64 * GiB for host, size in promised(seen, both).items() if host)
    alone = plan(replace(seen, jobs=seen.jobs[:1]))
    assert bool(alone.start) == fits_alone(seen.jobs[0].candidates[0], seen.devices)


def fits_alone(want, fleet):
    """On an empty fleet: written again, without the code under test."""
    size = want.memory_bytes * want.min_count
    able: dict[str, int] = {}
    for have in fleet:
        if have.total >= want.min_count and (not have.host or size <= 64 * GiB):
            able[have.host] = able.get(have.host, 0) + 1
    together = (min(count, 64 * GiB // size) if host and size else count for host, count in able.items())
    return sum(together) >= want.nodes


by_value = pytest.mark.parametrize("policy", PRICED)


@by_value
def test_a_decision_by_value_chooses_no_two_jobs_for_the_memory_of_one(w, spark, policy):
    """All three have devices, and memory only the first or the other two."""
    jobs = [asks(w, "first", "nvidia:GB10", 100), asks(w, "second", "cpu", 60), asks(w, "third", "cpu", 50)]
    seen = w.snapshot(spark, [replace(job, number=n) for n, job in enumerate(jobs, 1)], policy=policy)
    chosen = {job.id for job in choose(seen).first}
    assert chosen in ({"first"}, {"second", "third"})
    assert {start.job for start in plan(seen).start} == chosen


@by_value
def test_a_job_that_was_chosen_without_memory_keeps_nothing_from_its_equals(w, spark, policy):
    """A device each: two of the three are not chosen together, and what fits beside the one that is starts."""
    gpu, cpu = spark
    jobs = [asks(w, "gpu", "nvidia:GB10", 80, number=1), asks(w, "large", "cpu", 60, number=2)]
    jobs += [asks(w, "small", "cpu", 40, number=3)]
    seen = w.snapshot([gpu, replace(cpu, free=(0,), total=1)], jobs, policy=policy)
    assert {start.job for start in plan(seen).start} in ({"gpu", "small"}, {"large"})


def test_a_job_that_runs_keeps_its_nodes_while_others_are_chosen_for_what_they_leave(w):
    """Two machines alike: one that has 100 of 120 GiB promised has no room for 40 more, the other has."""
    nodes = [w.cpu("cpu-0", 2, free=(1,), host="a/1", host_memory_bytes=120 * GiB, memory_gib=120),
             w.cpu("cpu-1", 2, host="b/2", host_memory_bytes=120 * GiB, memory_gib=120)]  # fmt: skip
    runs, waits = asks(w, "runs", "cpu", 100, number=1), asks(w, "waits", "cpu", 40, number=2)
    seen = w.snapshot(nodes, [waits], [holds(w, runs, ("cpu-0/cpu", (0,)), saves=True)], policy="finish_time")
    assert choose(seen, seen.running).nodes == {"waits": ("cpu-1/cpu",)}
    [start] = plan(seen, full=True).start
    assert start.allocation == (("cpu-1/cpu", (0,)),)


def test_of_nodes_with_memory_one_that_has_the_data_of_a_job_is_chosen(w):
    where = {"host_memory_bytes": 120 * GiB, "memory_gib": 120}
    nodes = [w.cpu("cpu-0", 2, host="a/1", **where), w.cpu("cpu-1", 2, host="b/2", storage="here", **where)]
    job = replace(asks(w, "job", "cpu", 100), checkpoint_in=("here",))
    assert choose(w.snapshot(nodes, [job], policy="finish_time")).nodes == {"job": ("cpu-1/cpu",)}


def choose(seen, running=()):
    """What the planner on arrays chooses of jobs of one priority, and for which nodes."""
    return decide_tier(seen, seen.jobs, running, FreeCapacity(seen), 0, expectation(seen), full=True)


@st.composite
def shared(draw, gangs=False):
    """Machines that share memory between nodes of two pools, or do not; jobs of one priority, some of which run."""
    nodes = []
    for n in range(draw(st.integers(1, 6))):
        kind, total = draw(st.sampled_from(["cpu", "nvidia:GB10"])), draw(st.integers(1, 3))
        host = draw(st.sampled_from(["a", "b", "c", ""]))
        backend = kind.partition(":")[0]
        nodes.append(
            Devices(f"n{n}/{kind}", f"n{n}", backend, "e", backend, kind, tuple(range(total)), total, 64 * GiB,
                    host=host, host_memory_bytes=64 * GiB if host else 0)
        )  # fmt: skip
    jobs = []
    for n in range(draw(st.integers(1, 8))):
        size_bytes, least = draw(st.sampled_from([0, 8, 20, 33, 64])) * GiB, draw(st.integers(1, 2)) if gangs else 1
        kinds = draw(st.sampled_from([("cpu",), ("nvidia:GB10",), ("nvidia:GB10", "cpu")]))
        want = Candidate(kinds, least + draw(st.integers(0, 1)), least, draw(st.integers(1, 2)) if gangs else 1)
        jobs.append(Job(f"j{n}", "j", "train", (replace(want, memory_bytes=size_bytes),), number=n + 1))
    return Snapshot(100.0, tuple(nodes), tuple(jobs), policy=draw(st.sampled_from([*PRICED])))


def after(seen, decided):
    """The snapshot once these attempts run."""
    asked = {job.id: job for job in seen.jobs}
    began = [Running(s.job, 0, asked[s.job].number, s.allocation, spec=asked[s.job], saves=True) for s in decided.start]
    taken = {(i, n) for start in decided.start for i, numbers in start.allocation for n in numbers}
    left = tuple(replace(d, free=tuple(n for n in d.free if (d.id, n) not in taken)) for d in seen.devices)
    started = {start.job for start in decided.start}
    waits = tuple(job for job in seen.jobs if job.id not in started)
    return replace(seen, devices=left, jobs=waits, running=(*seen.running, *began))


@given(shared(gangs=True))
@settings(max_examples=150, deadline=None)
def test_the_planner_on_arrays_promises_no_more_than_a_machine_has(seen):
    """What it decides, with the nodes that it gives, and what comes of it."""
    said, host = choose(seen), {have.id: have.host for have in seen.devices}
    asked, total = {job.id: job.candidates[0] for job in seen.jobs}, {d.id: d.total for d in seen.devices}
    size_bytes, devices = dict.fromkeys("abc", 0), dict.fromkeys(total, 0)
    for job, nodes in said.nodes.items():
        assert len(set(nodes)) == asked[job].nodes
        for devices_id in nodes:
            devices[devices_id] += said.places[job].count
            if host[devices_id]:
                size_bytes[host[devices_id]] += asked[job].memory_bytes * said.places[job].count
    assert max(size_bytes.values()) <= 64 * GiB
    assert all(count <= total[devices_id] for devices_id, count in devices.items())
    leases = {start.job: start.allocation for start in plan(seen, full=True).start}
    assert all(size <= 64 * GiB for where, size in promised(seen, leases).items() if where)


@given(shared(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_what_the_planner_on_arrays_leaves_waiting_the_plain_one_can_start_nowhere(seen, full):
    later = after(seen, plan(seen, full=full))
    for job in later.jobs:
        assert plan(replace(later, jobs=(job,), policy="priority")).start == ()


@given(shared())
@settings(max_examples=100, deadline=None)
def test_every_job_that_is_chosen_for_one_place_only_starts_there(seen):
    one = tuple(
        replace(job, candidates=(replace(want, kinds=want.kinds[:1], count=1),))
        for job in seen.jobs
        for want in job.candidates
    )
    seen = replace(seen, jobs=one)
    said, start = choose(seen), {start.job: start.allocation for start in plan(seen, full=True).start}
    assert set(start) == {job.id for job in said.first}
    for job, nodes in said.nodes.items():
        assert tuple(devices_id for devices_id, _ in start[job]) == nodes
