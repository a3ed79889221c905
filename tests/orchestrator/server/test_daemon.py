"""A server process: started once however many ask, found, stopped, replaced when its record is stale."""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from cluster.errors import Conflict, FleetError, UserError
from cluster.host import tokens
from cluster.host.processes import identify, is_alive
from orchestrator.client import client
from orchestrator.home import daemon, server_record
from orchestrator.home.server_record import ServerRecord
from orchestrator.runtime import crash_points

# A server outlives whoever started it: that is its purpose, and what this warning is about.
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
COMMAND = (sys.executable, "-m", "orchestrator.server")


@pytest.fixture
def home(tmp_path):
    home = tmp_path / "home"
    yield home
    daemon.stop_server(home)


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory):
    """The home of `started`: with a token and a log that has grown."""
    home = tmp_path_factory.mktemp("running") / "home"
    daemon.log_path(home).parent.mkdir(parents=True)
    daemon.log_path(home).write_text("old lines")
    (home / "token").write_text("t" * 64)
    for path, mode in ((home, 0o700), (home / "token", 0o600)):
        path.chmod(mode)
    yield home
    daemon.stop_server(home)


@pytest.fixture(scope="module")
def started(shared_home):
    """What four callers got that started the server at once; one server for the tests that only look at it."""
    with ThreadPoolExecutor(4) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(daemon, "LOG_LIMIT_BYTES", 5)
        return list(pool.map(lambda _: start(shared_home), range(4)))


@pytest.fixture
def running(started):
    return started[0]


def start(home, port=0):
    return daemon.start_server(home, port)


def answers(server, token):
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.get(f"{server.url}/v1/version", headers=headers, trust_env=False, timeout=None).json()


def test_a_started_server_answers_from_its_own_folder_and_session(shared_home, running):
    server, home = running, shared_home
    token = tokens.read(home / "token")
    assert answers(server, token)["pid"] == server.pid
    assert daemon.find_server(home) == server
    assert os.getsid(server.pid) == server.pid
    assert Path(f"/proc/{server.pid}/cwd").resolve() == home / "server-cwd"
    assert [(home / name).stat().st_mode & 0o777 for name in ("token", "server.json", ".")] == [0o600, 0o600, 0o700]
    assert token not in (home / "server.json").read_text() + daemon.log_path(home).read_text()


def test_it_listens_on_loopback_only(running):
    listening = Path(f"/proc/{running.pid}/net/tcp").read_text()
    assert f"0100007F:{running.port:04X}" in listening
    assert f"00000000:{running.port:04X}" not in listening


def test_all_who_start_at_once_get_the_one_server(started):
    assert len(started) == 4 and len(set(started)) == 1


def test_a_second_process_by_hand_is_refused(shared_home, running):
    home = shared_home
    second = subprocess.run([*COMMAND, "--home", str(home)], capture_output=True, text=True)
    assert second.returncode != 0
    assert f"a server for {home} is running" in second.stderr
    assert daemon.find_server(home) == running


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(home, number, wait_for):
    server = start(home)
    os.kill(server.pid, number)
    wait_for(lambda: not is_alive(server.process))
    assert not (home / "polyfleet.db-wal").exists()  # the store was closed, not left
    assert not (home / "server.json").exists()
    assert "Traceback" not in daemon.log_path(home).read_text()


def test_shutdown_by_request_ends_it_and_its_streams(home, wait_for):
    server = start(home)
    headers = {"Authorization": f"Bearer {tokens.read(home / 'token')}"}
    with httpx.Client(base_url=server.url, headers=headers, trust_env=False) as client:
        with client.stream("GET", "/v1/changes/stream", params={"after": 1}) as response:
            assert client.post("/v1/shutdown", json={}).status_code == 202
            assert b"event" not in b"".join(response.iter_raw())
        wait_for(lambda: not is_alive(server.process))
    assert not (home / "polyfleet.db-wal").exists()


def test_a_record_of_a_dead_process_is_replaced_and_stop_says_whether_there_was_one(home, wait_for):
    first = start(home)
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(first.process))
    assert (home / "server.json").exists()
    assert daemon.find_server(home) is None
    assert start(home).pid != first.pid
    assert daemon.stop_server(home) is True
    assert daemon.stop_server(home) is False


def test_a_record_whose_pid_is_somebody_else_by_now_is_replaced_and_nobody_is_signalled(home):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        home.mkdir()
        own = identify(bystander.pid)
        server_record.write(home, ServerRecord(own.pid, f"{own.created}0", 1, "0", "2026", str(home / "server.sock")))
        assert daemon.find_server(home) is None
        assert daemon.stop_server(home) is False
        assert start(home).pid != bystander.pid
        assert bystander.poll() is None
        bystander.communicate(b"\n")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"pid": 1}',
        '{"pid": 1, "created": 0, "port": 1, "version": "", "x": 1}',
        '{"pid": 1, "created": "x", "port": 1, "version": "", "started_at": ""}',
        '{"pid": -1, "created": 0, "port": 1, "version": "", "started_at": ""}',
    ],
)
def test_a_damaged_record_counts_as_none(home, text):
    home.mkdir()
    (home / "server.json").write_text(text)
    assert daemon.find_server(home) is None


