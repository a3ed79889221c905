"""Reservations whose answer comes too late. Ray is recorded: groups are objects, and the head answers when told."""

import importlib
import threading

import pytest
from patience import LIMIT_S, wait_for

from cluster.errors import FleetError
from orchestrator.runtime.agents import reservations
from orchestrator.runtime.agents.ray_calls import RAY, ClusterLeft

SOON_S = 0.1


class RecordedGroup:
    def __init__(self, head):
        self.head = head

    def wait(self, timeout_seconds):
        assert self.head.created.wait(LIMIT_S)
        return True


class RecordedHead:
    """`standing` are groups by name. `answers` and `created` are what a frozen head keeps back; `gone`: a head that the
    first call is asked of never answers.
    """

    def __init__(self):
        self.answers, self.created = threading.Event(), threading.Event()
        self.standing, self.made, self.asked, self.gone = {}, [], 0, False

    def find(self, place):
        self.asked += 1
        if not (self.gone and self.asked > 1):
            assert self.answers.wait(LIMIT_S)
        return RecordedGroup(self) if place in self.standing else None

    def make(self, bundles, *, name, **_):
        self.made.append(name)
        self.standing[name.rpartition("-")[2]] = group = RecordedGroup(self)
        return group

    def remove(self, group):
        self.standing.clear()


@pytest.fixture
def head(monkeypatch):
    head = RecordedHead()
    monkeypatch.setattr(reservations, "_find", head.find)
    monkeypatch.setattr(reservations, "_state", lambda group: "CREATED")
    monkeypatch.setattr(reservations, "_is_on_nodes", lambda group, ids: True)
    monkeypatch.setattr(reservations, "_wait_for_capacity", lambda bundles, ids: None)
    monkeypatch.setattr(reservations, "_remove", head.remove)
    monkeypatch.setattr(importlib.import_module("ray.util.placement_group"), "placement_group", head.make)
    yield head
    head.answers.set()
    head.created.set()
    wait_for(lambda: not RAY._calls)


def reserve(timeout_s=LIMIT_S):
    """As `reservations.reserve`, within another time."""
    make = reservations.reserve.__wrapped__
    return RAY.call(
        "reserve", lambda: make("place", [{"CPU": 1.0}], ["a"]), timeout_s, reservations._LOCKS.release_late
    )


def release(timeout_s=LIMIT_S):
    return RAY.call("release", lambda: reservations.release_now("place"), timeout_s)


def idle():
    return not RAY._calls and RAY._threads == RAY._idle


def test_nothing_is_reserved_for_a_launch_that_was_given_up_before_the_head_answered(head):
    with pytest.raises(FleetError, match="did not respond to the request to reserve"):
        reserve(SOON_S)
    head.answers.set()
    wait_for(idle)
    assert head.made == []


def test_what_was_reserved_too_late_goes_back(head):
    head.answers.set()
    with pytest.raises(FleetError):
        reserve(SOON_S)
    assert head.made
    head.created.set()
    wait_for(lambda: not head.standing)


def test_what_was_reserved_too_late_stays_where_the_next_launch_has_it(head):
    """Or it goes back before the next launch looks, which makes another."""
    head.answers.set()
    with pytest.raises(FleetError):
        reserve(SOON_S)
    following = threading.Thread(target=reserve)
    following.start()
    head.created.set()
    following.join(LIMIT_S)
    wait_for(idle)
    assert "place" in head.standing


def test_a_release_that_was_given_up_takes_nothing_from_the_next_launch(head):
    head.standing["place"] = RecordedGroup(head)
    with pytest.raises(FleetError, match="did not respond to the request to release"):
        release(SOON_S)
    following = threading.Thread(target=reserve)
    following.start()
    head.answers.set()
    head.created.set()
    following.join(LIMIT_S)
    wait_for(idle)
    assert "place" in head.standing and head.made == []


def test_a_release_in_time_gives_back(head):
    head.answers.set()
    head.standing["place"] = RecordedGroup(head)
    release()
    assert head.standing == {}


def test_a_call_to_a_cluster_that_was_left_keeps_nobody_in_the_next_one_waiting(head):
    """A head that is gone for good may never answer; the same devices are reserved in the cluster of its successor."""
    head.gone = True
    head.created.set()
    told = []
    make = reservations.reserve.__wrapped__
    RAY.submit("reserve", lambda: make("place", [{"CPU": 1.0}], ["a"]), LIMIT_S, told.append)
    wait_for(lambda: head.asked)
    RAY.abandon()
    assert isinstance(told[0], ClusterLeft)
    assert reserve(LIMIT_S / 2) is not None and len(head.made) == 1
    head.answers.set()
    wait_for(lambda: not reservations._LOCKS.lock("place").locked())
    assert "place" in head.standing
