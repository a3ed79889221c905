"""Measured rates in decisions: the fastest, the cheapest, and what is said of a pair nobody measured."""

from dataclasses import replace

import pytest

from cluster.catalogue import lookup
from orchestrator.core.explanation.explain import explain
from orchestrator.core.jobs.remaining_time import Evidence, has_evidence
from orchestrator.core.model import Progress
from orchestrator.core.plan.plan import plan
from orchestrator.core.rate_source import WorkloadRate
from orchestrator.core.throughput import Estimated, Measured, Throughput

MEASURED = {"nvidia:A100-80GB": 1000, "nvidia:P100-16GB": 300, "tpu:v5e": 9000, "cpu": 1}


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
        return start.allocation[0][0].partition("/")[0], start.reason

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


def test_energy_goes_where_an_item_took_the_fewest_joules_and_unmeasured_kinds_come_last(w, placed):
    measured = table(cpu=100, h100=1000)
    joules = {"cpu": 0.5, "nvidia:H100-80GB": 0.2}
    known = Throughput({key: replace(row, joules_per_item=joules[key[2]]) for key, row in measured.rows.items()})
    where, why = placed([w.cpu(), w.devices("h100-0"), w.v5e()], known, "energy")
    assert where == "h100-0" and "0.2 J per item: measured 1,000 samples/s" in why
    assert placed([w.cpu(), w.v5e()], known, "energy")[0] == "cpu-0"
    where, why = placed([w.cpu(), w.v5e()], measured, "energy")
    assert where == "v5e-0" and "the energy of this job is unmeasured" in why


def test_a_deadline_asks_for_speed(w, placed):
    assert placed([w.cpu(), w.xla()], table(cpu=1000, xla=400), "deadline")[0] == "cpu-0"


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
    assert answer.speed == {
        "cpu-0/cpu": "measured 1,000 samples/s [980, 1,020] 60 s ago in bench-1",
        "ipex-0/cpu:ipex": "unmeasured",
    }


@pytest.mark.parametrize(("age_s", "words"), [(5, "5 s ago"), (600, "10 min ago"), (7300, "2 h ago"), (200_000, "2 d")])
def test_an_age_is_told_in_one_unit(age_s, words):
    assert words in WorkloadRate("benchmark", 1.0, "sample", low=1.0, high=1.0, run="b", at_s=0.0).sentence(age_s)


def test_what_is_estimated_decides_where_nobody_measured_and_is_told_as_an_estimate(w, placed):
    guess = {("digits", "train", "nvidia:H100-80GB", "fp32"): Estimated(9000, 7000, 12_000, "sample", 14)}
    devices = [w.v5e(), w.devices("h100-0")]
    assert placed(devices, table(v5e=5000))[0] == "v5e-0"
    where, why = placed(devices, replace(table(v5e=5000), estimates=guess))
    assert where == "h100-0"
    assert "estimated 9,000 samples/s [7,000, 12,000] from 14 other workloads; not measured here; tried, for a" in why
    assert placed(devices, replace(table(v5e=9500), estimates=guess))[0] == "v5e-0"


def test_of_kinds_of_one_vendor_published_figures_tell_the_faster_where_only_one_was_measured(w, placed):
    devices = w.devices("a100-0", kind="nvidia:A100-80GB", pool="a100"), w.devices("h100-0")
    a100 = Throughput({("digits", "train", "nvidia:A100-80GB", "fp32"): rate(1000)})
    where, why = placed(devices, a100)
    assert where == "h100-0"
    assert "from published figures beside nvidia:A100-80GB, where it was measured; not measured here; tried" in why
    assert placed(devices, table(h100=1000))[0] == "h100-0"


@pytest.mark.parametrize(
    ("kind", "other", "precision", "expected"),
    [
        ("nvidia:V100-16GB", "nvidia:P100-16GB", "fp32", (900 / 732.2 * 15.7 / 10.61) ** 0.5),
        ("nvidia:V100-16GB", "nvidia:P100-16GB", "fp64-by-another-name", 900 / 732.2),
        ("nvidia:V100-16GB", "nvidia:V100-16GB", "fp32", 1.0),
        ("tpu:v5e", "nvidia:H100-80GB", "bf16", None),
        ("nvidia:H100-80GB", "nvidia:of-no-catalogue", "bf16", None),
        ("cpu", "cpu", "fp32", None),
    ],
)
def test_the_ratio_of_published_figures(kind, other, precision, expected):
    found = lookup.speed_ratio(kind, other, precision)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_an_estimate_is_of_the_fastest_kind_that_was_measured_and_has_an_interval(w):
    job = w.job("j", w.want("any"), workload="digits")
    rows = {("digits", "train", kind, "fp32"): rate(value) for kind, value in MEASURED.items()}
    found = Throughput(rows).estimated(job, 0, "nvidia:V100-16GB")
    assert found.measured_kind == "nvidia:A100-80GB"
    assert found.items_per_s == 1000 * lookup.speed_ratio("nvidia:V100-16GB", "nvidia:A100-80GB", "fp32") < 1000
    assert found.low < found.items_per_s < found.high


def test_a_move_is_never_made_for_an_estimate(w):
    guess = {("digits", "train", "nvidia:H100-80GB", "fp32"): Estimated(9000, 7000, 12_000, "sample", 14)}
    job = w.job("j", w.want("any"), workload="digits")
    told = Evidence(replace(table(v5e=5000), estimates=guess), Progress(10, 100, rates={("tpu:v5e", 1): 1.0}))
    assert has_evidence(job, "tpu:v5e", told)
    assert not has_evidence(job, "nvidia:H100-80GB", told)


@pytest.mark.parametrize(
    ("rate", "told"),
    [
        (0.01234567, "0.01235"),
        (7.0, "7"),
        (123.456, "123.5"),
        (1234.4, "1,234"),
        (12_344, "12,340"),
        (1.23456e9, "1,235,000,000"),
    ],
)
def test_rates_are_told_with_four_digits_and_without_an_exponent(rate, told):
    known = WorkloadRate("benchmark", rate, "sample", low=rate, high=rate, run="bench-1", at_s=0.0)
    assert known.sentence(0.0) == f"measured {told} samples/s [{told}, {told}] 0 s ago in bench-1"
