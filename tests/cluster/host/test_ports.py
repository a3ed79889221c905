"""A port is asked whose it is before anything is sent there."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.errors import FleetError
from cluster.host import ports, tokens

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
LISTENING = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
listening = socket.create_server(("127.0.0.1", int(sys.argv[2])))
print(listening.getsockname()[1], flush=True)
connection, _ = listening.accept()
print(connection.recv(65536), flush=True)
"""
JOINING = """
import sys, time
from cluster.nodes import connect
from cluster.fleet.fleet_record import FleetRecord
record = FleetRecord("f", "up", sys.argv[1], "0", time.time(), sys.argv[2], temp_dir="/tmp/none")
connect.prepare(record)
connect.connect(record)
"""


@pytest.fixture
def foreign() -> Iterator[Callable[[int], tuple[int, subprocess.Popen[str]]]]:
    """Takes a port as another user and prints what it is sent."""
    running: list[subprocess.Popen[str]] = []

    def start(port: int = 0) -> tuple[int, subprocess.Popen[str]]:
        words = [sys.executable, "-I", "-c", LISTENING, str(NOBODY), str(port)]
        child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        running.append(child)
        assert child.stdout is not None
        return int(child.stdout.readline()), child

    yield start
    for child in running:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(
    ("family", "host"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"), (socket.AF_INET6, "::1")],
)
def test_the_owner_of_a_listening_port_is_told_and_nobody_of_another(family: socket.AddressFamily, host: str):
    with socket.create_server((host, 0), family=family) as listening:
        port = listening.getsockname()[1]
        assert ports.listener_uids(port) == {os.geteuid()}
    assert ports.listener_uids(port) == frozenset()


def test_an_established_connection_is_no_listener():
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as s:
        assert ports.listener_uids(s.getsockname()[1]) == frozenset()


@as_root
def test_a_port_that_another_user_took_is_refused(foreign: Callable[..., tuple[int, subprocess.Popen[str]]]):
    port, _ = foreign()
    with pytest.raises(FleetError, match=rf"port {port} is in use by another user \(uid 65534\).*nothing was sent"):
        ports.check_listener(f"127.0.0.1:{port}")


@as_root
def test_the_token_of_ray_is_not_sent_to_who_took_the_port_of_a_fleet_that_died(
    foreign: Callable[..., tuple[int, subprocess.Popen[str]]], tmp_path: Path
):
    port, listener = foreign()
    token = tokens.create_token(tmp_path / "ray-token")
    words = [sys.executable, "-c", JOINING, f"127.0.0.1:{port}", str(token)]
    joined = subprocess.run(words, capture_output=True, text=True)
    assert listener.stdout is not None
    listener.terminate()
    assert listener.stdout.read() == ""
    assert "is in use by another user" in joined.stderr
