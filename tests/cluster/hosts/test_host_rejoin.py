"""Hosts whose nodes are away are joined again, with growing pauses. SSH itself is tried in tests/machines."""

import socket

import pytest

from cluster.errors import FleetError
from cluster.fleet import fleet_record
from cluster.fleet.fleet_record import FleetRecord, HostRecord
from cluster.hosts.host_rejoin import AWAY_S, FIRST_PAUSE_S, HostRejoin

HOST = HostRecord("b", "b.lab", "10.0.0.2", {}, ("far-b",), "/h", "/c", {"far": "/p"})


@pytest.fixture
def away(tmp_path, monkeypatch):
    """A fleet on a cluster that others run has no head of ours; its hosts are looked at all the same."""
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    fleet_record.write(FleetRecord("lab", "up", "10.0.0.1:1", "0", 1.0, "/token", hosts=(HOST,)))
    return Clock()


class Clock:
    """Time that a test sets, and the times at which a host was joined."""

    def __init__(self):
        self.now_s, self.joined, self.error = 0.0, [], None
        self.rejoins = HostRejoin(lambda line: None, lambda: self.now_s, self.join)

    def join(self, record, host, progress):
        self.joined.append(self.now_s)
        if self.error:
            raise self.error

    def at(self, now_s, ready=()):
        self.now_s = now_s
        return self.rejoins.check(ready)


def test_a_node_that_is_away_for_a_moment_is_left_to_its_watchdog(away):
    away.at(0)
    assert away.at(AWAY_S - 1).started == ()
    away.at(AWAY_S, ready=["far-b"])
    away.at(2 * AWAY_S)
    assert away.joined == []


def test_a_host_that_stays_away_is_joined_again(away):
    away.at(0)
    assert away.at(AWAY_S).started == ("far-b",)
    assert away.joined == [AWAY_S]


def test_pauses_grow_while_a_host_is_not_reached_and_the_reason_is_told(away):
    away.error = FleetError("host b.lab is not reached", "see")
    for now_s in range(0, 600):
        told = away.at(now_s)
    pauses = [later - earlier for earlier, later in zip(away.joined, away.joined[1:], strict=False)]
    assert pauses == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S, 240.0]
    assert "far-b could not be joined again: host b.lab is not reached" in told.postponed["far-b"]


def test_a_fleet_that_is_taken_down_joins_nobody(away):
    away.at(0)
    fleet_record.remove()
    assert away.at(100).started == ()
    assert away.joined == []


def test_the_host_of_the_head_is_away_while_nothing_listens_there(away):
    """Its nodes are asked without the head, and need not be missing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        led = FleetRecord("lab", "up", address, "0", 1.0, "/token", hosts=(HOST,), head_spec={"host": "B"})
        fleet_record.write(led)
        away.at(0, ready=["far-b"])
        assert away.at(AWAY_S, ready=["far-b"]).started == ()
    away.at(2 * AWAY_S, ready=["far-b"])
    assert away.at(3 * AWAY_S, ready=["far-b"]).started == ("head",)
    assert away.joined == [3 * AWAY_S]
