"""Metrics are stored with the events of the same messages: a user who sees a job ended can read all of them."""

from dataclasses import replace

import pytest

from cluster.serialization import from_plain
from cluster.types import NodeFacts
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import Launch, StoreReport
from orchestrator.core.jobs.fold import submitted
from orchestrator.core.model import Candidate, Job
from orchestrator.core.step import control
from orchestrator.runtime.clock import now
from orchestrator.runtime.controller.step_batch import StepBatch
from orchestrator.runtime.jobs.jobs import StoreUnavailable
from workers.protocol.messages import PROTOCOL, AttemptStatus, Outcome, RankEvent

NODE = "cpu-0", "ray-cpu-0"
SUCCEEDED = Outcome("j", 1, 0, "succeeded", {0: 0})


@pytest.fixture
def steps(jobs, recorded):
    """With job j, whose attempt has started on a node."""
    steps = StepBatch(jobs, control.control_from_log([], {}, {}, now()), lambda state: None)
    jobs.commit([submitted(Job("j", "j", "run", (Candidate(("cpu",)),)), {}, 1.0)])
    node, ray_id = NODE
    facts = from_plain(NodeFacts, recorded.RECORDED[0] | {"ray_node_id": ray_id, "protocol": PROTOCOL})
    steps.apply([m.ClusterJoined(), m.NodesListed((m.ListedNode(ray_id, node),)), m.AgentStarted(node, ray_id)])
    steps.apply([m.Heartbeat(*NODE, now().s, facts, attempts=frozenset()), m.Submitted((jobs["j"],))])
    [launch] = [command for command in steps.apply([m.Tick()]) if isinstance(command, Launch)]
    steps.apply([m.Launched("j", launch.epoch)])
    return steps


def status(*numbers, phase="running", outcome=None, **metrics):
    events = tuple(RankEvent("report", 0, 1.0, number, {"step": number} | metrics) for number in numbers)
    return m.Heartbeat(*NODE, now().s, None, (AttemptStatus("j", 1, 0, phase, events, numbers[-1], outcome),))


def steps_of(store):
    return [row["step"] for row in store.metrics.read("j")]


def test_who_sees_that_a_job_has_ended_can_read_all_of_its_metrics(steps, jobs, store, monkeypatch):
    seen = []
    commit = jobs.commit

    def look_after(*arguments):
        stored = commit(*arguments)
        seen.append((jobs["j"].job.state, steps_of(store)))
        return stored

    monkeypatch.setattr(jobs, "commit", look_after)
    steps.apply([status(1, 2)])
    commands = steps.apply([status(3, 4, phase="ended", outcome=SUCCEEDED)])
    assert seen == [("RUNNING", [1, 2]), ("SUCCEEDED", [1, 2, 3, 4])]
    assert not [command for command in commands if isinstance(command, StoreReport)]
    assert jobs.metrics("j") == {"step": 4}


def test_metrics_without_events_are_stored_before_those_that_come_with_the_end(steps, jobs, store):
    steps.apply([status(1)])
    for number in range(2, 50):
        steps.apply([status(number)])
    assert jobs.metrics("j") == {"step": 49}
    steps.apply([status(50, phase="ended", outcome=SUCCEEDED)])
    assert steps_of(store) == list(range(1, 51))


def test_metrics_of_an_end_that_cannot_be_stored_are_stored_once_with_it(steps, jobs, store, monkeypatch):
    steps.apply([status(1)])
    append = store.append

    def full(*_, **__):
        raise StoreUnavailable("the disk is full", "")

    monkeypatch.setattr(store, "append", full)
    items = [status(2, phase="ended", outcome=SUCCEEDED)]
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            steps.apply(items)
    assert jobs["j"].job.state == "RUNNING" and jobs.metrics("j") == {"step": 1}
    monkeypatch.setattr(store, "append", append)
    steps.apply(items)
    assert (jobs["j"].job.state, steps_of(store)) == ("SUCCEEDED", [1, 2])


def test_metrics_that_cannot_be_stored_keep_no_end_from_being_stored(steps, jobs, store, caplog):
    ends = status(1, 2, phase="ended", outcome=SUCCEEDED)
    [part] = ends.reports
    events = (part.events[0], replace(part.events[1], data={"step": 2, "loss": {1, 2}}))
    steps.apply([replace(ends, reports=(replace(part, events=events),))])
    assert (jobs["j"].job.state, steps_of(store)) == ("SUCCEEDED", [1])
    assert "metrics of j are dropped: not plain data" in caplog.text
