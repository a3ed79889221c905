"""Nodes that fail under a trace: cases worked out by hand, and what must hold of any."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import UserError
from orchestrator.core.plan.policies.priced_policies import POLICIES
from orchestrator.simulation.fleets import Failures, Fleet, Nodes, Outage
from orchestrator.simulation.node_failures import FailingNodes, Outages
from orchestrator.simulation.outcome import outcome
from orchestrator.simulation.replay import replay
from orchestrator.simulation.traces import Trace


def trace_of(*jobs, **more):
    """From (arrival_s, gang, steps), each at one step a second on the one kind."""
    arrival_s, gang, steps = (np.array(column) for column in zip(*jobs, strict=True))
    return Trace("made.csv", np.arange(len(jobs)), arrival_s, gang, steps, np.ones((1, len(jobs))), **more)


def fleet_of(devices, size, *outages, **more):
    """`outages` are (node, down_s, up_s) of the one kind."""
    nodes = (Nodes(size, more.pop("mtbf_s", np.inf), more.pop("repair_s", 0.0)),)
    return Fleet(("a",), np.array([devices]), Failures(nodes, tuple(Outage(0, *o) for o in outages), **more))


def test_a_job_goes_on_from_its_last_checkpoint_after_the_repair():
    """Progress from 60 s on, checkpoints at 160 and 260, failure at 300, up at 400: 200 of 1000 steps are kept."""
    fleet = fleet_of(1, 1, (0, 300.0, 400.0), checkpoint_s=100.0)
    replayed = replay(trace_of((0.0, 1, 1000.0)), fleet, "fifo", restart_s=60.0)
    assert replayed.end_s.tolist() == [400.0 + 60 + 800]
    assert replayed.stays.stop_s.tolist() == [300.0, 1260.0]
    found = outcome(trace_of((0.0, 1, 1000.0)), fleet, "fifo", replayed)
    assert (found["faults"], found["interruptions"], found["restarts"]) == (1, 1, 2.0)
    assert found["lost_device_h"] == pytest.approx(40 / 3600, rel=1e-5)


def test_before_its_first_checkpoint_a_job_loses_all_of_its_stay():
    fleet = fleet_of(1, 1, (0, 300.0, 400.0), checkpoint_s=600.0)
    replayed = replay(trace_of((0.0, 1, 1000.0)), fleet, "fifo", restart_s=60.0)
    assert replayed.end_s.tolist() == [400.0 + 60 + 1000]
    assert replayed.faults.lost_device_s == 300.0


def test_a_job_that_saves_nothing_begins_anew():
    fleet = fleet_of(1, 1, (0, 300.0, 400.0), checkpoint_s=100.0)
    trace = trace_of((0.0, 1, 1000.0), unsaved=np.array([True]))
    assert replay(trace, fleet, "fifo").end_s.tolist() == [1400.0]


def test_only_the_jobs_on_the_node_are_stopped_and_go_where_there_is_room():
    trace = trace_of((0.0, 2, 1000.0), (0.0, 2, 1000.0))
    replayed = replay(trace, fleet_of(6, 2, (0, 100.0, 5000.0), checkpoint_s=10.0), "fifo")
    assert replayed.end_s.tolist() == [1000.0, 1000.0]
    assert replayed.faults.stopped == 1
    waits = replay(trace, fleet_of(4, 2, (0, 100.0, 5000.0), checkpoint_s=10.0), "fifo")
    assert sorted(waits.end_s.tolist()) == [1000.0, 1900.0]


def test_a_gang_that_spans_nodes_stops_with_any_of_them():
    for node in (0, 1):
        replayed = replay(trace_of((0.0, 4, 100.0)), fleet_of(4, 2, (node, 50.0, 60.0)), "fifo")
        assert replayed.end_s.tolist() == [160.0]


def test_an_outage_of_idle_devices_stops_nobody():
    replayed = replay(trace_of((0.0, 1, 100.0)), fleet_of(2, 1, (1, 50.0, 60.0)), "fifo")
    assert (replayed.end_s.tolist(), replayed.faults.nodes, replayed.faults.stopped) == ([100.0], 1, 0)


def test_a_job_that_ends_as_its_node_fails_has_ended():
    assert replay(trace_of((0.0, 1, 100.0)), fleet_of(1, 1, (0, 100.0, 200.0)), "fifo").end_s.tolist() == [100.0]


def test_outages_of_one_node_may_overlap():
    fleet = fleet_of(1, 1, (0, 50.0, 200.0), (0, 100.0, 150.0), (0, 200.0, 300.0), checkpoint_s=10.0)
    replayed = replay(trace_of((0.0, 1, 100.0)), fleet, "fifo")
    assert replayed.end_s.tolist() == [350.0]


def test_what_happens_to_a_node_depends_on_the_seed_its_kind_and_its_number_alone():
    def told(fleet, kind):
        events = Outages(fleet, fleet.failures).until(50_000.0)
        return [(node[1], down) for node, down in events if fleet.kinds[node[0]] == kind]

    nodes = Nodes(2, 1000.0, 100.0)
    one = Fleet(("a",), np.array([4]), Failures((nodes,), seed=3))
    two = Fleet(("b", "a"), np.array([8, 4]), Failures((nodes, nodes), seed=3))
    assert told(one, "a") == told(two, "a")
    other = Fleet(("a",), np.array([4]), Failures((nodes,), seed=4))
    assert told(one, "a") != told(other, "a")


def test_a_node_is_up_and_down_as_long_on_average_as_was_said():
    fleet = fleet_of(100, 1, mtbf_s=1000.0, repair_s=250.0)
    came = list(Outages(fleet, fleet.failures).until(100_000.0))
    assert sum(down for _, down in came) == pytest.approx(100 * 100_000 / 1250, rel=0.1)


def test_nodes_that_fail_faster_than_a_job_saves_are_the_users_mistake(monkeypatch):
    monkeypatch.setattr("orchestrator.simulation.replay.MAX_FAILURES", 500)
    fleet = fleet_of(4, 4, mtbf_s=60.0, repair_s=10.0)
    with pytest.raises(UserError, match=r"nodes failed 500 times while none of 1 jobs ended.*raise mtbf_h"):
        replay(trace_of((0.0, 4, 10_000.0)), fleet, "finish_time")


def test_a_large_gang_lies_on_few_nodes_and_a_small_one_fills_the_fullest():
    nodes = FailingNodes(fleet_of(12, 4), Failures((Nodes(4),)))
    nodes.place({0: (0, 6), 1: (0, 1)})
    assert nodes.jobs_on((0, 0)) == [0]
    assert nodes.jobs_on((0, 1)) == [0, 1]
    assert nodes.jobs_on((0, 2)) == []


@st.composite
def failing_worlds(draw):
    size = draw(st.integers(1, 4))
    devices = draw(st.integers(size, 9))
    jobs = []
    for _ in range(draw(st.integers(1, 10))):
        gang = draw(st.integers(1, devices))
        jobs.append((float(draw(st.integers(0, 500))), gang, float(draw(st.integers(1, 400)))))
    nodes = Nodes(size, draw(st.sampled_from([200.0, 1000.0])), draw(st.sampled_from([1.0, 100.0])))
    failures = Failures((nodes,), (), draw(st.integers(0, 9)), draw(st.sampled_from([10.0, 50.0])))
    return trace_of(*sorted(jobs, key=lambda job: job[0])), Fleet(("a",), np.array([devices]), failures)


@settings(max_examples=20, deadline=None)
@given(failing_worlds(), st.sampled_from(POLICIES))
def test_until_the_first_failure_all_is_as_on_a_fleet_without_any(world, policy):
    trace, fleet = world
    plain = replay(trace, Fleet(fleet.kinds, fleet.devices), policy, 7.0)
    later = replace(fleet.nodes, nodes=(Nodes(fleet.nodes.nodes[0].size),), outages=(Outage(0, 0, 1e9, 2e9),))
    for nodes in (later, replace(later, outages=())):
        replayed = replay(trace, replace(fleet, nodes=nodes), policy, 7.0)
        assert replayed.end_s.tolist() == plain.end_s.tolist()
        assert replayed.stays.start_s.tolist() == plain.stays.start_s.tolist()
        assert replayed.used.tolist() == plain.used.tolist()


@settings(max_examples=60, deadline=None)
@given(failing_worlds(), st.sampled_from(POLICIES), st.sampled_from([0.0, 7.0]))
def test_whatever_fails_each_job_ends_having_done_its_work_at_least_once(world, policy, restart_s):
    trace, fleet = world
    replayed, again = (replay(trace, fleet, policy, restart_s) for _ in range(2))
    assert replayed.end_s.tolist() == again.end_s.tolist()
    stays = replayed.stays
    assert (replayed.used <= fleet.devices).all()
    assert (replayed.used[-1] == 0).all()
    worked = np.bincount(stays.job, np.maximum(stays.stop_s - stays.start_s - restart_s, 0.0), minlength=trace.jobs)
    assert (worked >= trace.steps - 1e-4).all()
    held_s = ((stays.stop_s - stays.start_s) * trace.gang[stays.job]).sum()
    needed_s = ((trace.steps + restart_s) * trace.gang).sum()
    assert held_s + 1e-3 >= needed_s
    lost = replayed.faults.lost_device_s
    pauses = restart_s * (trace.gang[stays.job].sum() - trace.gang.sum())
    assert held_s - needed_s <= lost + pauses + 1e-3
    if not replayed.faults.stopped:
        assert lost == 0
