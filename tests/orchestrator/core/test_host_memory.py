"""The memory of a machine whose devices share it is promised once, whichever of them a job gets."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.vocabulary import Device
from orchestrator.core.explain import explain, never
from orchestrator.core.model import Candidate, Devices, Job, Running, Snapshot
from orchestrator.core.nodes import groups
from orchestrator.core.plan import plan

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
    return w.running(job.id, *leases, priority=job.priority, asked=job, **more)


def test_two_jobs_of_one_plan_are_not_promised_the_same_memory(w, spark):
    first, second = asks(w, "first", "nvidia:GB10", 80, number=1), asks(w, "second", "cpu", 60, number=2)
    small = asks(w, "small", "cpu", 40, number=3)
    decided = plan(w.snapshot(spark, [first, second, small]))
    assert [start.job for start in decided.start] == ["first"]
    said = decided.why_not["second"][0, "cpu-0/cpu"]
    assert said.startswith("its devices share the memory of machine spark, of which 40 of 120 GiB are not promised")
    assert said.endswith("; job needs 60")
    assert decided.why_not["second"][0, ""] == "waits for memory of machine spark on cpu-0/cpu"
    assert "small" in decided.why_not, "what is left is kept for the second, which goes first"


def test_what_a_running_job_of_another_pool_was_promised_counts_until_it_ends(w, spark):
    gpu, cpu = spark
    runs, waits = asks(w, "runs", "cpu", 50, count=2), asks(w, "waits", "nvidia:GB10", 40)
    held = holds(w, runs, ("cpu-0/cpu", (0, 1)))
    busy = w.snapshot([gpu, replace(cpu, free=())], [waits], [held])
    assert plan(busy).start == ()
    [answer] = explain(waits, busy).candidates
    assert answer.fits == () and "of which 20 of 120 GiB are not promised" in answer.refused["gpu-0/nvidia:GB10"]
    stopping = replace(busy, running=(replace(held, stopping=True),))
    assert plan(stopping).start == ()
    assert [s.job for s in plan(replace(busy, running=())).start] == ["waits"]


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
    assert never(fits, nodes) == ""
    assert never(too_much, nodes).endswith(
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
    assert never(asks(w, "big", "cpu", 50, count=3), [node]) == ("cpu-0/cpu: its devices share 120 GiB, job needs 150")
    assert never(asks(w, "fits", "cpu", 40, count=3), [node]) == ""


def test_devices_that_share_memory_are_of_their_machine_whatever_their_pool_and_others_are_not(t):
    def group(node, kind, unified):
        backend = kind.partition(":")[0]
        device = Device(backend, kind, 0, kind, total_memory_bytes=100 * GiB, unified_memory=unified)
        return groups(replace(t.facts(node), devices=(device,)), node, "", 0.0, {})[0]

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
    leases = {start.job: start.leases for start in decided.start}
    assert all(size <= 64 * GiB for host, size in promised(seen, leases).items() if host)
    running = tuple(
        Running(job.id, job.priority, job.number, leases[job.id], asked=job) for job in seen.jobs if job.id in leases
    )
    taken = {(i, n) for each in leases.values() for i, numbers in each for n in numbers}
    left = tuple(replace(d, free=tuple(n for n in d.free if (d.id, n) not in taken)) for d in seen.devices)
    waiting = tuple(job for job in seen.jobs if job.id not in leases)
    later = plan(replace(seen, devices=left, jobs=waiting, running=running))
    both = leases | {start.job: start.leases for start in later.start}
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
