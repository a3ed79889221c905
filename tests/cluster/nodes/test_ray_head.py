"""What becomes of the nodes of a Ray cluster whose head cannot come back, and of nodes that nobody wrote down."""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from patience import LIMIT_S

from cluster.errors import FleetError
from cluster.fleet import fleet_record
from cluster.fleet.fleet_record import FleetRecord, NodeProcess
from cluster.fleet.fleet_spec import parse_fleet
from cluster.host.processes import identify
from cluster.nodes import embedded, ray_head
from cluster.nodes.node_repair import NodeRepair, lost_nodes

ENDS = f"""#!/bin/sh
[ "$1" = -c ] && exec {shlex.quote(sys.executable)} "$@" || echo "no device"
"""
"""A Python that says of itself what ours says, and no more."""
SAVES = f'trap "echo told > {os.devnull}; touch told" TERM; touch ready; while :; do read word; done'


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetRecord:
    """A fleet that is up, with this process as its head and without the node it should have."""
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("POLYFLEET_CACHE", str(tmp_path / "cache"))
    (tmp_path / "pf-now").mkdir(mode=0o700)
    (tmp_path / "python").write_text(ENDS)
    (tmp_path / "python").chmod(0o700)
    own = identify(os.getpid())
    head = NodeProcess("head", ray_head.HEAD, "", own.pid, own.created)
    made = FleetRecord("local", "up", "127.0.0.1:1", "0", 1.0, "/token", str(tmp_path / "pf-now"), processes=(head,))
    made = replace(made, pools=embedded.plain_pools(spec_of(tmp_path)))
    fleet_record.write(made)
    return made


def spec_of(tmp_path: Path):
    pool = {"backend": "cpu", "environment": {"interpreter": str(tmp_path / "python")}}
    return parse_fleet({"pools": {"cpu": pool}})


def ray_process(shell, folder: Path):
    """One of Ray's by its title, which works in `folder` and notes what it is told."""
    folder.mkdir(parents=True)
    process = shell(["ray::Agent", "-s"], cwd=folder)
    process.stdin.write(f"{SAVES}\n")
    process.stdin.flush()
    while not (folder / "ready").exists():
        pass
    return process


def test_nodes_of_the_cluster_before_are_killed_without_a_word(record: FleetRecord, tmp_path: Path, shell):
    before = tmp_path / "pf-before"
    old, new = ray_process(shell, before / "n" / "cpu-0"), ray_process(shell, record.cwd("cpu-0"))
    done = ray_head.kill_previous_nodes(replace(record, previous_temp_dir=str(before)))
    assert old.wait(LIMIT_S) == -9 and not before.exists()
    assert new.poll() is None and not (record.cwd("cpu-0") / "told").exists()
    assert done.previous_temp_dir == "" and fleet_record.read() == done


def test_a_node_that_nobody_wrote_down_ends_before_another_takes_its_name(record: FleetRecord, tmp_path: Path, shell):
    """As after a `polyfleet up` that was killed just when it had started the node."""
    unknown = ray_process(shell, record.cwd("cpu-0"))
    with pytest.raises(FleetError, match="node cpu-0 did not start: no device"):
        embedded.up(spec_of(tmp_path), print)
    assert unknown.wait(LIMIT_S) == -9


def test_a_head_that_does_not_start_leaves_the_fleet_as_it_was(record: FleetRecord, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(ray_head.sys, "executable", str(tmp_path / "python"))
    lost = replace(record, processes=())
    with pytest.raises(FleetError, match="node head did not start"):
        ray_head.restart(lost, print)
    assert fleet_record.read() == lost and Path(lost.temp_dir).is_dir()


def test_a_new_head_without_its_nodes_is_no_fleet_yet_and_whoever_comes_next_goes_on(
    record: FleetRecord, tmp_path: Path, shell
):
    """As after a server that was killed while it replaced a lost head."""
    before = tmp_path / "pf-before"
    old = ray_process(shell, before / "n" / "cpu-0")
    fleet_record.write(replace(record, state="starting", previous_temp_dir=str(before)))
    done = NodeRepair(print).restart_lost_nodes()
    assert "node cpu-0 did not start: no device" in done.postponed[ray_head.HEAD]
    now = fleet_record.read()
    assert now is not None and (now.state, now.previous_temp_dir, lost_nodes(now)) == ("up", "", ("cpu-0",))
    assert old.wait(LIMIT_S) == -9 and now.head == record.head
