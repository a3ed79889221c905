"""Commands beside jobs of a real fleet: over the server, Ray and the node's agent, into the attempt's process tree."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from patience import LIMIT_S

from orchestrator import Orchestrator, RunJob

pytestmark = pytest.mark.full

COMMAND = str(Path(sys.executable).with_name("polyfleet"))
IDLE = "while :; do sleep 0.2; done"


@pytest.fixture
def gang(fleet: Orchestrator, until):
    """A job of one rank on each of two nodes."""
    job = fleet.submit(RunJob(command=IDLE, env={"MINE": "yes"}, resources={"pool": "left", "nodes": 2}))
    until(lambda: job.state == "RUNNING")
    return job


def commands(*words: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == list(words)]


def test_a_command_runs_beside_the_rank_it_names_on_that_ranks_node(gang, cli):
    nodes = {}
    for rank in (0, 1):
        line = "echo $MINE $POLYFLEET_ATTEMPT; pwd; exit 4"
        done = cli("exec", gang.id, "--rank", str(rank), "--", "sh", "-c", line)
        said, where = done.stdout.splitlines()
        assert (done.returncode, said) == (4, f"yes {gang.id}.1"), done
        nodes[rank] = Path(where).parts[-5]
        assert where.endswith(f"/{gang.id}.1.{rank}/work/{rank}")
    assert sorted(nodes.values()) == ["left-0", "left-1"]
    assert nodes[0] == gang.view["nodes"][0]
    refused = cli("exec", gang.id, "--rank", "2", "--", "true")
    assert (refused.returncode, "its ranks are 0 to 1" in refused.stderr) == (2, True)


def test_it_is_of_the_attempts_tree_and_sees_nothing_of_the_agents(gang, cli, home: Path):
    done = cli(
        "exec", gang.id, "--", "sh", "-c", "env; cat /proc/$PPID/environ | tr '\\0' '\\n'; cat /proc/$PPID/cmdline"
    )
    assert f"workers.attempt\0{home}/nodes" in done.stdout
    tokens = [path.read_text().strip() for path in (home / "token", *home.glob("ray-token-*"))]
    assert not [t for t in tokens if t in done.stdout]
    assert not [line for line in done.stdout.splitlines() if line.startswith(("RAY_", "POLYFLEET_HOME"))]


def test_a_client_that_is_killed_takes_its_command_along_and_the_job_runs_on(gang, until, cli):
    child = subprocess.Popen([COMMAND, "exec", gang.id, "--", "sleep", "391"], stdin=subprocess.DEVNULL)
    until(lambda: commands("sleep", "391"))
    child.kill()
    child.wait()
    until(lambda: not commands("sleep", "391"))
    assert (gang.state, cli("exec", gang.id, "--", "echo", "again").stdout) == ("RUNNING", "again\n")


def test_commands_end_when_the_server_is_killed_and_the_job_runs_on(gang, until, home: Path, cli):
    child = subprocess.Popen(
        [COMMAND, "exec", gang.id, "--", "sleep", "392"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    until(lambda: commands("sleep", "392"))
    psutil.Process(json.loads((home / "server.json").read_text())["pid"]).kill()
    assert (child.wait(LIMIT_S), b"the server" in child.stderr.read()) == (3, True)
    child.stderr.close()
    until(lambda: not commands("sleep", "392"))
    with Orchestrator.connect() as again:
        until(lambda: again.job(gang.id).state == "RUNNING")


def test_a_shell_ends_with_its_job_and_leaves_nothing(gang, until, at_a_terminal, processes_of):
    shell = at_a_terminal([COMMAND, "shell", gang.id, "--rank", "1"])
    shell.shows(b"rank 1 on node left-")
    shell.type(b"echo in $POLYFLEET_JOB at $((20 + 22)); (trap '' HUP TERM; exec setsid sleep 393) &\n")
    shell.shows(f"in {gang.id} at 42".encode())
    until(lambda: commands("sleep", "393"))
    gang.cancel()
    assert shell.code() == 3
    assert b"was stopped: the attempt has ended" in shell.seen
    until(lambda: not commands("sleep", "393") and not processes_of(gang.id))


def test_when_the_agent_is_killed_its_commands_end_and_the_next_one_takes_others(gang, until, cli, agent_of):
    child = subprocess.Popen(
        [COMMAND, "exec", gang.id, "--", "sleep", "394"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    until(lambda: commands("sleep", "394"))
    agent_of(gang.view["nodes"][0]).send_signal(signal.SIGKILL)
    assert child.wait(LIMIT_S) == 3
    child.stderr.close()
    until(lambda: not commands("sleep", "394"))
    until(lambda: cli("exec", gang.id, "--", "true").returncode == 0)
    assert gang.state == "RUNNING"
