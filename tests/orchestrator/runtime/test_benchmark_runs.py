"""Runs that begin or go on whole or not at all, and rates read as they come: over a real store."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import patience
import pytest
from patience import wait_for

import orchestrator
from cluster.errors import Conflict, FleetError, SpecError
from cluster.input.archive_unpack import ArchiveContents
from cluster.types import Device, NodeFacts
from orchestrator.core.controller.nodes import Node
from orchestrator.core.jobs.fold import Attempt, Record
from orchestrator.core.model import Job
from orchestrator.core.states import State
from orchestrator.limits import TooManyJobs
from orchestrator.runtime.benchmarks import benchmark_run
from orchestrator.runtime.benchmarks.benchmark_run import outcome
from orchestrator.runtime.benchmarks.benchmarks import Benchmarks
from orchestrator.runtime.benchmarks.throughput import RateTable
from orchestrator.runtime.controller.pending_request import ControllerBusy
from orchestrator.store.events.event_store import EventStore
from orchestrator.store.events.idempotency import StoredResponse

GIB = 1 << 30
REQUEST = {"cases": ["rmsnorm"]}


@pytest.fixture
def lines(store):
    return store.benchmarks


@pytest.fixture
def quick(monkeypatch):
    """What is tried again is tried again at once."""
    monkeypatch.setattr(benchmark_run, "RETRY_S", 0.01)


class Fleet:
    """Two nodes as their agents told of them, and a table of jobs in which none is ever placed."""

    def __init__(self, store):
        self.store, self.jobs, self.cancelled, self.submitted = store, {}, [], []

    def ready(self):
        return [(f"{pool}-0", _agent(pool, kind)) for pool, kind in (("a", "cpu"), ("b", "cpu:ipex"))]

    def submit(self, spec, package, key):
        told = self.store.idempotent(key, repr((spec, package)), lambda: StoredResponse({"id": f"j-{key}"}, (), 201))
        self.submitted.append(told["id"])
        self.jobs[told["id"]] = Record(Job(told["id"], spec["name"], "benchmark", ()))
        return told

    def cancel(self, job):
        self.cancelled.append(job)
        return {}

    def runs(self, submit=None):
        return Benchmarks(self.store.benchmarks, self.jobs, self, submit or self.submit, self.cancel, contents)


def contents(package):
    return ArchiveContents([], package)


def _agent(pool, kind):
    devices = (Device("cpu", kind, 0, "cpu", total_memory_bytes=GIB),)
    facts = NodeFacts(pool, "id", "h", "10.0.0.1", pool, "cpu", pool, 1, {}, devices, 8, GIB, GIB, 0.0, GIB, 1, "/s")
    return Node(pool, "id", 0.0, facts)


def test_a_run_this_version_does_not_understand_has_failed_and_holds_no_node(store, lines):
    fleet = Fleet(store)
    fleet.jobs = {job: Record(Job(job, "x", "benchmark", ())) for job in ("j-1", "j-2")}
    columns = [
        {"target": name, "job": job, "number": 0} for name, job in (("cpu", "j-1"), ("cpu.1", "j-1"), ("x", "j-2"))
    ]
    begun = {"line": "started", "run": "bench-1", "request": {"cases": ["of another version"]}, "code_archive": ""}
    lines.append("bench-1", begun)
    lines.append("bench-1", {"line": "targets", "targets": columns})
    lines.append("bench-2", begun | {"run": "bench-2", "request": REQUEST})
    lines.append("bench-2", {"line": "targets", "targets": columns[:1]})

    def cancel(job):
        fleet.cancelled.append(job)
        raise FleetError("it is gone already", "")

    runs = Benchmarks(lines, fleet.jobs, fleet, fleet.submit, cancel, contents)
    runs.resume()
    assert runs.view("bench-1")["state"] == "FAILED" and "no case or suite" in runs.view("bench-1")["reason"]
    assert (
        runs.view("bench-2")["reason"]
        == "this version cannot continue the run: another version of Polyfleet started it"
    )
    assert fleet.cancelled == ["j-1", "j-2", "j-1"]
    runs.resume()  # once is enough
    assert len(fleet.cancelled) == 3


def test_a_run_whose_second_job_is_refused_has_failed_and_the_first_is_cancelled(store):
    fleet = Fleet(store)

    def submit(spec, package, key):
        if fleet.submitted:
            raise SpecError("code_archive", "is not here")
        return fleet.submit(spec, package, key)

    runs = fleet.runs(submit)
    with pytest.raises(SpecError, match="is not here"):
        runs.start(REQUEST, "", "key")
    [view] = runs.views()
    assert (view["state"], view["reason"]) == ("FAILED", "code_archive: is not here")
    assert fleet.cancelled == fleet.submitted and len(fleet.cancelled) == 1
    assert runs.start(REQUEST, "", "key")["state"] == "FAILED"  # asked again, it is the same run


def test_a_run_whose_jobs_the_fleet_does_not_take_now_says_so_and_submits_them_later(store):
    fleet = Fleet(store)
    full = [True]

    def submit(spec, package, key):
        if full and fleet.submitted:
            raise FleetError("the disk is full", "")
        return fleet.submit(spec, package, key)

    runs = fleet.runs(submit)
    view = runs.start(REQUEST, "")
    assert (view["state"], view["reason"]) == ("WAITING", "the disk is full")
    full.clear()
    wait_for(lambda: len(fleet.submitted) == 2)
    assert runs.cancel(view["run"])["state"] == "CANCELLED"
    assert fleet.cancelled == fleet.submitted


def test_the_same_key_is_the_same_run_and_another_request_under_it_is_a_conflict(store):
    fleet = Fleet(store)
    runs = fleet.runs()
    first = runs.start(REQUEST, "", "key")
    assert runs.start(REQUEST, "", "key")["run"] == first["run"]
    assert (len(runs.views()), len(fleet.submitted)) == (1, 2)
    with pytest.raises(Conflict, match="was used with another request"):
        runs.start(REQUEST | {"seed": 1}, "", "key")
    assert runs.start(REQUEST, "", "other key")["run"] != first["run"]
    assert runs.start(REQUEST, "")["run"] != runs.start(REQUEST, "")["run"]
    runs.close()


def killed_between_two_jobs(url):
    """Begins a run in a process that ends amid the submission of its second job, as kill -9 would end it."""
    store = EventStore(url)
    fleet = Fleet(store)

    def submit(spec, package, key):
        if fleet.submitted:
            os._exit(9)
        return fleet.submit(spec, package, key)

    fleet.runs(submit).start(REQUEST, "", "key")


def test_a_run_begun_by_a_server_that_was_killed_amid_it_is_the_same_run_with_all_its_jobs(tmp_path):
    url = f"sqlite:///{tmp_path / 'store.db'}"
    code = f"import {Path(__file__).stem} as t; t.killed_between_two_jobs({url!r})"
    folders = (Path(orchestrator.__file__).parents[1], Path(patience.__file__).parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, env=env).returncode == 9
    store = EventStore(url)
    fleet = Fleet(store)
    runs = fleet.runs()
    runs.resume()
    wait_for(lambda: len(fleet.submitted) == 2)
    again = runs.start(REQUEST, "", "key")
    assert [view["run"] for view in runs.views()] == [again["run"]]
    assert fleet.submitted == [f"j-{again['run']}-0", f"j-{again['run']}-1"]
    wait_for(lambda: [c["job"] for c in runs.view(again["run"])["targets"]] == fleet.submitted)
    runs.close()
    store.close()


class Sessions(Fleet):
    """The same, whose jobs run on a node at once and whose sessions describe themselves and then end."""

    def submit(self, spec, package, key):
        told = super().submit(spec, package, key)
        pool = spec["resources"]["pool"]
        kind = spec["resources"]["accelerators"]
        attempt = Attempt(1, 0, kind, pool, ((f"{pool}-0/{kind}", (3,)),), 0.0)
        job = Job(told["id"], spec["name"], "benchmark", (), state=State.RUNNING, epoch=1)
        self.jobs[told["id"]] = Record(job, attempts=(attempt,))
        return told

    def get(self, node):
        return dict(self.ready()).get(node)

    __getitem__ = get

    def call(self, node, verb, job, epoch, message, limit_s, timeout_s):
        assert (node, verb, message["device"]) == (f"{node[0]}-0", "measure", 0)
        if message["do"] == "end":
            self.jobs[job] = replace(self.jobs[job], job=replace(self.jobs[job].job, state=State.SUCCEEDED))
        if node == "b-0":
            raise SpecError("", "its device is gone")
        return {"host": f"host of {node}"}


def test_columns_are_what_the_planner_placed_and_what_did_not_come_up_is_lost(store):
    fleet = Sessions(store)
    runs = fleet.runs()
    run_id = runs.start(REQUEST | {"max_minutes": 1e-9}, "")["run"]
    wait_for(lambda: runs.view(run_id)["state"] == "SUCCEEDED")
    told = [line for line in runs.lines(run_id, 0) if line["line"] != "result"]
    assert [line["line"] for line in told] == ["started", "targets", "lost", "target", "targets", "ended"]
    assert [c["target"] for c in told[1]["targets"]] == ["cpu", "cpu:ipex"]
    assert (told[2]["target"], told[2]["reason"]) == ("cpu:ipex", "its device is gone")
    assert runs.view(run_id)["targets"] == [
        {"target": "cpu", "job": fleet.submitted[0], "kind": "cpu", "pool": "a", "node": "a-0", "number": 3}
    ]
    assert fleet.cancelled == [fleet.submitted[1]]


def test_a_run_whose_jobs_are_more_than_may_wait_now_submits_them_later_and_can_be_cancelled(store, quick):
    fleet = Fleet(store)
    full = [True]

    def submit(spec, package, key):
        if full:
            raise TooManyJobs(10, 10)
        return fleet.submit(spec, package, key)

    runs = fleet.runs(submit)
    view = runs.start(REQUEST, "", "key")
    assert (view["state"], view["reason"]) == ("WAITING", "10 jobs are waiting; the maximum is 10")
    assert runs.start(REQUEST, "", "key")["run"] == view["run"]
    full.clear()
    wait_for(lambda: len(fleet.submitted) == 2)
    assert runs.cancel(view["run"])["state"] == "CANCELLED"


class Failing:
    """Lines whose store refuses the first `times` of each of these."""

    def __init__(self, lines, times, *words):
        self._lines, self.left = lines, dict.fromkeys(words, times)

    def append(self, run, line):
        if self.left.get(line["line"]):
            self.left[line["line"]] -= 1
            raise FleetError("the store is locked")
        self._lines.append(run, line)

    def __getattr__(self, name):
        return getattr(self._lines, name)


def test_a_run_outlives_a_store_that_takes_nothing_for_a_while(store, quick):
    fleet = Sessions(store)
    lines = Failing(store.benchmarks, 2, "targets", "lost", "target", "ended")
    runs = Benchmarks(lines, fleet.jobs, fleet, fleet.submit, fleet.cancel, contents)
    run_id = runs.start(REQUEST | {"max_minutes": 1e-9}, "")["run"]
    wait_for(lambda: runs.view(run_id)["state"] == "SUCCEEDED")
    told = [line["line"] for line in runs.lines(run_id, 0) if line["line"] != "result"]
    assert told == ["started", "targets", "lost", "target", "targets", "ended"]
    assert set(lines.left.values()) == {0}


def test_a_run_that_waits_for_its_store_can_be_cancelled_and_says_what_it_waits_for(store, quick):
    fleet = Sessions(store)
    lines = Failing(store.benchmarks, 1 << 30, "targets")
    runs = Benchmarks(lines, fleet.jobs, fleet, fleet.submit, fleet.cancel, contents)
    run_id = runs.start(REQUEST, "")["run"]
    wait_for(lambda: runs.view(run_id)["reason"] == "the store is locked")
    assert runs.cancel(run_id)["state"] == "CANCELLED"


def test_the_jobs_of_a_run_that_ends_are_cancelled_again_until_the_server_has_taken_it(store, quick):
    fleet = Fleet(store)
    busy = [True, True, True]

    def cancel(job):
        if busy:
            busy.pop()
            raise ControllerBusy("the server has not got to it within 5 s")
        return fleet.cancel(job)

    runs = Benchmarks(store.benchmarks, fleet.jobs, fleet, fleet.submit, cancel, contents)
    run_id = runs.start(REQUEST, "")["run"]
    assert runs.cancel(run_id)["state"] == "CANCELLED"
    assert fleet.cancelled == fleet.submitted and len(fleet.cancelled) == 2


def cell(seconds, status="measured", at=1.0):
    blocks = [{"round": n, "calls": 1, "parts_s": [seconds], "at": at} for n in range(9)]
    return {
        "line": "result", "target": "cpu", "case": "mlp/train/b64", "workload": "mlp", "mode": "train", "items": 64,
        "item": "sample", "precision": "fp32", "level": "O1", "regime": "hot", "status": status, "blocks": blocks,
    }  # fmt: skip


def test_rates_are_read_as_they_come_and_each_line_once(lines, monkeypatch):
    rates, read = RateTable(lines), []
    whole = lines.read
    monkeypatch.setattr(lines, "read", lambda run, after=0: read.append(len(told := whole(run, after))) or told)
    key = ("mlp", "train", "cpu", "fp32")
    lines.append("bench-1", {"line": "started", "run": "bench-1", "request": {}, "targets": []})
    lines.append("bench-1", {"line": "target", "target": "cpu", "host": "h", "facts": {"kind": "cpu"}})
    assert rates.newest().rows == {} and read == []
    lines.append("bench-1", cell(0.64))
    assert rates.newest().rows[key].items_per_s == pytest.approx(100)
    lines.append("bench-1", cell(0.32, at=2.0))
    assert rates.newest().rows[key].items_per_s == pytest.approx(200)
    lines.append("bench-1", cell(0.01, status="lost", at=3.0))  # its node went amid its rounds
    assert rates.newest().rows[key].items_per_s == pytest.approx(200)
    rates.newest()
    assert read == [3, 1, 1]


def ended(status, *blocks):
    return {"status": status, "blocks": list(blocks)}


def test_a_run_in_which_nothing_could_be_measured_has_not_succeeded():
    good, bad = ended("measured", {}), ended("failed")
    assert outcome([good, good]) == ("SUCCEEDED", "")
    assert outcome([bad] * 6) == ("FAILED", "0 of 6 results were measured: 6 failed")
    assert outcome([good, bad, ended("wrong")]) == ("SUCCEEDED", "1 of 3 results were measured: 1 failed, 1 wrong")
    assert outcome([ended("lost"), ended("unsupported")])[0] == "FAILED"
    for harmless in (ended("unsupported"), ended("skipped"), ended("measured")):
        assert outcome([harmless])[0] == "SUCCEEDED", harmless
    assert outcome([ended("measured")])[1] == "0 of 1 results were measured: 1 skipped"


def test_a_run_that_has_ended_is_doing_nothing(store):
    fleet = Sessions(store)
    runs = fleet.runs()
    run_id = runs.start(REQUEST | {"max_minutes": 1e-9}, "")["run"]
    wait_for(lambda: runs.view(run_id)["state"] == "SUCCEEDED")
    runs._running[run_id].progress = {"case": "mlp"}
    assert runs.view(run_id)["progress"] == {}
