"""A Ray cluster that is not ours: used with its token, and left as it was."""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.environments import code_export
from cluster.host import tokens
from cluster.host.processes import free_port, is_alive, start_detached, stop
from cluster.nodes.ray_node import head_command, node_environment
from orchestrator import Orchestrator, RunJob

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("theirs")


@pytest.fixture(scope="module")
def somebodys_ray(theirs: Path) -> Iterator[tuple[str, Path]]:
    """Address and token of a one-node cluster with two CPUs, on loopback; it has our package, as its nodes must."""
    token, port = tokens.create_token(theirs / "their-token"), free_port()
    ports = {"autoscaler": free_port(), "dashboard": free_port()}
    with tempfile.TemporaryDirectory(prefix="pf-t-", dir="/tmp", ignore_cleanup_errors=True) as temp:
        command = [c for c in head_command(Path(sys.executable), port, Path(temp)) if not c.startswith("--labels")]
        command[command.index("--num-cpus=0")] = "--num-cpus=2"
        env = node_environment(token, code_export.export(), ports, {"POLYFLEET_HOME": str(theirs)})
        log = theirs / "ray.log"
        head = start_detached(command, env=env, cwd=theirs, log=log)
        while b"Ray runtime started" not in log.read_bytes():
            assert is_alive(head), log.read_text()
            time.sleep(0.05)
        yield f"127.0.0.1:{port}", token
        stop([head])


def test_a_foreign_cluster_serves_jobs_and_keeps_nothing_of_ours(
    somebodys_ray, theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until
):
    address, token = somebodys_ray
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    with Orchestrator.up(address=address) as o:
        assert [n["state"] for n in o.inventory()] == ["ready"]
        job = o.submit(RunJob(command="echo here"))
        assert str(job.wait().logs()) == "here"
        sleeping = o.submit(RunJob(command="sleep 300"))
        until(lambda: sleeping.state == "RUNNING")
        o.down()

    def ours() -> list[str]:
        lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
        return [line for line in lines if str(theirs / "fleets") in line or str(tmp_path / "home") in line]

    until(lambda: not ours())


def test_two_fleets_of_one_cluster_do_not_touch_each_other(
    somebodys_ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until
):
    address, token = somebodys_ray
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))

    def home(name: str) -> None:
        monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / name))

    home("first")
    with Orchestrator.up(address=address) as first:
        running = first.submit(RunJob(command="sleep 300"))
        until(lambda: running.state == "RUNNING")
        home("second")
        with Orchestrator.up(address=address) as second:
            assert [n["state"] for n in second.inventory()] == ["ready"]
            waiting = second.submit(RunJob(command="echo here"))
            until(lambda: "another program of this Ray cluster use" in json.dumps(waiting.view))
            assert not [f for f in second.fleet.doctor() if f["subject"] in ("store", "allocation")]
            assert (running.state, running.view["attempt"]) == ("RUNNING", 1)
            running.cancel()
            assert str(waiting.wait().logs()) == "here"
            second.down()
        home("first")
        again = first.submit(RunJob(command="echo still here"))
        assert str(again.wait().logs()) == "still here"
        assert not [f for f in first.fleet.doctor() if f["subject"] in ("store", "allocation")]
        first.down()
