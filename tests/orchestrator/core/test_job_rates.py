"""Rates that running jobs report are used by other jobs of their workload, with the name of the job that reported."""

from dataclasses import replace

import pytest

from orchestrator.core.controller import messages as m
from orchestrator.core.controller.messages import Now
from orchestrator.core.explanation.explain import explain
from orchestrator.core.explanation.offer import offers
from orchestrator.core.jobs import job_rates
from orchestrator.core.jobs.remaining_time import Evidence, Remaining, has_evidence, remaining
from orchestrator.core.model import DeclaredWork, Progress
from orchestrator.core.plan.plan import plan
from orchestrator.core.rate_source import WorkloadRate
from orchestrator.core.step.control import control_from_log
from orchestrator.core.step.placement import snapshot
from orchestrator.core.step_rates import StepRate
from orchestrator.core.throughput import History, Measured, Throughput
from workers.protocol.messages import RankEvent

CPU, TPU, H100, A100 = "cpu", "tpu:v5e", "nvidia:H100-80GB", "nvidia:A100-80GB"
DIGITS = ("digits", "train", "fp32", 0, False)


def reported(key=DIGITS, **rates):
    """By kind, the steps per second of one device."""
    kinds = {"cpu": CPU, "tpu": TPU, "h100": H100, "a100": A100}
    places = {(kinds[name], 1): StepRate(rate, "first", 40.0, 5) for name, rate in rates.items()}
    return Throughput(step_rates={key: places})


def at_rate(t, rate, epoch=1, job="first", at=0, clock=5e8):
    """What node a answers while the job makes so many steps per second: three reports in two seconds."""
    told = [(0, clock), (1, clock + 1), (1 + rate, clock + 2)]
    events = [RankEvent("report", 0, when, at + n, {"step": step}) for n, (step, when) in enumerate(told, 1)]
    return t.report(job, epoch, 0, "running", *events, cursor=at + len(told))


@pytest.fixture
def first(c, w, t):
    """Job `first` of workload digits runs on both CPUs of node a, and has reported ten steps per second."""
    c.node("a", 2)
    c.run(w.job("first", w.want("cpu", count=2), workload="digits"))
    c.hear("a", at_rate(t, 10))
    return c


def seen(c):
    return snapshot(c.control, Now(c.s, c.wall_s), Throughput())


# -- what is kept


def test_a_report_of_a_running_job_is_kept_for_its_workload_with_the_name_of_the_job(first):
    assert first.control.step_rates == {DIGITS: {("cpu", 2): StepRate(10.0, "first", 5e8)}}
    assert seen(first).throughput.step_rates is first.control.step_rates


def test_it_stays_when_the_job_has_ended(first, t):
    first.hear("a", t.ended("first", 1))
    assert "first" not in first.control.progress
    assert first.control.step_rates[DIGITS]["cpu", 2].job == "first"


def test_a_job_without_a_workload_is_kept_for_nobody(c, w, t):
    c.node("a", 2)
    c.run(w.job("first", w.want("cpu", count=2)))
    c.hear("a", at_rate(t, 10))
    assert c.control.progress["first"].rates == {("cpu", 2): 10.0}
    assert c.control.step_rates == {}


def test_another_job_replaces_a_rate_once_a_minute_and_its_own_job_when_it_has_changed(first):
    record = first.control.records["first"]
    other = replace(record, job=replace(record.job, id="other"))

    def after(who, rate, after_s):
        with_rates = _Draft(first.control.step_rates)
        job_rates.put_rate(with_rates, who, record.live_attempt, StepRate(rate, who.job.id, 5e8 + after_s))
        return with_rates.step_rates[DIGITS]["cpu", 2]

    assert after(other, 30.0, 59.0) == StepRate(10.0, "first", 5e8)
    assert after(other, 30.0, 60.0) == StepRate(30.0, "other", 5e8 + 60)
    assert after(record, 10.4, 59.0) == StepRate(10.0, "first", 5e8)
    assert after(record, 10.6, 59.0) == StepRate(10.6, "first", 5e8 + 59)
    assert after(other, 30.0, -1.0) == StepRate(30.0, "other", 5e8 - 1)  # the clock was set back


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_what_is_not_a_rate_is_not_kept(first, rate):
    record, empty = first.control.records["first"], _Draft({})
    job_rates.put_rate(empty, record, record.live_attempt, StepRate(rate, "first", 5e8))
    assert empty.step_rates == {}


