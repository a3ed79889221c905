"""A job on several hosts of TPU slices gets all hosts of one slice, with all their chips, in the order of the slice."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cluster.types import Device
from orchestrator.core.controller.nodes import device_groups
from orchestrator.core.controller.scaling import NodeGroup
from orchestrator.core.explanation.explain import explain, impossible_reason
from orchestrator.core.fleet.demand import demand, example_nodes
from orchestrator.core.model import Candidate, Devices, Job, Plan, Running, Snapshot, TpuSlice
from orchestrator.core.plan.plan import plan
from orchestrator.core.plan.policies.priced_policies import POLICIES


def host(w, name, worker, hosts=2, chips=4, **more):
    """Host `worker` of slice `name`; ids are in the reverse order of the workers."""
    return w.v5e(f"{name}-{9 - worker}", chips, tpu_slice=TpuSlice(name, hosts, worker), **more)


def gang(w, nodes=2, count=4, name="g", **more):
    return w.job(name, w.want("tpu:v5e", nodes=nodes, count=count), **more)


def nodes_of(start):
    return [devices_id.partition("/")[0] for devices_id, _ in start.allocation]


@pytest.mark.parametrize("policy", POLICIES)
def test_it_gets_all_hosts_of_one_slice_in_their_order_although_two_others_are_free(w, policy):
    fleet = [host(w, "a", 0), host(w, "a", 1, free=()), host(w, "b", 0), host(w, "b", 1)]
    [start] = plan(w.snapshot(fleet, [gang(w)], policy=policy)).start
    assert nodes_of(start) == ["b-9", "b-8"]
    assert {numbers for _, numbers in start.allocation} == {(0, 1, 2, 3)}


@pytest.mark.parametrize("policy", POLICIES)
def test_it_waits_while_enough_hosts_are_free_but_of_several_slices(w, policy):
    fleet = [host(w, "a", 0), host(w, "a", 1, free=(0,)), host(w, "b", 0, free=()), host(w, "b", 1)]
    seen = w.snapshot(fleet, [gang(w)], policy=policy)
    assert plan(seen).start == ()
    [answer] = explain(gang(w), seen).candidates
    assert "the others are reserved for it" in answer.refused[""]
    assert answer.refused["a-8/tpu:v5e"] == "has 1 of 4 devices free, but the job needs all of them (TPU slice a)"


def test_a_range_of_devices_means_all_chips_of_each_host(w):
    fleet = [host(w, "a", 0), host(w, "a", 1)]
    want = Candidate(("tpu:v5e",), count=8, min_count=1, nodes=2)
    [start] = plan(w.snapshot(fleet, [w.job("g", want)])).start
    assert [len(numbers) for _, numbers in start.allocation] == [4, 4]


@pytest.mark.parametrize(
    ("want", "why"),
    [
        ({"nodes": 3, "count": 4}, "is one of 2 hosts of TPU slice a, which are used together, but the job needs 3"),
        (
            {"nodes": 2, "count": 2},
            "has too many devices: all 4 chips of each host of TPU slice a are used together, but the job needs 2",
        ),
        (
            {"nodes": 2, "count": 4, "whole_batch": True, "batch_size": 12},
            "cannot divide the job's batch of 12 equally: all 4 chips of each host of TPU slice a are used together",
        ),
    ],
)
def test_what_no_whole_slice_can_give_is_refused_with_a_sentence(w, want, why):
    fleet = [host(w, "a", 0), host(w, "a", 1)]
    job = w.job("g", w.want("tpu:v5e", **want))
    assert why in impossible_reason(job, fleet)
    assert why in explain(job, w.snapshot(fleet, [])).candidates[0].refused["a-8/tpu:v5e"]


def test_hosts_of_a_slice_without_a_name_are_not_combined(w):
    fleet = [host(w, "", 0), host(w, "", 1)]
    assert "without a name; set TPU_NAME on each host of the slice" in impossible_reason(gang(w), fleet)


def test_a_slice_of_which_a_host_is_missing_cannot_run_it(w):
    fleet = [host(w, "a", 0), host(w, "b", 1)]
    assert impossible_reason(gang(w), fleet) == (
        "the job needs all 2 hosts of one TPU slice; 1 of slice a in pool v5e (tpu:v5e) can run it"
    )


def test_a_job_on_one_host_breaks_no_idle_slice_while_another_host_fits_it(w):
    fleet = [host(w, "a", 0), host(w, "a", 1), host(w, "b", 0, free=()), host(w, "b", 1)]
    one = w.job("one", w.want("tpu:v5e", count=2))
    [start] = plan(w.snapshot(fleet, [one], policy="priority")).start
    assert nodes_of(start) == ["b-8"]
    [start] = plan(w.snapshot(fleet[:2], [one], policy="priority")).start
    assert nodes_of(start)[0] in ("a-8", "a-9")


def test_jobs_of_lower_priority_stop_on_one_slice_only(w):
    fleet = [host(w, "a", 0, free=()), host(w, "a", 1), host(w, "b", 0), host(w, "b", 1, free=())]
    running = [w.running(name, (f"{node}/tpu:v5e", (0, 1, 2, 3))) for name, node in (("on-a", "a-9"), ("on-b", "b-8"))]
    decided = plan(w.snapshot(fleet, [gang(w, priority=5)], running))
    assert [(p.victim, p.job) for p in decided.preempt] in ([("on-a", "g")], [("on-b", "g")])


def test_new_nodes_come_as_whole_slices(w):
    group = NodeGroup("v5e", "v5e", "tpu", "tpu:v5e", 4, {"TPU": 4}, max_nodes=8, hosts=2, memory_bytes=16 * w.GiB)
    slices = [have.tpu_slice for have in example_nodes(group, 3)]
    assert slices == [TpuSlice("+v5e-00000", 2, 0), TpuSlice("+v5e-00000", 2, 1), TpuSlice("+v5e-00001", 2, 0)]
    seen = w.snapshot([], [gang(w)])
    assert demand(seen, plan(seen), (group,)).nodes == {"v5e": 2}
    assert example_nodes(replace(group, hosts=1), 1)[0].tpu_slice is None


def test_a_node_belongs_to_the_slice_that_its_discovery_reports(t):
    facts = t.facts("n", kind="tpu:v5e", pool="v5e")
    for found, tpu_slice in (
        ({"slice_hosts": 4, "slice_name": "a", "worker_id": 3}, TpuSlice("a", 4, 3)),
        ({"slice_hosts": 4, "worker_id": "odd"}, TpuSlice("", 4, 0)),
        ({"slice_name": "a", "worker_id": 0}, None),
    ):
        device = Device("tpu", "tpu:v5e", 0, "TPU", total_memory_bytes=1, properties=found)
        [group] = device_groups(replace(facts, devices=(device,)), "n", "", 0.0, {})
        assert group.tpu_slice == tpu_slice


# -- whatever the fleet


def fleet_of(chance: Random) -> list[Devices]:
    """Slices of one to three hosts, some of which lack a host or take no jobs, and nodes that belong to none."""
    fleet = []
    for number in range(chance.randint(1, 4)):
        hosts, chips = chance.choice([1, 2, 2, 3]), chance.choice([1, 4])
        for worker in range(hosts):
            if chance.random() < 0.1:
                continue
            free = tuple(range(chips)) if chance.random() < 0.7 else tuple(range(chance.randint(0, chips)))
            name = f"s{number}-{worker}"
            fleet.append(
                Devices(
                    f"{name}/tpu:v5e", name, "v5e", "v5e", "tpu", "tpu:v5e", free, chips,
                    schedulable=chance.random() < 0.9, reason="closed",
                    tpu_slice=TpuSlice(f"s{number}", hosts, worker) if hosts > 1 else None,
                )
            )  # fmt: skip
    return fleet


def jobs_of(chance: Random) -> list[Job]:
    wants = [
        Candidate(("tpu",), low + more, low, nodes=nodes, exclusive=chance.random() < 0.2)
        for low, more, nodes in ((chance.randint(1, 4), chance.choice([0, 3]), chance.randint(1, 3)) for _ in range(5))
    ]
    return [
        Job(f"j{n}", "j", "train", (want,), priority=chance.randint(0, 1), number=n) for n, want in enumerate(wants)
    ]


def attempts_of(chance: Random, fleet: list[Devices]) -> list[Running]:
    """One attempt for each node with devices in use."""
    held = [(have, tuple(sorted(set(range(have.total)) - set(have.free)))) for have in fleet]
    return [
        Running(f"on-{have.node}", 0, 9, ((have.id, numbers),), stopping=chance.random() < 0.2)
        for have, numbers in held
        if numbers
    ]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), policy=st.sampled_from(POLICIES), full=st.booleans())
def test_no_plan_divides_a_slice_among_hosts_of_a_gang_or_mixes_slices(seed, policy, full):
    chance = Random(seed)
    fleet, jobs = fleet_of(chance), jobs_of(chance)
    by_id = {have.id: have for have in fleet}
    seen = Snapshot(100.0, tuple(fleet), tuple(jobs), tuple(attempts_of(chance, fleet)), policy=policy)
    decided = plan(seen, full=full)
    started = decided.start
    wants = {job.id: job.candidates[0] for job in jobs}
    for start in started:
        have = [(by_id[devices_id], numbers) for devices_id, numbers in start.allocation]
        slices = [one.tpu_slice for one, _ in have]
        if wants[start.job].nodes == 1 or not any(slices):
            continue
        event("a gang runs on a slice")
        [(_, hosts)] = {(one.name, one.hosts) for one in slices}
        assert len(have) == hosts
        assert [one.worker for one in slices] == list(range(hosts))
        assert all(len(numbers) == one.total for one, numbers in have)
    if not full:
        check_no_whole_slice_idles(seen, decided)


def check_no_whole_slice_idles(seen: Snapshot, decided: Plan) -> None:
    """If the first of the highest priority that waits is a gang, no whole slice is free for it, unless attempts stop
    for it on another slice, which the policy prefers.
    """
    names = {start.job for start in decided.start}
    given_out = {devices_id for start in decided.start for devices_id, _ in start.allocation}
    waits = sorted((job for job in seen.jobs if job.id not in names), key=lambda job: (-job.priority, job.number))
    if not waits or waits[0].candidates[0].nodes == 1 or waits[0].id in decided.memory.reserved:
        return
    want, idle = waits[0].candidates[0], {}
    for have in seen.devices:
        fits = want.exclusive or want.min_count <= have.total <= want.count
        if have.tpu_slice and have.schedulable and fits and len(have.free) == have.total and have.id not in given_out:
            idle[have.tpu_slice.name, have.tpu_slice.hosts] = (
                idle.get((have.tpu_slice.name, have.tpu_slice.hosts), 0) + 1
            )
    assert not any(count == hosts == want.nodes for (_, hosts), count in idle.items())
