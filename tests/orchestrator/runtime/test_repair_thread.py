"""The thread that starts again what a fleet has lost, while a look fails for a reason that nobody foresaw."""

import time

import pytest
from patience import LIMIT_S, wait_for

from cluster.fleet import fleet_record
from cluster.nodes.node_repair import RepairResult
from orchestrator.runtime.controller import repair
from orchestrator.runtime.controller.repair import RepairThread


@pytest.fixture
def looks(monkeypatch):
    """The times of all looks; each fails."""
    looks = []

    def read():
        looks.append(time.monotonic())
        raise ZeroDivisionError

    monkeypatch.setattr(fleet_record, "read", read)
    return looks


@pytest.fixture
def after(looks):
    """Runs the thread until it has looked so often."""

    def run(count):
        thread = RepairThread(lambda *_: None)
        thread.start()
        wait_for(lambda: len(looks) >= count)
        thread.close()
        thread.join(LIMIT_S)

    return run


def test_it_rests_after_a_look_that_failed(looks, after, monkeypatch):
    monkeypatch.setattr(repair, "INTERVAL_S", 0.001)
    monkeypatch.setattr(repair, "PAUSE_AFTER_FAILURE_S", 0.2)
    after(3)
    assert looks[2] - looks[0] >= 0.4


def test_of_looks_that_fail_again_and_again_some_are_logged(looks, after, monkeypatch, caplog):
    monkeypatch.setattr(repair, "INTERVAL_S", 0.001)
    monkeypatch.setattr(repair, "PAUSE_AFTER_FAILURE_S", 0.001)
    after(20)
    failed = [record.args[0] for record in caplog.records if record.name == repair.__name__]
    assert failed[:5] == [1, 2, 4, 8, 16] and len(failed) <= 6


class Recorded:
    """What the thread asks for. `a` is lost from when it is ended, and held while `held` says so."""

    def __init__(self, _):
        self.ended, self.lost, self.held = [], ["b"], False

    def is_delayed(self, node):
        return self.held

    def stop_node(self, node):
        self.ended.append(node)
        self.lost.append(node)

    def restart_lost_nodes(self):
        found, self.lost = tuple(self.lost), []
        return RepairResult(found)


@pytest.fixture
def told():
    return []


@pytest.fixture
def thread(monkeypatch, told):
    monkeypatch.setattr(repair, "NodeRepair", Recorded)
    thread = RepairThread(lambda *said: told.append(said))
    yield thread
    thread.close()
    if thread.ident:
        thread.join(LIMIT_S)


def test_a_node_that_is_to_be_started_again_is_ended_and_told_of_with_its_reason(thread, told):
    assert thread.restart("a", "Ray has lost count of it")
    thread.start()
    wait_for(lambda: len(told) >= 2)
    assert thread._repairs.ended == ["a"]
    assert sorted(told) == [("a", "Ray has lost count of it"), ("b", "node b had ended and was started again")]


def test_a_restart_that_was_asked_for_long_ago_is_dropped(thread, monkeypatch):
    """The node may run something by now."""
    monkeypatch.setattr(repair, "REQUEST_AGE_S", -1.0)
    thread.restart("a", "Ray has lost count of it")
    thread._end_requested()
    assert thread._repairs.ended == []


def test_a_node_that_was_started_too_often_lately_stays_as_it_is(thread):
    """Ended, it would be away for minutes."""
    thread._repairs.held = True
    assert not thread.restart("a", "Ray has lost count of it")
    thread._end_requested()
    assert thread._repairs.ended == []