def test_a_server_whose_record_is_lost_is_named_and_stopped(home, monkeypatch):
    monkeypatch.setattr(daemon, "UNRECORDED_S", 0.0)
    lost = daemon.start_server(home)
    (home / "server.json").unlink()
    with pytest.raises(Conflict, match=rf"runs as process {lost.pid}, but .*server\.json does not contain its address"):
        start(home)
    assert daemon.stop_server(home) is True
    assert not is_alive(lost.process)
    assert start(home).pid != lost.pid


def test_a_port_in_use_is_an_error_with_a_remedy(home):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(
            UserError, match=rf"port {taken.getsockname()[1]} cannot be used: .* in use; choose another"
        ):
            start(home, taken.getsockname()[1])
    assert daemon.find_server(home) is None
    assert not daemon.log_path(home).exists()


def test_a_server_that_dies_at_once_tells_its_last_words_not_older_ones(home):
    daemon.log_path(home).parent.mkdir(parents=True)
    daemon.log_path(home).write_text("error: of last week\n")
    with pytest.raises(FleetError) as caught:
        daemon.start_server(home, command=(sys.executable, "-c", "import sys; sys.exit('error: no room')"))
    assert caught.value.message == "the server did not start: no room"
    assert str(daemon.log_path(home)) in caught.value.remedy


def test_a_log_that_has_grown_is_put_aside(shared_home, running):
    assert (shared_home / "logs" / "server.log.1").read_text() == "old lines"


def test_a_token_that_exists_is_kept(running):
    assert answers(running, "t" * 64)["pid"] == running.pid


def test_a_token_others_may_read_is_refused_with_what_to_do(home):
    home.mkdir()
    (home / "token").write_text("t" * 64)
    (home / "token").chmod(0o644)
    with pytest.raises(UserError, match=r"other users can read the token .*\(mode 0644\); .*remove that file"):
        start(home)
    assert daemon.find_server(home) is None


def test_the_record_is_json_with_the_documented_keys(shared_home, running):
    home = shared_home
    assert set(json.loads((home / "server.json").read_text())) == {
        "pid",
        "created",
        "port",
        "version",
        "started_at",
        "socket",
    }
    assert replace(running) == server_record.read(home)


UPGRADES = """
import logging, os, time
from pathlib import Path
from orchestrator.home import server_record
home = Path(os.environ["POLYFLEET_HOME"])
with server_record.startup_status(home):
    logging.getLogger(server_record.STARTUP_LOGGER).info("bringing the tables up to date")
    while not (home / "go-on").exists():
        time.sleep(0.01)
"""


@pytest.fixture
def upgrading(tmp_path, monkeypatch):
    """Servers tell before they begin that they work on their store, until the home has a file `go-on`."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(UPGRADES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def test_a_server_that_brings_its_store_up_to_date_is_waited_for(home, monkeypatch, upgrading):
    """Also where that takes longer than a start may; whoever waits is told what it does."""
    told, looks, limit_s, look = [], [], daemon.START_TIMEOUT_S, daemon._startup_step

    def looked(home):
        """After ten looks the server goes on."""
        step = look(home)
        if "up to date" in step:
            looks.append(step)
            monkeypatch.setattr(daemon, "START_TIMEOUT_S", 0.0 if len(looks) < 10 else limit_s)
        if len(looks) == 10:
            (home / "go-on").touch()
        return step

    monkeypatch.setattr(daemon, "_startup_step", looked)
    server = daemon.start_server(home, progress=told.append)
    assert len(looks) >= 10
    assert is_alive(server.process) and server_record.read_startup_status(home) is None
    assert told == ["starting the server", "the server is bringing the tables up to date"]


def test_a_server_at_work_on_its_store_outlives_an_interrupted_starter(home, upgrading):
    """Ended, it would begin the same anew the next time; the next caller waits for it."""

    def interrupt(text):
        if "up to date" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        daemon.start_server(home, progress=interrupt)
    process, doing = server_record.read_startup_status(home)
    assert is_alive(process) and doing == "bringing the tables up to date"
    (home / "go-on").touch()
    assert daemon.start_server(home).process == process


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_server_that_ends_as_it_stores_a_submission_has_it_or_not_and_its_key_gives_one_job(
    home, monkeypatch, wait_for, side
):
    def submitted(server):
        headers = {"Authorization": f"Bearer {tokens.read(home / 'token')}", "Idempotency-Key": "the key"}
        body = {"spec": {"task": "run", "command": ["true"]}, "code_archive": ""}
        return httpx.post(f"{server.url}/v1/jobs", json=body, headers=headers, trust_env=False, timeout=None).json()

    monkeypatch.setenv("POLYFLEET_CRASH_AT", f"event:submitted:{side}")
    server = start(home)
    with pytest.raises(httpx.TransportError):
        submitted(server)
    wait_for(lambda: not is_alive(server.process))
    assert crash_points.crash_line(f"event:submitted:{side}") in daemon.log_path(home).read_text()
    monkeypatch.delenv("POLYFLEET_CRASH_AT")
    server = start(home)
    with client.connect(home, start=False) as there:
        stored = [job["id"] for job in there.jobs.list()]
        assert len(stored) == (side == "after")
        job = submitted(server)["id"]
        assert [job] == [job["id"] for job in there.jobs.list()] and stored in ([], [job])
