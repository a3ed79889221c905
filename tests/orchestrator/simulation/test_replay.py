"""Traces replayed on fleets: small ones worked out by hand, and what must hold of any."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import UserError
from orchestrator.core.plan.policies.priced_policies import POLICIES
from orchestrator.simulation.charts import pictures
from orchestrator.simulation.fleets import Fleet, read_fleet
from orchestrator.simulation.outcome import finish_time_ratios, outcome
from orchestrator.simulation.replay import replay
from orchestrator.simulation.traces import Trace, read_throughputs, read_trace

GAVEL = Path(__file__).parents[4] / "shared" / "data" / "gavel"
RATES = (0.0, 0.5, 1.0, 3.0)


def trace_of(*jobs, kinds=1):
    """From (arrival_s, gang, steps, rate on each kind)."""
    arrival_s, gang, steps, *rate = zip(*jobs, strict=True)
    assert len(rate) == kinds
    numbers = np.arange(len(jobs))
    return Trace("made.csv", numbers, *(np.array(c) for c in (arrival_s, gang)), np.array(steps), np.array(rate))


def ends(trace, fleet, policy="fifo", **options):
    return replay(trace, read_fleet(fleet), policy, **options).end_s.tolist()


def test_the_second_of_two_jobs_waits_for_the_one_device():
    trace = trace_of((0.0, 1, 100.0, 1.0), (10.0, 1, 50.0, 2.0))
    assert ends(trace, "a=1") == [100.0, 125.0]
    found = outcome(trace, read_fleet("a=1"), "fifo", replay(trace, read_fleet("a=1"), "fifo"))
    assert (found["mean_jct_h"], found["makespan_h"]) == pytest.approx((107.5 / 3600, 125 / 3600), rel=1e-5)
    assert (found["isolated_mean_h"], found["restarts"]) == (pytest.approx(62.5 / 3600, rel=1e-5), 1.0)
    assert (found["utilisation"], found["jobs"], found["policy"]) == (1.0, 2, "fifo")


def test_a_short_job_goes_first_where_the_policy_stops_the_long_one_for_it():
    trace = trace_of((0.0, 1, 100_000.0, 1.0), (10.0, 1, 50.0, 1.0))
    assert ends(trace, "a=1", "finish_time") == [100_050.0, 60.0]


def test_a_start_and_a_resume_each_cost_the_pause():
    trace = trace_of((0.0, 1, 100_000.0, 1.0), (1000.0, 1, 500.0, 1.0))
    replayed = replay(trace, read_fleet("a=1"), "finish_time", restart_s=60.0)
    assert replayed.end_s.tolist() == [100_000.0 + 60 + 560 + 60, 1560.0]
    assert replayed.stays.start_s.tolist() == [0.0, 1000.0, 1560.0]
    assert replayed.stays.job.tolist() == [0, 1, 0]


def test_a_job_stopped_within_its_pause_has_made_no_progress():
    trace = trace_of((0.0, 1, 100_000.0, 1.0), (10.0, 1, 50.0, 1.0))
    assert ends(trace, "a=1", "finish_time", restart_s=60.0) == [100_000.0 + 10 + 110 + 60, 120.0]


def test_a_gang_starts_when_all_its_devices_are_free():
    trace = trace_of((0.0, 1, 100.0, 1.0), (1.0, 2, 10.0, 1.0), (2.0, 1, 10.0, 1.0))
    assert ends(trace, "a=2") == [100.0, 110.0, 120.0]


def test_a_gang_runs_on_one_kind_and_only_where_it_has_a_rate():
    trace = trace_of((0.0, 2, 10.0, 0.0, 1.0), (0.0, 2, 10.0, 5.0, 1.0), kinds=2)
    replayed = replay(trace, read_fleet("a=2,b=2"), "finish_time")
    assert replayed.end_s.tolist() == [10.0, 2.0]
    assert dict(zip(replayed.stays.job.tolist(), replayed.stays.kind.tolist(), strict=True)) == {0: 1, 1: 0}


def test_jobs_that_come_together_are_decided_together():
    trace = trace_of((0.0, 1, 10.0, 1.0), (0.0, 1, 10.0, 1.0), (0.0, 1, 10.0, 1.0))
    assert replay(trace, read_fleet("a=3"), "finish_time").at_s.tolist() == [0.0, 10.0]


def test_the_figures_of_a_window_are_of_its_jobs_alone():
    trace = trace_of((0.0, 1, 3600.0, 1.0), (0.0, 1, 7200.0, 1.0), (0.0, 1, 36000.0, 1.0))
    fleet = read_fleet("a=3")
    found = outcome(trace, fleet, "fifo", replay(trace, fleet, "fifo"), np.array([True, True, False]))
    assert (found["window_mean_jct_h"], found["window_p50_jct_h"]) == (1.5, 1.5)
    assert (found["window_isolated_mean_h"], found["mean_jct_h"]) == (1.5, pytest.approx(13 / 3, rel=1e-5))
    assert found["window_p99_jct_h"] == 1.99


def test_a_job_alone_on_the_fleet_has_the_finish_time_ratio_1():
    trace = trace_of((0.0, 1, 100.0, 2.0))
    fleet = read_fleet("a=1")
    assert finish_time_ratios(trace, fleet, replay(trace, fleet, "fifo")).tolist() == [1.0]


def test_the_fair_share_of_a_job_is_one_part_in_n_of_each_kind_fastest_first():
    """Two jobs of 100 s alone on one device: each would need 200 s with half of it, and has 100 s or 200 s."""
    trace = trace_of((0.0, 1, 100.0, 1.0), (0.0, 1, 100.0, 1.0))
    fleet = read_fleet("a=1")
    # The first is there with another throughout; the second alone for half of its stay: 1.5 jobs on average.
    assert finish_time_ratios(trace, fleet, replay(trace, fleet, "fifo")) == pytest.approx([0.5, 200 / 150])
    # Two jobs on two devices of two kinds: half of the time on the fast one, the other half on the slow one.
    slow = trace_of((0.0, 1, 100.0, 2.0, 1.0), (0.0, 1, 100.0, 2.0, 1.0), kinds=2)
    fleet = read_fleet("fast=1,slow=1")
    (first, _) = finish_time_ratios(slow, fleet, replay(slow, fleet, "fifo"))
    assert first == pytest.approx(50.0 / (100.0 / 1.5))


@st.composite
def worlds(draw):
    kinds = draw(st.integers(1, 3))
    devices = draw(st.lists(st.integers(1, 5), min_size=kinds, max_size=kinds))
    jobs = []
    for _ in range(draw(st.integers(1, 12))):
        sure = draw(st.integers(0, kinds - 1))
        gang = draw(st.integers(1, devices[sure]))
        rate = [draw(st.sampled_from(RATES)) if gang <= count else 0.0 for count in devices]
        rate[sure] = rate[sure] or 1.0
        jobs.append((float(draw(st.integers(0, 500))), gang, float(draw(st.integers(1, 400))), *rate))
    jobs.sort(key=lambda job: job[0])
    names = tuple("abc"[:kinds])
    return trace_of(*jobs, kinds=kinds), Fleet(names, np.array(devices))


@settings(max_examples=60, deadline=None)
@given(worlds(), st.sampled_from(POLICIES), st.sampled_from([0.0, 7.0]), st.sampled_from([0.0, 0.5]))
def test_whatever_is_decided_each_job_does_its_work_once_on_devices_that_exist(world, policy, restart_s, noise):
    trace, fleet = world
    replayed = replay(trace, fleet, policy, restart_s, noise)
    stays = replayed.stays
    assert np.isfinite(replayed.end_s).all()
    assert (replayed.used <= fleet.devices).all()
    assert (replayed.used[-1] == 0).all()
    worked_s = np.maximum(stays.stop_s - stays.start_s - restart_s, 0.0)
    steps = np.bincount(stays.job, worked_s * trace.rate[stays.kind, stays.job], minlength=trace.jobs)
    assert steps == pytest.approx(trace.steps, abs=1e-4)
    for job in range(trace.jobs):
        mine = np.flatnonzero(stays.job == job)
        assert (stays.start_s[mine[1:]] >= stays.stop_s[mine[:-1]]).all()
        assert stays.stop_s[mine[-1]] == replayed.end_s[job]
        assert stays.start_s[mine[0]] >= trace.arrival_s[job]
    assert (replayed.end_s - trace.arrival_s >= trace.isolated_s + restart_s - 1e-4).all()
    work = (trace.steps * trace.gang / trace.rate.max(axis=0)).sum()
    assert replayed.end_s.max() >= work / fleet.devices.sum() - 1e-4


@settings(max_examples=15, deadline=None)
@given(worlds(), st.sampled_from(POLICIES))
def test_the_same_seed_gives_the_same_replay(world, policy):
    trace, fleet = world
    first, second = (replay(trace, fleet, policy, 1.0, 0.5, seed=3) for _ in range(2))
    assert first.end_s.tolist() == second.end_s.tolist()
    assert first.stays.kind.tolist() == second.stays.kind.tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_work_of_any_size_gives_finite_figures(policy):
    """Warnings of numpy are errors here."""
    tiny = trace_of((0.0, 1, 1e-200, 1e300, 1e300), (0.0, 2, 1e-9, 3.0, 0.0), kinds=2)
    wide = trace_of((0.0, 1, 5.0, 1e-300, 1e-5), (1e10, 1, 1e300, 1e300, 1.0), (1e10, 2, 1e10, 3.0, 0.0), kinds=2)
    for trace in (tiny, wide):
        fleet = read_fleet("a=2,b=1")
        found = outcome(trace, fleet, policy, replay(trace, fleet, policy, 1e7, 10.0), trace.job_id < 2)
        assert all(np.isfinite(value) for value in found.values() if isinstance(value, float))


def test_an_unknown_policy_names_the_nearest():
    with pytest.raises(UserError, match=r"unknown policy 'finish'.*did you mean 'finish_time'"):
        replay(trace_of((0.0, 1, 1.0, 1.0)), read_fleet("a=1"), "finish")


def test_the_pictures_are_files_of_their_own_that_say_the_bound_and_each_kind():
    trace = trace_of((0.0, 1, 4000.0, 1.0, 0.5), (10.0, 2, 9000.0, 1.0, 1.0), (20.0, 1, 100.0, 2.0, 0.0), kinds=2)
    fleet = Fleet(("$v", "k<80"), np.array([2, 2]))
    drawn = pictures(trace, fleet, replay(trace, fleet, "finish_time"))
    assert list(drawn) == ["utilisation.svg", "jct.svg", "queue.svg"]
    assert all(ElementTree.fromstring(text).tag.endswith("svg") for text in drawn.values())
    assert "k&lt;80: 2 devices" in drawn["utilisation.svg"]
    assert "$v: 2 devices" in drawn["utilisation.svg"]
    assert "no scheduler is better" in drawn["jct.svg"]
    assert "waiting" in drawn["queue.svg"]
    again = pictures(trace, fleet, replay(trace, fleet, "finish_time"))
    assert drawn == again


@pytest.mark.skipif(not GAVEL.is_dir(), reason="the traces of Gavel are not beside this checkout")
@pytest.mark.parametrize("name", ["physical_max_min_fairness", "physical_minimize_makespan"])
def test_the_traces_of_gavels_physical_cluster_are_replayed(name):
    fleet = read_fleet("v100=8,p100=16,k80=24")
    trace = read_trace(GAVEL / f"{name}.csv", read_throughputs(GAVEL / "throughputs_isolated.csv", fleet), fleet)
    replayed = replay(trace, fleet, "finish_time")
    assert (replayed.end_s - trace.arrival_s >= trace.isolated_s - 1e-6).all()
