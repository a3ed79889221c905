"""Which jobs a run needs, and that the planner chooses their nodes."""

from dataclasses import replace

import pytest

from cluster.errors import FleetError, SpecError
from orchestrator.benchmark import suite
from orchestrator.core.model import Devices, Snapshot
from orchestrator.core.plan.plan import plan
from orchestrator.runtime.benchmarks import job_requests
from orchestrator.spec.job_spec import parse_job


def devices(node, kind, pool, total=1, **more):
    have = Devices(f"{node}/{kind}", node, pool, pool, kind.partition(":")[0], kind, tuple(range(total)), total)
    return replace(have, **more)


FLEET = [
    devices("big-0", "nvidia:H100-80GB", "big", 4),
    devices("big-1", "nvidia:H100-80GB", "big", 4),
    devices("left-0", "cpu", "left"),
    devices("right-0", "cpu", "right"),
    devices("ipex-0", "cpu:ipex", "ipex"),
    devices("xla-0", "tpu:emulated", "xla", emulated=True),
]


def request(**fields):
    return suite.request({"cases": ["rmsnorm"], **fields})


def names(wanted):
    return [(w.name, w.kind, w.pools, w.node) for w in wanted]


def test_each_kind_is_one_job_in_any_of_the_pools_that_have_it():
    assert names(job_requests.plan_jobs(request(), FLEET)) == [
        ("nvidia:H100-80GB", "nvidia:H100-80GB", ("big",), ""),
        ("cpu:ipex", "cpu:ipex", ("ipex",), ""),
        ("cpu", "cpu", ("left", "right"), ""),
        ("tpu:emulated", "tpu:emulated", ("xla",), ""),
    ]


def test_kinds_and_pools_asked_for_come_in_their_order():
    assert names(job_requests.plan_jobs(request(kinds=["cpu", "nvidia"]), FLEET)) == [
        ("cpu", "cpu", ("left", "right"), ""),
        ("nvidia:H100-80GB", "nvidia:H100-80GB", ("big",), ""),
    ]
    assert names(job_requests.plan_jobs(request(pools=["right", "left"]), FLEET)) == [
        ("cpu@right", "cpu", ("right",), ""),
        ("cpu@left", "cpu", ("left",), ""),
    ]


def test_with_all_devices_each_node_is_a_job_and_each_device_a_column():
    wanted = job_requests.plan_jobs(request(all_devices=True, pools=["big"]), FLEET)
    assert names(wanted) == [
        (f"nvidia:H100-80GB@{node}", "nvidia:H100-80GB", ("big",), node) for node in ("big-0", "big-1")
    ]
    assert wanted[0].targets((0, 2)) == [(0, "nvidia:H100-80GB@big-0.0"), (1, "nvidia:H100-80GB@big-0.2")]
    assert job_requests.plan_jobs(request(pools=["big"]), FLEET)[0].targets((0, 2)) == [(0, "nvidia:H100-80GB")]


def test_what_is_not_here_is_refused_with_what_is():
    with pytest.raises(SpecError, match=r"no device of kind 'tpu:v5e' is ready; choose from cpu, cpu:ipex, nvidia"):
        job_requests.plan_jobs(request(kinds=["tpu:v5e"]), FLEET)
    with pytest.raises(SpecError, match="no device of pool 'lift' is ready; did you mean 'left'"):
        job_requests.plan_jobs(request(pools=["lift"]), FLEET)
    with pytest.raises(FleetError, match="no device is ready"):
        job_requests.plan_jobs(request(), [replace(FLEET[0], schedulable=False)])


def placed(fleet, **fields):
    """Where the planner puts the jobs of a run: devices ids and numbers, or why not."""
    jobs = []
    for number, wanted in enumerate(job_requests.plan_jobs(request(**fields), FLEET)):
        spec = wanted.spec("bench-1", request(**fields))
        jobs.append(parse_job(spec).to_job(f"j{number}", float(number)))
    decided = plan(Snapshot(10.0, tuple(fleet), tuple(jobs)))
    return {s.job: s.allocation for s in decided.start}, decided.why_not


def test_a_job_of_a_run_goes_to_a_node_that_nobody_uses_not_to_the_first_of_its_kind():
    busy = [replace(FLEET[0], free=(1, 2, 3)), *FLEET[1:]]
    assert placed(busy, kinds=["nvidia"])[0] == {"j0": (("big-1/nvidia:H100-80GB", (0, 1, 2, 3)),)}
    left_busy = [have if have.pool != "left" else replace(have, free=()) for have in FLEET]
    assert placed(left_busy, kinds=["cpu"])[0] == {"j0": (("right-0/cpu", (0,)),)}


def test_an_emulated_device_and_a_kind_of_the_same_back_end_are_found_by_their_full_name():
    start, why_not = placed(FLEET)
    assert {job: leases[0][0] for job, leases in start.items()} == {
        "j0": "big-0/nvidia:H100-80GB", "j1": "ipex-0/cpu:ipex", "j2": "left-0/cpu", "j3": "xla-0/tpu:emulated",
    }  # fmt: skip
    assert why_not == {}


def test_with_all_devices_the_node_that_was_asked_for_is_waited_for():
    start, why_not = placed([replace(FLEET[0], free=(1,)), *FLEET[1:]], all_devices=True, pools=["big"])
    assert start == {"j1": (("big-1/nvidia:H100-80GB", (0, 1, 2, 3)),)}
    assert why_not["j0"][0, "big-0/nvidia:H100-80GB"] == (
        "has 1 of 4 devices free, but the job needs all of them (exclusive)"
    )
