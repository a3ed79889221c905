"""Measured rates in decisions: the fastest, the cheapest, and what is said of a pair nobody measured."""

from dataclasses import replace

import pytest

from orchestrator.core.explain import explain
from orchestrator.core.plan import plan
from orchestrator.core.throughput import Measured, Throughput, sentence


def rate(items_per_s, at_s=40.0):
    return Measured(items_per_s, items_per_s * 0.98, items_per_s * 1.02, "sample", "bench-1", at_s)


def table(**rates):
    names = {"cpu": "cpu", "ipex": "cpu:ipex", "xla": "tpu:emulated", "h100": "nvidia:H100-80GB", "v5e": "tpu:v5e"}
    return Throughput({("digits", "train", names[kind], "fp32"): rate(value) for kind, value in rates.items()})


@pytest.fixture
def placed(w):
    """Where a job that takes anything of these goes, and why."""

    def place(devices, measured, objective="throughput", **more):
        wants = tuple(w.want(d.kind, pool=d.pool) for d in devices)
        job = w.job("j", *wants, objective=objective, workload="digits", **more)
        snapshot = replace(w.snapshot(devices, [job]), throughput=measured)
        [start] = plan(snapshot).start
        return start.leases[0][0].partition("/")[0], start.reason

    return place


def test_without_measurements_an_accelerator_goes_before_a_cpu_and_that_is_said(w, placed):
    where, why = placed([w.cpu(), w.xla()], Throughput())
    assert where == "xla-0" and "throughput of this job is unmeasured" in why


def test_what_was_measured_fastest_wins_with_its_numbers(w, placed):
    where, why = placed([w.cpu(), w.xla()], table(cpu=1000, xla=400))
    assert where == "cpu-0"
    assert "measured 1,000 samples/s [980, 1,020] 60 s ago in bench-1" in why
    assert placed([w.cpu(), w.xla()], table(cpu=400, xla=1000))[0] == "xla-0"


def test_an_accelerator_nobody_measured_goes_before_a_cpu_but_not_before_a_measured_accelerator(w, placed):
    assert placed([w.cpu(), w.v5e()], table(cpu=1000))[0] == "v5e-0"
    assert placed([w.v5e(), w.devices("h100-0")], table(h100=5000))[0] == "h100-0"
    assert placed([w.cpu(), w.v5e(), w.devices("h100-0")], table(h100=500, cpu=1000))[0] == "cpu-0"


def test_a_cpu_nobody_measured_comes_last(w, placed):
    assert placed([w.ipex(), w.cpu()], table(cpu=10))[0] == "cpu-0"


def test_cost_is_per_item_where_both_are_known(w, placed):
    cheap_but_slow, dear_but_fast = w.cpu(price_per_hour=1.0), w.devices("h100-0", price_per_hour=4.0)
    assert placed([cheap_but_slow, dear_but_fast], Throughput(), "cost")[0] == "cpu-0"
    where, why = placed([cheap_but_slow, dear_but_fast], table(cpu=100, h100=1000), "cost")
    assert where == "h100-0" and "4.00 per hour, 1.11 per million items" in why


def test_another_precision_mode_or_workload_is_not_taken_for_it(w, placed):
    told = table(cpu=1000, xla=400)
    job = w.job("j", w.want("cpu", precision="bf16"), objective="throughput", workload="digits")
    assert told.of(job, 0, "cpu") is None
    assert told.of(replace(job, task="benchmark", candidates=(w.want("cpu"),)), 0, "cpu") is None
    assert told.of(replace(job, workload="", candidates=(w.want("cpu"),)), 0, "cpu") is None
    assert told.of(replace(job, candidates=(w.want("cpu", precision="float32"),)), 0, "cpu") == rate(1000)


def test_order_given_by_the_user_outweighs_what_was_measured(w, placed):
    assert placed([w.xla(), w.cpu()], table(cpu=1000, xla=400), ordered=True)[0] == "xla-0"


def test_explain_says_of_every_place_what_was_measured(w):
    job = w.job("j", w.want("any"), objective="throughput", workload="digits")
    snapshot = replace(w.snapshot([w.cpu(), w.ipex()], [job]), throughput=table(cpu=1000))
    [answer] = explain(job, snapshot).candidates
    assert answer.measured == {
        "cpu-0/cpu": "measured 1,000 samples/s [980, 1,020] 60 s ago in bench-1",
        "ipex-0/cpu:ipex": "unmeasured",
    }


@pytest.mark.parametrize(("age_s", "words"), [(5, "5 s ago"), (600, "10 min ago"), (7300, "2 h ago"), (200_000, "2 d")])
def test_an_age_is_told_in_one_unit(age_s, words):
    assert words in sentence(rate(1.0, at_s=0.0), age_s)