def test_the_tables_are_bounded_and_the_newest_stay(first, monkeypatch):
    monkeypatch.setattr(job_rates, "MAX_WORKLOADS", 2)
    monkeypatch.setattr(job_rates, "MAX_RATES", 2)
    record, draft = first.control.records["first"], _Draft({})
    for name in ("one", "two", "one", "three"):
        of = replace(record, job=replace(record.job, workload=name))
        job_rates.put_rate(
            draft, of, record.live_attempt, StepRate(1.0 if name not in _names(draft) else 2.0, "first", 5e8)
        )
    assert _names(draft) == ["one", "three"]
    for kind in ("k1", "k2", "k1", "k3"):
        job_rates.put_rate(
            draft, of, replace(record.live_attempt, kind=kind), StepRate(1.0, "first", 5e8 + 100 * len(kind))
        )
    assert [kind for kind, _ in draft.step_rates["three", "train", "fp32", 0, False]] == ["k2", "k3"]


def _names(draft):
    return [key[0] for key in draft.step_rates]


class _Draft:
    """The one table of a draft that put_rate changes."""

    def __init__(self, table):
        self.step_rates = _Table(table)


class _Table(dict):
    @property
    def current(self):
        return self

    def pop(self, key):
        super().pop(key, None)


# -- after a start of the server


def stored(*told, epoch=1):
    """Rows of the store: reports of (step, the rank's clock)."""
    return [{"attempt": epoch, "step": step, "time": t, "metrics": {"step": step}} for step, t in told]


def test_a_server_that_starts_knows_the_rates_from_the_stored_reports(first):
    records = list(first.control.records.values())
    rows = stored((0, 4e8), (1, 4e8 + 1), (11, 4e8 + 2))
    again = control_from_log(records, {}, lambda job, epoch: 0, Now(5.0, 5e8), {}, [(records[0], rows)])
    assert again.step_rates == {DIGITS: {("cpu", 2): StepRate(10.0, "first", 4e8 + 2)}}


def test_stored_reports_without_a_rate_or_of_an_unknown_attempt_are_left_out(first):
    records = list(first.control.records.values())
    for rows in (stored((3, 4e8)), stored((0, 1.0), (1, 2.0), (9, 3.0), epoch=7), []):
        again = control_from_log(records, {}, lambda job, epoch: 0, Now(5.0, 5e8), {}, [(records[0], rows)])
        assert again.step_rates == {}


def test_a_job_that_moves_reports_for_the_candidate_it_still_runs_as(c, w, t):
    """A migration leaves one candidate, so the position of the running one may not exist any more."""
    c.node("a")
    c.node("v", kind="tpu:v5e")
    wants = w.want("tpu:v5p"), w.want("cpu", batch_size=4)
    c.run(w.job("first", *wants, ordered=True, workload="digits"))
    c.tell(m.MigrateRequested("first", ("tpu:v5e",)))
    c.hear("a", at_rate(t, 10))
    expected = {("digits", "train", "fp32", 4, False): {("cpu", 1): StepRate(10.0, "first", 5e8)}}
    assert c.control.step_rates == expected
    record = c.control.records["first"]
    rows = stored((0, 5e8 - 2), (1, 5e8 - 1), (11, 5e8))
    again = control_from_log([record], {}, lambda job, epoch: 0, Now(5.0, 5e8), {}, [(record, rows)])
    assert again.step_rates == expected
    assert explain(record.job, seen(c)).runs.candidate == 1


# -- how long a later job takes


