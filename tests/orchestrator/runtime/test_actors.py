"""Nodes as Ray lists them, and the end of a hung agent."""

import os
import signal
import subprocess
import sys

from patience import LIMIT_S

from cluster.host.processes import start_of
from orchestrator.runtime.agents import actors
from orchestrator.runtime.agents.actors import NodeRow

LISTED = {
    "NodeID": "0e3da2f62bbb",
    "Alive": True,
    "NodeManagerAddress": "10.0.0.7",
    "NodeManagerHostname": "vm",
    "Resources": {"CPU": 2.0, "memory": 1.0},
    "Labels": {"polyfleet.io/node": "right-0", "polyfleet.io/pool": "right"},
}


def test_a_node_is_named_by_our_label_or_by_its_host():
    labels = LISTED["Labels"]
    row = NodeRow("0e3da2f62bbb", "right-0", True, True, "vm", "10.0.0.7", {"CPU": 2.0, "memory": 1.0}, labels)
    assert actors.node_row(LISTED, {}) == row and not row.draining
    assert actors.node_row(LISTED | {"Labels": {}}, {}).name == "vm-0e3da2"


def test_heads_of_ours_and_nodes_without_cpus_take_no_work():
    assert not actors.node_row(LISTED | {"Labels": {"polyfleet.io/role": "head"}}, {}).takes_work
    assert not actors.node_row(LISTED | {"Resources": {}}, {}).takes_work


def test_a_node_that_is_drained_says_how_long_it_has():
    assert actors.node_row(LISTED, {"0e3da2f62bbb": 12.5}).drain_left_s == 12.5
    assert actors.node_row(LISTED, {"another": 12.5}).drain_left_s is None
    assert actors.seconds_left(31_000, 20.5) == 10.5
    assert actors.seconds_left(31_000, 40.0) == 0.0
    assert actors.seconds_left(0, 40.0) == float("inf")


def test_a_stopped_process_is_killed_if_it_is_the_one_that_was_told_of():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as agent:
        agent.send_signal(signal.SIGSTOP)
        started = start_of(agent.pid)
        for other in ("", 1.0, started + "0", start_of(os.getpid())):
            assert not actors.kill_local_process(agent.pid, other)
        assert agent.poll() is None
        assert actors.kill_local_process(agent.pid, started)
        assert agent.wait(LIMIT_S) == -signal.SIGKILL
    assert not actors.kill_local_process(agent.pid, started)
