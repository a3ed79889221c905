"""Where a rate is from: a benchmark, reports, a declaration, ended jobs or an estimate, and how each is told."""

from dataclasses import replace

import pytest

from orchestrator.core.explanation.explain import explain
from orchestrator.core.explanation.offer import offers
from orchestrator.core.model import DeclaredWork
from orchestrator.core.plan.plan import plan
from orchestrator.core.rate_source import WorkloadRate
from orchestrator.core.step_rates import StepRate
from orchestrator.core.throughput import Estimated, History, Measured, Throughput

H100 = "nvidia:H100-80GB"
KEY = ("digits", "train", H100, "fp32")

BENCHMARK = Throughput({KEY: Measured(1234.0, 1200.0, 1260.0, "sample", "bench-1", 40.0)})
REPORTED = Throughput(
    step_rates={("digits", "train", "fp32", 0, False): {(H100, 2): StepRate(10.0, "first", 40.0, 12)}}
)
ESTIMATED = Throughput(estimates={KEY: Estimated(900.0, 700.0, 1200.0, "sample", 14)})
DECLARED = DeclaredWork(hours=3.0, on="nvidia:H100")
TOOK = History({("digits", "train"): {H100: 7200.0}})

SOURCES = {
    "benchmark": "measured 1,234 samples/s [1,200, 1,260] 60 s ago in bench-1",
    "reported": "10 steps/s on 2 devices, reported by job first (12 reports) 60 s ago; not benchmarked",
    "declared": "declared: the job takes 3 h on one device; not measured",
    "history": "jobs of this workload took about 2 h on one device here",
    "estimated": "estimated 900 samples/s [700, 1,200] from 14 other workloads; not measured here",
}


def seen(w, sources, workload="digits"):
    """Offer and explanation of a job on an H100, for which these sources of its rate exist."""
    rows = BENCHMARK.rows if "benchmark" in sources else {}
    steps = REPORTED.step_rates if "reported" in sources else {}
    estimates = ESTIMATED.estimates if "estimated" in sources else {}
    work = DECLARED if "declared" in sources else DeclaredWork()
    job = w.job("later", w.want("any"), objective="throughput", workload=workload, work=work)
    fleet = [w.devices("a", price_per_hour=3.6)]
    now = replace(w.snapshot(fleet, []), throughput=Throughput(rows, estimates, steps))
    now = replace(now, history=TOOK if "history" in sources else History())
    [offer] = offers(job, now).offers
    [candidate] = explain(job, now).candidates
    [start] = plan(replace(now, jobs=(job,))).start
    return offer, candidate, start


@pytest.mark.parametrize("source", SOURCES)
def test_an_offer_has_the_source_of_its_rate_and_explain_the_same_sentence(w, source):
    offer, candidate, _ = seen(w, {source})
    assert (offer.rate.source, offer.speed) == (source, SOURCES[source])
    assert candidate.speed == {f"a/{H100}": SOURCES[source]}


@pytest.mark.parametrize("source", [source for source in SOURCES if source != "benchmark"])
def test_only_a_benchmark_is_said_to_have_measured_and_gives_a_price_per_item(w, source):
    offer, _, _ = seen(w, {source})
    assert not offer.speed.startswith("measured")
    assert (offer.items_per_s, offer.price_per_million_items, offer.rate.run) == (None, None, "")
    measured, _, _ = seen(w, {"benchmark"})
    assert (measured.items_per_s, measured.price_per_million_items) == (1234.0, pytest.approx(1e6 / 1234 / 1000))


def test_a_benchmark_comes_before_reports_a_declaration_ended_jobs_and_an_estimate(w):
    left = list(SOURCES)
    while left:
        assert seen(w, set(left))[0].rate.source == left.pop(0)
    assert seen(w, set())[0].rate is None


def test_each_source_has_the_numbers_that_belong_to_it(w):
    known = {source: seen(w, {source})[0].rate for source in SOURCES}
    assert known == {
        "benchmark": WorkloadRate("benchmark", 1234.0, "sample", 1, 1200.0, 1260.0, run="bench-1", at_s=40.0),
        "reported": WorkloadRate("reported", 10.0, "step", 2, job="first", samples=12, at_s=40.0),
        "declared": WorkloadRate("declared", 1 / 10_800, "job"),
        "history": WorkloadRate("history", 1 / 7200, "job"),
        "estimated": WorkloadRate("estimated", 900.0, "sample", 1, 700.0, 1200.0, basis="14 other workloads"),
    }


def test_a_declaration_is_no_reason_to_choose_a_kind(w):
    assert "throughput of this job is unmeasured" in seen(w, {"declared"})[2].reason
    assert SOURCES["history"] in seen(w, {"history"})[2].reason


def test_hours_that_a_job_without_a_workload_declares_are_told_on_that_kind_alone(w):
    job = w.job("later", w.want("any"), work=DECLARED)
    fleet = [w.devices("a"), w.cpu()]
    speeds = {offer.pool: offer.speed for offer in offers(job, w.snapshot(fleet, [])).offers}
    assert speeds == {"h100": SOURCES["declared"], "cpu": "unmeasured"}
    assert explain(job, w.snapshot(fleet, [])).candidates[0].speed == {
        f"a/{H100}": SOURCES["declared"],
        "cpu-0/cpu": "unmeasured",
    }
    briefest = replace(job, work=DeclaredWork(hours=5e-324, on="nvidia"))
    assert offers(briefest, w.snapshot(fleet, [])).offers[0].rate.per_s == 1.0


def test_one_report_is_told_as_one():
    one = WorkloadRate("reported", 0.5, "step", job="first", samples=1, at_s=0.0)
    assert (
        one.sentence(600.0) == "0.5 steps/s on one device, reported by job first (1 report) 10 min ago; not benchmarked"
    )
