"""How far a job is, from what its rank 0 reports: step, steps per second, device-seconds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.controller.messages import ClusterJoined, DrainRequested, Now, StopAnswered
from orchestrator.core.jobs.expected_duration import restart_s
from orchestrator.core.jobs.fold import Attempt
from orchestrator.core.jobs.progress import Pace, device_seconds_by_kind
from orchestrator.core.model import Progress
from orchestrator.core.step.control import control_from_log
from orchestrator.core.step.placement import snapshot
from orchestrator.core.throughput import Throughput
from workers.protocol.messages import RankEvent

LEASES = (("a/cpu", (0, 1)), ("b/cpu", (0,)))


def paced(*told, now_s=0.0):
    """After reports of (step, rank's clock)."""
    (step, t), *others = told
    pace = Pace(step, t, t, now_s)
    for step, t in others:
        pace = pace.reported(step, t, now_s + t)
    return pace


def reports(t, *told, at=0, job="j", epoch=1, **more):
    """A node's answer with reports of (step, the rank's clock)."""
    events = [RankEvent("report", 0, clock, at + n, {"step": step, **more}) for n, (step, clock) in enumerate(told, 1)]
    return t.report(job, epoch, 0, "running", *events, cursor=at + len(told))


# -- the rate


def test_the_first_interval_of_an_attempt_is_left_out_since_it_holds_compilation():
    assert paced((1, 0.0), (2, 60.0)).rate is None
    assert paced((1, 0.0), (2, 60.0), (12, 61.0)).rate == 10.0


def test_newer_intervals_weigh_more_and_by_how_long_they_were():
    steady = [(1, 0.0), *((n, float(n)) for n in range(2, 400))]
    assert paced(*steady).rate == pytest.approx(1.0)
    # after one half-life at three steps per second, the old rate counts for a half
    faster = [*steady, *((399 + 3 * n, 399.0 + n) for n in range(1, 61))]
    assert paced(*faster).rate == pytest.approx(2.0, abs=0.02)


def test_steps_that_go_back_begin_the_measurement_anew():
    pace = paced((1, 0.0), (2, 1.0), (12, 2.0), (3, 3.0))
    assert pace.rate is None and not pace.warm
    assert paced((1, 0.0), (2, 1.0), (12, 2.0), (3, 3.0), (4, 4.0), (9, 5.0)).rate == 5.0


def test_samples_of_the_rate_are_counted_without_those_of_the_first_interval():
    assert paced((1, 0.0), (2, 60.0)).samples == 0
    assert paced((1, 0.0), (2, 60.0), (12, 61.0), (12, 61.5), (22, 62.0)).samples == 2
    assert paced((1, 0.0), (2, 1.0), (12, 2.0), (3, 3.0), (4, 4.0), (9, 5.0)).samples == 1, "since it began anew"


def test_two_reports_of_one_step_or_of_one_moment_are_one():
    assert paced((1, 0.0), (2, 1.0), (2, 1.5), (4, 2.0)).rate == 2.0
    assert paced((1, 0.0), (2, 1.0), (3, 1.0), (4, 2.0)).rate == 2.0


def test_a_clock_that_is_set_says_nothing_of_the_rate():
    before = paced((1, 0.0), (2, 1.0), (12, 2.0))
    assert before.reported(22, 1.5, 3.0).rate is None  # back
    assert before.reported(22, 3600.0, 3.0).rate is None  # an hour ahead, within a second of ours
    assert before.reported(22, 3.0, 3600.0).rate == pytest.approx(10.0)  # heard late: its own clock counts


@given(st.lists(st.tuples(st.integers(0, 2**53), st.floats(0, 2e11), st.floats(0, 1e9)), min_size=1))
def test_whatever_is_reported_the_rate_is_a_positive_number_or_unknown(told):
    (step, t, now_s), *others = told
    pace = Pace(step, t, t, now_s)
    for step, t, now_s in others:
        pace = pace.reported(step, t, now_s)
        assert pace.rate is None or 0 < pace.rate < float("inf")


# -- in the controller


@pytest.fixture
def running(c, w):
    """Job j runs on both CPUs of node a, placed at the wall clock 5e8."""
    c.node("a", 2)
    c.run(w.job("j", w.want("cpu", count=2)))
    return c


def test_reports_that_come_in_one_answer_are_told_apart_by_the_clock_of_their_rank(running, t):
    c = running
    c.hear("a", reports(t, (1, 5e8), (2, 5e8 + 9), (12, 5e8 + 10), (22, 5e8 + 11), of=100), after_s=20.0)
    told = c.control.progress["j"]
    assert (told.step, told.of, told.at_s, dict(told.rates)) == (22, 100, c.s, {("cpu", 2): pytest.approx(10.0)})
    assert snapshot(c.control, Now(c.s), Throughput()).progress == c.control.progress


def test_a_report_that_was_taken_before_changes_nothing(running, t):
    c = running
    c.hear("a", reports(t, (1, 5e8), (2, 5e8 + 1), (3, 5e8 + 2)))
    before = c.control.progress["j"]
    c.hear("a", reports(t, (1, 5e8), (2, 5e8 + 1), (3, 5e8 + 2)))
    assert c.control.progress["j"] == before


@pytest.mark.parametrize("of", [None, "many", 2.5, True, -1, 0, 4, float("inf")])
def test_a_metric_called_of_from_code_that_means_something_else_is_no_total(running, t, of):
    running.hear("a", reports(t, (5, 5e8), of=of))
    assert (running.control.progress["j"].step, running.control.progress["j"].of) == (5, 0)


def test_a_total_told_once_stays_until_it_is_passed(running, t):
    running.hear("a", reports(t, (5, 5e8), of=10))
    running.hear("a", reports(t, (6, 5e8 + 1), at=1))
    assert running.control.progress["j"].of == 10
    running.hear("a", reports(t, (11, 5e8 + 1), at=2))
    assert running.control.progress["j"].of == 0


def test_how_long_an_attempt_takes_to_start_is_known_from_its_first_report(running, t):
    c = running
    c.wall_s = 5e8 + 30
    c.hear("a", reports(t, (1, 5e8 + 25)))
    assert c.control.progress["j"].starts_s == 25.0
    c.hear("a", reports(t, (2, 5e8 + 30), at=1))
    assert c.control.progress["j"].starts_s == 25.0


def test_after_an_attempt_its_device_seconds_count_and_the_next_goes_on_from_the_checkpoint(running, t):
    c = running
    saved = RankEvent("checkpoint", 0, 5e8, 50, {"path": "/store/j/step-7", "step": 7})
    c.hear("a", reports(t, (1, 5e8), (2, 5e8 + 1), (9, 5e8 + 2)))
    c.hear("a", t.report("j", 1, 0, "running", saved, cursor=50))
    c.wall_s = 5e8 + 40
    c.hear("a", t.ended("j", 1, state="lost", kind="lost"))
    told = c.control.progress["j"]
    assert c.state("j") == "RECOVERING"
    assert (told.step, told.ran_s, dict(told.ran_on), dict(told.rates)) == (7, 80.0, {"cpu": 80.0}, {("cpu", 2): 7.0})


def test_what_a_stop_costs_is_the_time_to_save_and_the_progress_since_the_checkpoint(running, t):
    """Steps 8 and 9 are lost, at seven steps per second; saving takes four seconds, the start took 25."""
    c = running
    c.wall_s = 5e8 + 25
    c.hear("a", reports(t, (1, 5e8 + 25), (2, 5e8 + 26), (9, 5e8 + 27)))
    saved = RankEvent("checkpoint", 0, 5e8, 50, {"path": "/store/j/step-7", "step": 7})
    c.hear("a", t.report("j", 1, 0, "running", saved, cursor=50))
    c.tell(DrainRequested("a", now=True))
    assert c.state("j") == "SAVING"
    c.tell(StopAnswered("a", "j", 1, "preempt"))
    c.hear("a", t.ended("j", 1, state="preempted"), after_s=4.0)
    told = c.control.progress["j"]
    assert (told.starts_s, told.stops_s) == (25.0, pytest.approx(4.0 + 2 / 7))
    assert restart_s("j", snapshot(c.control, Now(c.s), Throughput())) == pytest.approx(29.0 + 2 / 7)


def test_an_attempt_that_was_lost_says_nothing_of_what_a_stop_costs(running, t):
    c = running
    c.hear("a", reports(t, (1, 5e8), (2, 5e8 + 1), (9, 5e8 + 2)))
    c.tell(DrainRequested("a", now=True))
    c.tell(StopAnswered("a", "j", 1, "preempt"))
    c.hear("a", t.ended("j", 1, state="lost", kind="lost"), after_s=4.0)
    assert c.control.progress["j"].stops_s == 0.0


def test_a_job_that_ended_has_no_progress(running, t):
    c = running
    c.hear("a", reports(t, (1, 5e8)))
    c.hear("a", t.ended("j", 1, codes={0: 0, 1: 0}))
    assert (c.state("j"), dict(c.control.progress)) == ("", {})


def test_a_server_that_starts_knows_how_far_jobs_were_from_their_newest_report(running, t):
    c = running
    saved = RankEvent("checkpoint", 0, 5e8, 50, {"path": "/store/j/step-7", "step": 7})
    c.hear("a", t.report("j", 1, 0, "running", saved, cursor=50))
    for newest, step, of in (({"step": 9, "of": 20, "loss": 1.0}, 9, 20), ({"step": "x"}, 7, 0), ({}, 7, 0)):
        again = control_from_log(c.control.records.values(), {}, lambda job, epoch: 50, Now(5.0), {"j": newest})
        assert again.progress == {"j": Progress(step, of, 5.0)}
    c.control = again
    c.tell(ClusterJoined())
    c.node("a", 2)
    c.hear("a", reports(t, (10, 5e8 + 3), (11, 5e8 + 4), (13, 5e8 + 5), at=60))
    told = c.control.progress["j"]
    assert (told.step, dict(told.rates), told.starts_s) == (13, {("cpu", 2): 2.0}, 0.0)


def test_device_seconds_are_of_every_device_by_kind_and_never_negative():
    first = Attempt(1, 0, "cpu", "cpu", LEASES, 10.0, 20.0, 30.0)
    unstarted, set_back = replace(first, started_s=None), replace(first, ended_s=5.0)
    live = replace(first, kind="tpu:v5e", started_s=40.0, ended_s=None)
    assert device_seconds_by_kind((first, first, unstarted, set_back, live)) == {"cpu": 60.0}
    assert device_seconds_by_kind((first, live), 50.0) == {"cpu": 30.0, "tpu:v5e": 30.0}
