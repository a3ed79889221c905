"""A kind nobody measured is tried for so many device-seconds of a workload; then measured ones come first."""

from dataclasses import replace

import pytest

from orchestrator.core.model import Progress, Since
from orchestrator.core.plan.exploration import MIN_COUNTED_S
from orchestrator.core.plan.plan import plan
from orchestrator.core.throughput import Estimated, History, Measured, Throughput

ON_CPU = Throughput({("digits", "train", "cpu", "fp32"): Measured(10, 9, 11, "sample", "bench-1", 0.0)})
TPU = "tpu:v5e"


@pytest.fixture
def world(w):
    """Jobs that take one device of a TPU or a CPU, and enough of both."""
    devices = w.v5e("t", 16), w.cpu("c", 16)

    def build(count=1, **more):
        jobs = [job(w, f"j{number}", number=number + 1) for number in range(count)]
        return replace(w.snapshot(devices, jobs), throughput=ON_CPU, **more)

    return build


def job(w, name, **more):
    return w.job(name, w.want("any"), objective="throughput", workload="digits", **more)


def kinds(seen):
    return [start.allocation[0][0].partition("/")[2] for start in plan(seen).start]


def test_jobs_that_start_at_once_try_no_more_than_they_may_together(world):
    assert kinds(world(3, explore_device_s=2 * MIN_COUNTED_S)) == [TPU, TPU, "cpu"]
    assert kinds(world(2, explore_device_s=0.0)) == ["cpu", "cpu"]


def test_why_it_is_tried_is_told(world):
    [start] = plan(world()).start
    assert "unmeasured; tried, for a limited time, before kinds that were measured" in start.reason
    assert "tried" not in plan(world(explore_device_s=0.0)).start[0].reason


@pytest.mark.parametrize("source", ["ended", "waiting", "running"])
def test_what_jobs_of_the_workload_ran_there_counts(w, world, source):
    seen, spent_s = world(explore_device_s=3600.0), 3600.0
    if source == "ended":
        seen = replace(seen, history=History(all_runs={("digits", "train"): {TPU: spent_s}}))
    elif source == "waiting":
        seen = replace(seen, progress={"j0": Progress(ran_on={TPU: spent_s})})
    else:
        running = w.running("r", (f"gone/{TPU}", (0, 1)), spec=job(w, "r"))
        seen = replace(seen, running=(running,), since={"r": Since(0.0, seen.now_s - spent_s / 2)})
    assert kinds(seen) == ["cpu"]
    assert kinds(replace(seen, explore_device_s=3601.0 + spent_s)) == [TPU]


def test_other_workloads_and_tasks_are_tried_by_themselves(world):
    for name in (("gpt2", "train"), ("digits", "run")):
        assert kinds(world(history=History(all_runs={name: {TPU: 1e9}}))) == [TPU]


def test_where_nothing_else_is_known_or_free_it_is_used_all_the_same(w, world):
    spent = History(all_runs={("digits", "train"): {TPU: 1e9}})
    assert kinds(world(history=spent, explore_device_s=0.0)) == ["cpu"]
    assert kinds(replace(world(history=spent), throughput=Throughput())) == [TPU]
    assert kinds(replace(world(history=spent), devices=(w.v5e("t", 1), w.cpu("c", 1, free=())))) == [TPU]


def test_what_is_estimated_is_tried_no_longer_than_what_is_not(world):
    guess = {("digits", "train", TPU, "fp32"): Estimated(900, 700, 1000, "sample", 14)}
    seen = replace(world(), throughput=replace(ON_CPU, estimates=guess))
    assert kinds(seen) == [TPU]
    assert kinds(replace(seen, explore_device_s=0.0)) == ["cpu"]


def test_once_jobs_have_ended_there_the_kind_is_known_by_what_they_took(world):
    def after(on_tpu_s, on_cpu_s=100.0):
        took = History({("digits", "train"): {TPU: on_tpu_s, "cpu": on_cpu_s}})
        return world(history=took, explore_device_s=0.0)

    assert kinds(after(on_tpu_s=90.0)) == [TPU]
    assert kinds(after(on_tpu_s=110.0)) == ["cpu"]
    [start] = plan(after(on_tpu_s=90.0)).start
    assert "jobs of this workload took about 90 s on one device here" in start.reason
    assert kinds(replace(after(on_tpu_s=110.0), throughput=Throughput())) == ["cpu"]


def test_what_jobs_took_is_not_compared_with_rates_of_other_kinds(world):
    only_tpu = History({("digits", "train"): {TPU: 1e-9}})
    assert kinds(world(history=only_tpu, explore_device_s=0.0)) == ["cpu"]