def test_a_later_job_of_the_workload_takes_as_long_as_the_rate_says(w):
    job = w.job("later", w.want("cpu"), workload="digits", work=DeclaredWork(steps=1000))
    found = remaining(job, CPU, 1, Evidence(reported(cpu=10.0)))
    assert found == Remaining(100.0, "declared", 10.0, "first")
    assert found.sentence == "about 100 s left at 10 steps/s (declared; speed reported by job first)"
    assert remaining(job, CPU, 2, Evidence(reported(cpu=10.0))).seconds == 50.0
    assert has_evidence(job, CPU, Evidence(reported(cpu=10.0)))
    assert not has_evidence(job, TPU, Evidence(reported(cpu=10.0)))


def test_its_own_rate_on_a_kind_comes_before_that_of_another_job(w):
    job = w.job("later", w.want("any"), workload="digits")
    own = Progress(step=0, of=1000, rates={(CPU, 1): 5.0})
    known = Evidence(reported(cpu=10.0, tpu=50.0), own)
    assert remaining(job, CPU, 1, known) == Remaining(200.0, "reported", 5.0)


@pytest.mark.parametrize("unit", [1.0, 1000.0])
def test_other_jobs_that_count_other_steps_say_only_how_much_faster_a_kind_is(w, unit):
    """A job of twice the length may call a hundredth of its work a step, as this one does."""
    job = w.job("later", w.want("any"), workload="digits")
    own = Progress(step=0, of=1000, rates={(CPU, 1): 5.0})
    known = Evidence(reported(cpu=10.0 * unit, tpu=50.0 * unit), own)
    assert remaining(job, TPU, 1, known) == Remaining(40.0, "reported", 25.0)
    row = Measured(1000.0, 990.0, 1010.0, "sample", "bench-1", 40.0)
    rows = {("digits", "train", CPU, "fp32"): row, ("digits", "train", TPU, "fp32"): replace(row, items_per_s=2000.0)}
    benchmarked = Evidence(replace(reported(tpu=50.0 * unit), rows=rows), own)
    assert remaining(job, TPU, 1, benchmarked) == Remaining(100.0, "reported", 10.0)
    assert has_evidence(job, TPU, known) and has_evidence(job, TPU, benchmarked)


def test_another_job_is_believed_on_a_kind_that_nothing_compares_with_its_own(w):
    job = w.job("later", w.want("any"), workload="digits")
    known = Evidence(reported(tpu=50.0), Progress(step=0, of=1000, rates={(CPU, 1): 5.0}))
    assert remaining(job, TPU, 1, known) == Remaining(20.0, "reported", 50.0, "first")


def test_declared_hours_are_converted_between_kinds_on_which_other_jobs_reported(w):
    job = w.job("later", w.want("nvidia"), workload="digits", work=DeclaredWork(hours=1.0, on=A100))
    assert remaining(job, H100, 1, Evidence(reported(h100=30.0, a100=10.0))).seconds == 1200.0


def test_a_step_of_another_batch_size_precision_task_or_workload_is_other_work(w):
    throughput = reported(cpu=10.0)
    job = w.job("later", w.want("cpu"), workload="digits")
    assert throughput.reported(job, 0)
    for other in (
        replace(job, workload="other"),
        replace(job, workload=""),
        replace(job, task="benchmark"),
        replace(job, candidates=(w.want("cpu", batch_size=8),)),
        replace(job, candidates=(w.want("cpu", precision="bf16"),)),
        replace(job, candidates=(w.want("cpu", whole_batch=True),)),
    ):
        assert throughput.reported(other, 0) == {}


# -- where it goes, and what is said of it


def placed(w, devices, throughput, *wants, history=None):
    job = w.job("later", *(wants or [w.want("any")]), objective="throughput", workload="digits")
    now = replace(w.snapshot(devices, [job]), throughput=throughput, history=history or History())
    [start] = plan(now).start
    return start.allocation[0][0].partition("/")[2], start.reason


def test_throughput_takes_the_kind_where_another_job_was_fastest(w):
    devices = [w.devices("h"), w.devices("a", kind=A100, pool="a100")]
    where, why = placed(w, devices, reported(h100=10.0, a100=30.0))
    assert where == A100
    assert "30 steps/s on one device, reported by job first (5 reports) 60 s ago; not benchmarked" in why
    assert placed(w, devices, reported(h100=30.0, a100=10.0))[0] == H100


