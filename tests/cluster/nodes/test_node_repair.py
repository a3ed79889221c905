"""When a lost node is started again, when not, and who goes first. The node's Ray ends as soon as it begins."""

import os
import shlex
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from patience import LIMIT_S

from cluster.errors import Conflict
from cluster.fleet import fleet_record
from cluster.fleet.fleet_record import FleetRecord, NodeProcess
from cluster.fleet.fleet_spec import parse_fleet
from cluster.host.processes import identify, is_alive
from cluster.nodes import embedded
from cluster.nodes.embedded import down, fleet_lock
from cluster.nodes.node_repair import HEAD, NodeRepair, RepairResult, backoff_left_s, lost_nodes

ENDS = f"""#!/bin/sh
[ "$1" = -c ] && exec {shlex.quote(sys.executable)} "$@" || echo "no device"
"""
"""A Python that says of itself what ours says, and no more."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetRecord:
    """A fleet that is up, as its record says, with this process as head and no node."""
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("POLYFLEET_CACHE", str(tmp_path / "cache"))
    own = identify(os.getpid())
    (tmp_path / "pf-x").mkdir(mode=0o700)
    (tmp_path / "python").write_text(ENDS)
    (tmp_path / "python").chmod(0o700)
    pool = {"backend": "cpu", "environment": {"interpreter": str(tmp_path / "python")}}
    pools = {"cpu": parse_fleet({"pools": {"cpu": pool}}).pools["cpu"].model_dump(mode="json")}
    made = FleetRecord("f", "up", "127.0.0.1:1", "0", 1.0, "/token", str(tmp_path / "pf-x"), pools=pools)
    made = replace(made, processes=(NodeProcess("head", HEAD, "", own.pid, own.created),))
    fleet_record.write(made)
    return made


def ended(node: str) -> None:
    now = fleet_record.read()
    assert now is not None
    [process] = [p.process for p in now.processes if p.node == node]
    while is_alive(process):
        pass


@pytest.mark.parametrize(
    ("starts", "now_s", "left_s"),
    [
        ([], 5.0, 0.0),
        ([0.0], 4.0, 6.0),
        ([0.0], 11.0, 0.0),
        ([0.0, 10.0], 20.0, 50.0),
        ([0.0, 10.0, 70.0], 71.0, 529.0),
        ([10.0, 70.0, 600.0], 601.0, 9.0),
    ],
)
def test_pauses_grow_and_there_are_three_starts_in_ten_minutes(starts: list[float], now_s: float, left_s: float):
    assert backoff_left_s(starts, now_s) == left_s


def test_a_node_that_ends_again_and_again_is_held_with_the_reason(record: FleetRecord):
    clock, said = Clock(), list[str]()
    repairs = NodeRepair(said.append, clock)
    for now_s in (0.0, 10.0, 70.0):
        clock.now_s = now_s
        assert repairs.restart_lost_nodes() == RepairResult(("cpu-0",))
        ended("cpu-0")
    clock.now_s = 80.0
    held = repairs.restart_lost_nodes()
    assert held.started == () and list(held.postponed) == ["cpu-0"]
    assert (
        "node cpu-0 ended again after 3 restarts within 10 minutes; the next start is in 520 s"
        in held.postponed["cpu-0"]
    )
    clock.now_s = 601.0
    assert repairs.restart_lost_nodes().started == ("cpu-0",)
    ended("cpu-0")
    assert said == ["cpu-0 of fleet f has ended: restarting it"] * 4


@pytest.mark.parametrize("state", ["starting", "stopping", "leaving", "left"])
def test_only_a_fleet_that_is_up_is_repaired(record: FleetRecord, state: str):
    fleet_record.write(replace(record, state=state))
    assert NodeRepair(print).restart_lost_nodes() == RepairResult()


def test_a_cluster_that_is_not_ours_has_no_lost_nodes(record: FleetRecord):
    assert lost_nodes(replace(record, temp_dir="", processes=())) == ()
    assert lost_nodes(None) == ()


def test_nothing_is_repaired_while_up_or_down_is_at_work(record: FleetRecord, monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    monkeypatch.setattr(embedded, "WAIT_S", 0.2)
    with fleet_lock():
        assert NodeRepair(print).restart_lost_nodes() == RepairResult()
        with pytest.raises(Conflict, match="another `polyfleet up` or `down` is running for this home"):
            down(told.append)
    assert told == ["waiting for another `polyfleet up` or `down` to end"]
    assert NodeRepair(print).restart_lost_nodes().started == ("cpu-0",)
    ended("cpu-0")


def test_down_waits_for_a_repair_to_end(record: FleetRecord, monkeypatch: pytest.MonkeyPatch):
    waits, ends = threading.Event(), threading.Event()
    monkeypatch.setattr(embedded.time, "sleep", lambda seconds: waits.set())
    fleet_record.write(replace(record, processes=()))

    def repair() -> None:
        with fleet_lock(embedded.REPAIR_MARK):
            ends.set()
            assert waits.wait(LIMIT_S)

    repairing = threading.Thread(target=repair)
    repairing.start()
    assert ends.wait(LIMIT_S)
    assert down(print) == []
    repairing.join()
    assert waits.is_set() and fleet_record.read() is None


def test_a_head_that_cannot_be_started_again_is_tried_again_later(record: FleetRecord, tmp_path: Path):
    fleet_record.write(replace(record, processes=()))
    (tmp_path / "home" / "logs").touch()  # a file where the head's log belongs
    clock = Clock()
    repairs = NodeRepair(print, clock)
    assert "could not be restarted" in repairs.restart_lost_nodes().postponed[HEAD]
    now = fleet_record.read()
    assert now is not None and now.state == "up" and lost_nodes(now) == (HEAD,)
    assert "next start is in 10 s" in repairs.restart_lost_nodes().postponed[HEAD]


def test_a_damaged_record_is_told_not_raised(record: FleetRecord):
    fleet_record.path().write_text("{")
    assert "fleet.json is damaged" in NodeRepair(print).restart_lost_nodes().postponed[HEAD]


def test_a_node_that_is_to_be_started_again_is_told_and_ends_with_all_it_started(record: FleetRecord):
    """Ray's head has to hear of its end, which only the node itself can tell at once."""
    words = ["sh", "-c", "trap 'echo told; kill $child; exit' TERM; sleep 60 & child=$!; echo $child; wait"]
    node = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert node.stdout is not None
    child = identify(int(node.stdout.readline()))
    process = identify(node.pid)
    worker = NodeProcess("worker", "cpu-0", "cpu", process.pid, process.created)
    up = replace(record, processes=(*record.processes, worker))
    fleet_record.write(replace(up, state="stopping"))
    NodeRepair(print).stop_node("cpu-0")
    assert is_alive(process) and is_alive(child), "whoever stops the fleet ends it"
    fleet_record.write(up)
    NodeRepair(print).stop_node("cpu-1")
    assert is_alive(process)
    NodeRepair(print).stop_node("cpu-0")
    assert node.communicate()[0] == "told\n"
    assert not is_alive(process) and not is_alive(child)
