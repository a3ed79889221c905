"""How long a job will take yet: which number counts, and what holds whatever the numbers are."""

from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.jobs.remaining_time import (
    MAX_REMAINING_S,
    MIN_REMAINING_S,
    Evidence,
    Remaining,
    attained,
    remaining,
)
from orchestrator.core.model import Candidate, DeclaredWork, Job, Progress, Running
from orchestrator.core.throughput import History, Measured, Throughput

H100, A100, CPU = "nvidia:H100-80GB", "nvidia:A100-80GB", "cpu"


def job(*, work=None, workload="gpt2", content_sha="", kinds=("any",), **more):
    return Job(
        "j",
        "j",
        "train",
        (Candidate(kinds),),
        workload=workload,
        content_sha=content_sha,
        work=work or DeclaredWork(),
        **more,
    )


def measured(**per_kind):
    """A Throughput: h100=100 says that a device of that kind does 100 items per second."""
    names = {"h100": H100, "a100": A100, "cpu": CPU}
    rows = {("gpt2", "train", names[n], "fp32"): Measured(r, r, r, "sample", "run", 0.0) for n, r in per_kind.items()}
    return Throughput(rows)


def left(known, kind=H100, devices=1, **of_job):
    told = remaining(job(**of_job), kind, devices, known)
    return round(told.seconds, 6), told.source


# -- steps


def test_steps_that_are_left_at_the_rate_that_was_reported_there():
    known = Evidence(progress=Progress(400, 1000, rates={(H100, 2): 3.0, (CPU, 1): 0.1}))
    assert left(known, H100, 2) == (200.0, "reported")


def test_a_rate_on_another_number_of_devices_is_scaled_linearly_from_the_nearest():
    known = Evidence(progress=Progress(0, 1200, rates={(H100, 1): 1.0, (H100, 4): 3.0}))
    assert left(known, H100, 8) == (200.0, "reported")


def test_a_rate_on_another_kind_is_scaled_by_what_was_measured_of_the_workload():
    known = Evidence(measured(h100=100, cpu=10), Progress(0, 600, rates={(CPU, 2): 0.6}))
    assert left(known, H100, 2) == (100.0, "reported")
    assert left(Evidence(Throughput(), known.progress), H100, 2) == (1000.0, "reported")  # nobody measured: as fast


def test_a_job_that_ran_on_both_kinds_has_measured_them_itself():
    known = Evidence(progress=Progress(rates={(H100, 1): 10.0, (CPU, 1): 1.0}), attained={CPU: 500.0})
    assert left(known, H100, 1, work=DeclaredWork(hours=1.0, on="nvidia:H100")) == (3550.0, "declared")


def test_declared_steps_count_where_no_total_is_reported():
    known = Evidence(progress=Progress(100, 0, rates={(H100, 1): 2.0}))
    assert left(known, work=DeclaredWork(steps=1000)) == (450.0, "declared")
    known = Evidence(progress=Progress(100, 200, rates={(H100, 1): 2.0}))
    assert left(known, work=DeclaredWork(steps=1000)) == (50.0, "reported")


def test_more_steps_than_were_declared_say_that_the_declaration_was_wrong():
    known = Evidence(progress=Progress(1001, 0, rates={(H100, 1): 2.0}), attained={H100: 900.0})
    assert left(known, work=DeclaredWork(steps=1000)) == (900.0, "attained")
    known = Evidence(progress=Progress(1000, 0, rates={(H100, 1): 2.0}))
    assert left(known, work=DeclaredWork(steps=1000)) == (MIN_REMAINING_S, "declared")


def test_without_a_rate_the_mean_over_all_that_has_run_counts_once_it_says_something():
    known = Evidence(progress=Progress(50, 100), attained={H100: 500.0})
    assert left(known, H100, 2) == (250.0, "reported")
    early = Evidence(progress=Progress(4, 100), attained={H100: 500.0})
    assert left(early) == (500.0, "attained")


# -- hours, history, and neither


def test_declared_hours_are_of_one_device_of_that_kind():
    known = Evidence(measured(h100=100, a100=50))
    work = DeclaredWork(hours=3.0, on="nvidia:H100")
    assert left(known, H100, 4, work=work) == (2700.0, "declared")
    assert left(known, A100, 4, work=work) == (5400.0, "declared")
    assert left(Evidence(), A100, 1, work=work) == (10800.0, "declared")


def test_what_has_run_is_taken_off_by_how_fast_each_kind_is():
    known = Evidence(measured(h100=100, a100=50), attained={A100: 7200.0, H100: 1800.0})
    assert left(known, H100, 1, work=DeclaredWork(hours=3.0, on="nvidia:H100")) == (5400.0, "declared")


def test_hours_that_are_used_up_say_nothing_more():
    known = Evidence(attained={H100: 4000.0}, history=History({("gpt2", "train"): {H100: 9000.0}}))
    assert left(known, work=DeclaredWork(hours=1.0, on="nvidia:H100")) == (5000.0, "history")


