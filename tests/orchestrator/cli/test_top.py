"""`polyfleet top`: one snapshot where nobody watches, live at a terminal until `q`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import LIMIT_S

from orchestrator.client import client as http

ROOT = Path(__file__).parents[3]


@pytest.fixture
def running(live, talking, wait_for):
    with http.connect(live.home, start=False) as client:
        job = client.jobs.submit(talking.spec)["id"]
        wait_for(lambda: client.jobs.show(job)["state"] == "RUNNING")
        yield job


def test_without_a_terminal_it_prints_one_snapshot(here, live, running):
    live.service.jobs_table.set_metrics(running, {"step": 7})
    done = here("top")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert " ".join(lines[0][2:]) == "3 nodes, 1 of 3 devices in use jobs: 1 RUNNING"
    assert [line[1] for line in lines[3:6]] == ["cpu-0", "ipex-0", "xla-0"]
    assert sum(running in line for line in lines[3:6]) == 1
    assert lines[8][:2] == [running, "RUNNING"] and "7" in lines[8]


def test_as_json_it_is_one_document(here, live, running):
    told = json.loads(here("top", "-o", "json", "-n", "5").stdout)
    assert [node["node"] for node in told["nodes"]] == ["cpu-0", "ipex-0", "xla-0"]
    assert {device["job"] for node in told["nodes"] for device in node["devices"]} == {running, None}
    assert [(job["id"], job["state"], job["step"]) for job in told["jobs"]] == [(running, "RUNNING", None)]


def test_at_a_terminal_it_is_painted_again_until_q(command, live, running, at_a_terminal):
    terminal = at_a_terminal([*command, "top", "--every", "0.5"])
    for _ in range(3):
        terminal.shows(b"UTC")
    terminal.type(b"q")
    assert terminal.code() == 0
    assert b"\x1b[?1049l" in terminal.seen  # it leaves the terminal as it was


@pytest.mark.parametrize("words", [["-n", "2", "--every", "0.5"], ["--once"]], ids=" ".join)
def test_at_a_terminal_it_can_be_told_when_to_end(command, live, running, at_a_terminal, words):
    terminal = at_a_terminal([*command, "top", *words])
    terminal.shows(b"UTC")
    assert terminal.code() == 0


def test_ctrl_c_ends_it_as_q_does(command, live, running, at_a_terminal):
    terminal = at_a_terminal([*command, "top", "--every", "30"])
    terminal.shows(b"UTC")
    terminal.type(b"\x03")
    assert terminal.code() == 0


WAITS = """
import os, signal, threading
from orchestrator.cli.fleet.top import _Keys

begun = threading.Event()
threading.Thread(target=lambda: begun.wait() and os.kill(os.getpid(), signal.SIGINT)).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
begun.set()
try:
    _Keys(None)(3600.0)
except KeyboardInterrupt:
    print("ended")
"""


def test_a_ctrl_c_that_another_thread_gets_ends_it_too():
    """The kernel gives it to any thread; one that waits for a key is not woken by that."""
    with subprocess.Popen([sys.executable, "-c", WAITS], cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.communicate(timeout=LIMIT_S)[0] == "ended\n"
        finally:
            child.kill()