def test_a_benchmark_and_a_report_are_compared_only_through_a_kind_with_both(w):
    h100, a100 = w.devices("h"), w.devices("a", kind=A100, pool="a100")
    row = Measured(1000.0, 990.0, 1010.0, "sample", "bench-1", 40.0)
    both = replace(reported(h100=10.0, a100=30.0), rows={("digits", "train", H100, "fp32"): row})
    assert placed(w, [h100, a100], both)[0] == A100  # a step has 100 samples
    only_one = replace(reported(a100=1e9), rows={("digits", "train", H100, "fp32"): row})
    assert placed(w, [h100, a100], only_one)[0] == H100


def test_steps_of_candidates_with_different_batches_are_not_compared(w):
    devices = [w.devices("h"), w.devices("a", kind=A100, pool="a100")]
    wants = w.want(H100, batch_size=8), w.want(A100)
    assert placed(w, devices, reported(a100=30.0), *wants)[0] == H100
    assert placed(w, devices, reported(a100=30.0), w.want(H100), w.want(A100))[0] == A100


def test_ranks_with_a_batch_each_do_more_work_in_a_step_of_more_devices(w):
    devices = [w.devices("h", 4), w.devices("a", 4, kind=A100, pool="a100")]
    rates = {(H100, 4): StepRate(10.0, "first", 40.0), (A100, 1): StepRate(11.0, "first", 40.0)}
    per_rank = Throughput(step_rates={DIGITS: rates})
    assert placed(w, devices, per_rank, w.want("any", count=4))[0] == A100
    whole = Throughput(step_rates={(*DIGITS[:3], 8, True): rates})
    assert placed(w, devices, whole, w.want("any", count=4, batch_size=8, whole_batch=True))[0] == A100
    slower = {**rates, (A100, 1): StepRate(2.0, "first", 40.0)}
    whole = Throughput(step_rates={(*DIGITS[:3], 8, True): slower})
    assert placed(w, devices, whole, w.want("any", count=4, batch_size=8, whole_batch=True))[0] == H100


def test_times_of_ended_jobs_are_compared_through_a_kind_with_a_reported_rate(w):
    devices = [w.devices("h"), w.devices("a", kind=A100, pool="a100"), w.v5e()]
    took = History({("digits", "train"): {H100: 100.0, TPU: 300.0}})
    # a job is 1,000 steps, so a v5e made 3.3 of them per second
    assert placed(w, [devices[1], devices[2]], reported(h100=10.0, a100=3.0), history=took)[0] == TPU
    assert placed(w, [devices[1], devices[2]], reported(h100=10.0, a100=4.0), history=took)[0] == A100


def test_explain_and_offer_say_which_job_reported_and_never_call_it_a_benchmark(w):
    job = w.job("later", w.want("any"), objective="throughput", workload="digits")
    now = replace(w.snapshot([w.cpu(), w.ipex()], []), throughput=reported(cpu=10.0))
    said = "10 steps/s on one device, reported by job first (5 reports) 60 s ago; not benchmarked"
    [answer] = explain(job, now).candidates
    assert answer.speed == {"cpu-0/cpu": said, "ipex-0/cpu:ipex": "unmeasured"}
    by_pool = {offer.pool: offer for offer in offers(job, now).offers}
    assert (by_pool["cpu"].speed, by_pool["cpu"].items_per_s) == (said, None)
    assert by_pool["cpu"].rate == WorkloadRate("reported", 10.0, "step", job="first", samples=5, at_s=40.0)
    assert (by_pool["ipex"].speed, by_pool["ipex"].rate) == ("unmeasured", None)


def test_a_job_that_runs_tells_the_next_one_of_its_workload(first, w):
    """From the report of one job to the sentence about another, through the controller."""
    first.node("b", 2)
    later = w.job("later", w.want("cpu", count=2), objective="throughput", workload="digits")
    first.submit(later)
    first.tick()
    [placed] = [event for event in first.events if event.event == "placed"]
    assert "10 steps/s on 2 devices, reported by job first (1 report) 0 s ago; not benchmarked" in placed.data["reason"]