def test_earlier_jobs_of_the_workload_or_of_the_same_folder_tell_how_long_it_takes():
    history = History({("gpt2", "train"): {CPU: 8000.0, A100: 2000.0}, ("folder:" + "f" * 16, "train"): {H100: 60.0}})
    assert left(Evidence(measured(h100=100, a100=50), history=history), H100, 2) == (500.0, "history")
    assert left(Evidence(history=history), CPU, 1) == (8000.0, "history")
    assert left(Evidence(history=history), H100, 1, workload="new", content_sha="f" * 64) == (60.0, "history")
    assert left(Evidence(history=history), H100, 1, workload="new") == (300.0, "attained")


def test_a_job_of_which_nothing_is_known_is_taken_to_run_as_long_again():
    assert left(Evidence(), CPU, 1) == (300.0, "attained")
    assert left(Evidence(), CPU, 4) == (75.0, "attained")
    assert left(Evidence(attained={CPU: 4000.0}), CPU, 4) == (1000.0, "attained")
    assert left(Evidence(measured(h100=100, cpu=10), attained={CPU: 40000.0}), H100, 4) == (1000.0, "attained")


def test_the_rate_of_a_kind_is_that_at_the_precision_of_the_candidate_for_it():
    slow, fast = Measured(10, 10, 10, "sample", "r", 0.0), Measured(80, 80, 80, "sample", "r", 0.0)
    rows = {("gpt2", "train", CPU, "fp32"): slow, ("gpt2", "train", H100, "fp32"): slow,
            ("gpt2", "train", H100, "bf16"): fast}  # fmt: skip
    two = Job("j", "j", "train", (Candidate(("cpu",)), Candidate(("nvidia",), precision="bf16")), workload="gpt2")
    assert remaining(two, H100, 1, Evidence(Throughput(rows), attained={CPU: 8000.0})).seconds == 1000.0


# -- what a snapshot has, and what people read


def test_device_seconds_of_a_snapshot_are_those_of_ended_attempts_and_of_the_live_one():
    live = Running("j", 0, 0, ((f"a/{H100}", (0, 1)), (f"b/{H100}", (0,))))
    ended = Progress(ran_s=30.0, ran_on={H100: 10.0, CPU: 20.0})
    assert attained(ended, live, 100.0) == {H100: 310.0, CPU: 20.0}
    assert attained(ended, live, 0.0) == attained(ended, None, 100.0) == {H100: 10.0, CPU: 20.0}


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (Remaining(7800.0, "reported", 3.1), "about 2 h 10 min left at 3.1 steps/s (reported)"),
        (Remaining(59.6, "declared", 1234.5), "about 60 s left at 1.23e+03 steps/s (declared)"),
        (Remaining(7190.0, "declared"), "about 2 h 0 min left (declared)"),
        (Remaining(200_000.0, "history"), "about 2 days 7 h left (history)"),
        (Remaining(300.0, "attained"), "unknown; 5 min assumed (attained)"),
    ],
)
def test_how_long_is_left_is_a_sentence_with_where_the_number_comes_from(told, sentence):
    assert told.sentence == sentence


# -- whatever the numbers are

rates = st.floats(1e-300, 1e300)
kinds = st.sampled_from([H100, A100, CPU, "tpu:v5e"])
amounts = st.dictionaries(kinds, st.floats(0, 1e300), max_size=3)
jobs = st.builds(
    lambda work, content_sha: job(work=work, content_sha=content_sha),
    st.one_of(
        st.builds(DeclaredWork, steps=st.integers(0, 2**53)),
        st.builds(
            lambda hours, on: DeclaredWork(hours=hours, on=on),
            st.floats(1e-300, 1e6),
            st.sampled_from([H100, "nvidia:A100", CPU]),
        ),
    ),
    st.sampled_from(["", "f" * 64]),
)
progresses = st.builds(
    lambda step, of, rates: Progress(step, of and max(step, of), rates=rates),
    st.integers(0, 2**53),
    st.integers(0, 2**53),
    st.dictionaries(st.tuples(kinds, st.integers(1, 4096)), rates, max_size=3),
)
knowns = st.builds(
    Evidence,
    st.builds(lambda h, a, c: measured(h100=h, a100=a, cpu=c), rates, rates, rates) | st.just(Throughput()),
    progresses,
    amounts.map(lambda took: History({("gpt2", "train"): took})),
    amounts,
)


@given(jobs, kinds, st.integers(0, 4096), knowns)
def test_what_is_left_is_never_negative_nor_infinite_and_says_from_where(job, kind, devices, known):
    told = remaining(job, kind, devices, known)
    assert MIN_REMAINING_S <= told.seconds <= MAX_REMAINING_S
    assert told.source in ("declared", "reported", "history", "attained")
    assert isfinite(told.steps_per_s) and told.sentence
    assert told == remaining(job, kind, devices, known)


usual_rates = st.floats(1e-3, 1e3)


@given(
    st.integers(0, 10**6),
    st.integers(1, 10**6),
    usual_rates,
    usual_rates,
    st.integers(1, 64),
    st.sampled_from([H100, CPU]),
)
def test_more_devices_and_more_steps_done_never_leave_more(step, more, rate, measured_rate, devices, kind):
    throughput = measured(h100=measured_rate, cpu=1.0)

    def after(step, devices):
        progress = Progress(step, step_of, rates={(CPU, 1): rate})
        return remaining(job(), kind, devices, Evidence(throughput, progress)).seconds

    step_of = step + more
    assert after(step, devices) >= after(step, 2 * devices)
    assert after(step, devices) >= after(min(step + 1, step_of), devices)
