"""Runs that begin or go on whole or not at all, and rates read as they come: over a real store."""

import pytest

from cluster.errors import FleetError
from orchestrator.benchmark.throughput import Rates
from orchestrator.runtime import benchmarks
from orchestrator.runtime.benchmarks import Benchmarks, Target
from orchestrator.store import EventStore


@pytest.fixture
def lines(tmp_path):
    store = EventStore(f"sqlite:///{tmp_path / 'store.db'}")
    yield store.benchmarks
    store.close()


def test_a_run_this_version_does_not_understand_has_failed_and_holds_no_node(lines):
    columns = [
        {"column": name, "job": job, "number": 0} for name, job in (("cpu", "j-1"), ("cpu.1", "j-1"), ("x", "j-2"))
    ]
    begun = {"line": "begun", "request": {"cases": ["of another version"]}, "columns": columns, "package": ""}
    lines.append("bench-1", begun)
    cancelled = []

    def cancel(job):
        cancelled.append(job)
        raise FleetError("it is gone already", "")

    runs = Benchmarks(lines, {}, {}, lambda *_: {}, cancel)
    runs.take_up()
    assert runs.view("bench-1")["state"] == "FAILED" and "no case or suite" in runs.view("bench-1")["reason"]
    assert cancelled == ["j-1", "j-2"]
    runs.take_up()  # once is enough
    assert len(cancelled) == 2


def test_a_run_whose_second_node_cannot_be_had_lets_go_of_the_first(lines, monkeypatch):
    found = [Target("a", "cpu", "a-0", 1, (0,)), Target("b", "tpu:v5e", "b-0", 1, (0,))]
    monkeypatch.setattr(benchmarks, "targets", lambda asked, agents: found)
    submitted, cancelled = [], []

    def submit(spec, package, key):
        if submitted:
            raise FleetError("the disk is full", "")
        submitted.append(spec)
        return {"id": "j-1"}

    runs = Benchmarks(lines, {}, {}, submit, cancelled.append)
    with pytest.raises(FleetError, match="the disk is full"):
        runs.begin({"cases": ["rmsnorm"]}, "")
    assert (cancelled, runs.views()) == (["j-1"], [])


def cell(seconds, status="measured", at=1.0):
    blocks = [{"round": n, "calls": 1, "parts_s": [seconds], "at": at} for n in range(9)]
    return {
        "line": "cell", "column": "cpu", "case": "mlp/train/b64", "workload": "mlp", "mode": "train", "items": 64,
        "item": "sample", "precision": "fp32", "level": "O1", "regime": "hot", "status": status, "blocks": blocks,
    }  # fmt: skip


def test_rates_are_read_as_they_come_and_each_line_once(lines, monkeypatch):
    rates, read = Rates(lines), []
    whole = lines.read
    monkeypatch.setattr(lines, "read", lambda run, after=0: read.append(len(told := whole(run, after))) or told)
    key = ("mlp", "train", "cpu", "fp32")
    lines.append("bench-1", {"line": "begun", "run": "bench-1", "request": {}, "columns": []})
    lines.append("bench-1", {"line": "column", "column": "cpu", "host": "h", "facts": {"kind": "cpu"}})
    assert rates.newest().rows == {} and read == []
    lines.append("bench-1", cell(0.64))
    assert rates.newest().rows[key].items_per_s == pytest.approx(100)
    lines.append("bench-1", cell(0.32, at=2.0))
    assert rates.newest().rows[key].items_per_s == pytest.approx(200)
    lines.append("bench-1", cell(0.01, status="lost", at=3.0))  # its node went amid its rounds
    assert rates.newest().rows[key].items_per_s == pytest.approx(200)
    rates.newest()
    assert read == [3, 1, 1]
