"""A job that goes on does so where its checkpoint is, unless its objective says otherwise."""

from dataclasses import replace

from orchestrator.core.controller.draft import Control
from orchestrator.core.controller.nodes import Node
from orchestrator.core.jobs.fold import Record
from orchestrator.core.plan.plan import plan
from orchestrator.core.states import State
from orchestrator.core.step.placement import waiting_jobs
from orchestrator.core.throughput import Measured, Throughput

RATES = {
    ("digits", "train", kind, "fp32"): Measured(rate, rate, rate, "sample", "bench-1", 0.0)
    for kind, rate in (("cpu", 1.0), ("cpu:ipex", 9.0))
}


def where(seen):
    [start] = plan(seen).start
    return start.allocation[0][0].partition("/")[0], start.reason


def test_of_equal_places_that_with_the_checkpoint_is_taken_and_that_is_said(w):
    here, there = w.cpu("a", 2, storage="one"), w.cpu("b", 1, storage="two")
    job = w.job("j", w.want("cpu"))
    assert where(w.snapshot([here, there], [job])) == ("b", "cpu in pool cpu, the tightest fit")
    goes_on = replace(job, checkpoint_in=("one",))
    told = "cpu in pool cpu, where its checkpoint is, the tightest fit"
    assert where(w.snapshot([here, there], [goes_on])) == ("a", told)


def test_among_pools_too_but_not_before_what_was_measured_faster(w):
    here, there = w.ipex("a", storage="one"), w.cpu("b", storage="two")
    job = w.job("j", w.want("cpu:ipex", pool="ipex"), w.want("cpu", pool="cpu"), checkpoint_in=("two",))
    assert where(w.snapshot([here, there], [job]))[0] == "b"
    fast = replace(job, workload="digits", objective="throughput")
    assert where(replace(w.snapshot([here, there], [fast]), throughput=Throughput(RATES)))[0] == "a"


def test_jobs_that_wait_are_told_with_the_storages_of_their_checkpoint_and_of_its_copies(w, t):
    def node(name, storage):
        return Node(name, f"ray-{name}", 0.0, replace(t.facts(name), storage_id=storage))

    nodes = {name: node(name, storage) for name, storage in (("a", "one"), ("b", "two"), ("c", "three"), ("d", ""))}
    old, new = {"node": "c", "step": 5}, {"node": "b", "step": 9}
    job = replace(w.job("j"), state=State.RECOVERING)
    record = Record(job, checkpoint={"step": 9, "node": "a", "path": "p", "pool": "cpu"}, replicas=(old, new))

    def told(**more):
        [found] = waiting_jobs(Control(records={"j": replace(record, **more)}, nodes=nodes), 0.0)
        return found.checkpoint_in

    assert told() == ("one", "two")
    assert told(checkpoint=None) == told(checkpoint={"step": 9, "node": "d"}, replicas=()) == ()
    assert told(checkpoint={"step": 9}, replicas=()) == told(checkpoint={"step": 9, "node": "gone"}, replicas=()) == ()
