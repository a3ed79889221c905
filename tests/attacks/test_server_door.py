"""Who takes the place of a dead server, or holds connections to a living one, gets nothing and stops nobody."""

import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import pytest
import uvicorn
from patience import LIMIT_S, sufficient_limit, wait_for

from cluster.errors import FleetError
from cluster.host import tokens
from cluster.host.processes import is_alive
from orchestrator.client import client as http
from orchestrator.client import server_connection
from orchestrator.home import daemon, server_authentication
from orchestrator.home.server_record import ServerRecord
from orchestrator.server import connection_limits
from orchestrator.server.app import make_app
from orchestrator.server.connection_limits import MAX_UNAUTHENTICATED
from orchestrator.server.http import streams
from orchestrator.server.serve import listener, server_config

# A server outlives whoever started it: that is its purpose, and what this warning is about.
pytestmark = [
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"),
]
NOBODY = 65534
LIMITS_S = (0.5, 4.0, 16.0)
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
TAKING = """
import os, socket, sys, threading, time
uid, port, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if uid: os.setuid(uid)
def told(listening):
    while True:
        connection, _ = listening.accept()
        print("came", flush=True)
        while data := connection.recv(65536):
            print(data, flush=True)
def taken():
    # A killed process of several threads looks dead a moment before the last of them lets go of the port.
    for _ in range(500):
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            time.sleep(0.02)
    return socket.create_server(("127.0.0.1", port))
tcp = taken()
threading.Thread(target=told, args=(tcp,)).start()
unix = socket.socket(socket.AF_UNIX)
try:
    os.path.exists(path) and os.unlink(path)
    unix.bind(path)
    unix.listen()
    threading.Thread(target=told, args=(unix,)).start()
    print("took both", flush=True)
except OSError as e:
    print("took the port,", e.strerror, flush=True)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    home = tmp_path / "home"
    monkeypatch.setenv("POLYFLEET_HOME", str(home))
    yield home
    daemon.stop_server(home)


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The home of `running`."""
    home = tmp_path_factory.mktemp("shared") / "home"
    yield home
    daemon.stop_server(home)


@pytest.fixture(scope="module")
def running(shared_home: Path) -> ServerRecord:
    """One server for the tests after which it serves as before."""
    return daemon.start_server(shared_home, 0)


@pytest.fixture
def rogue() -> Iterator[Callable[[int, int, Path], subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []

    def start(uid: int, port: int, path: Path) -> subprocess.Popen[str]:
        words = [sys.executable, "-I", "-c", TAKING, str(uid), str(port), str(path)]
        running.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return running[-1]

    yield start
    for child in running:
        if child.returncode is None:
            said(child)


def said(child: subprocess.Popen[str]) -> str:
    """All it was sent."""
    child.kill()
    return child.communicate()[0]


def killed(server: ServerRecord, wait_until: Callable[[Callable[[], bool]], None]) -> None:
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(server.process))


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    return wait_for


@as_root
def test_another_user_who_takes_the_place_of_a_killed_server_is_sent_nothing(home, rogue, wait_until, monkeypatch):
    monkeypatch.setattr(server_connection, "RECONNECT_S", 0.5)
    server = daemon.start_server(home, 0)
    token = tokens.read(home / "token")
    with http.connect(home, start=False) as cli, http.Client(server.url, token) as by_port:
        assert cli.jobs.list() == by_port.jobs.list() == []
        killed(server, wait_until)
        thief = rogue(NOBODY, server.port, home / "server.sock")
        assert thief.stdout is not None
        assert thief.stdout.readline() == "took the port, Permission denied\n"
        with pytest.raises(FleetError, match="cannot be reached"):
            cli.wait("hello")
        with pytest.raises(FleetError, match="belongs to another user; nothing was sent"):
            by_port.jobs.list()
    assert said(thief) == "came\n"


def test_who_listens_on_the_port_without_knowing_the_token_is_not_sent_it(home, rogue, wait_until, monkeypatch):
    """As where the system does not tell the user of a port."""
    server = daemon.start_server(home, 0)
    token = tokens.read(home / "token")
    with http.Client(server.url, token) as by_port:
        assert by_port.jobs.list() == []
        killed(server, wait_until)
        thief = rogue(0, server.port, home / "elsewhere.sock")
        assert thief.stdout is not None
        assert thief.stdout.readline() == "took both\n"
        monkeypatch.setattr(server_authentication, "TIMEOUT_S", 0.5)
        with pytest.raises(FleetError, match="did not respond in time"):
            by_port.jobs.list()
    heard = said(thief)
    assert "GET /healthz?challenge=" in heard
    assert token not in heard and "uthorization" not in heard


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """That every user may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@as_root
def test_another_user_gets_no_answer_on_the_socket_even_where_its_folder_was_opened(open_folder):
    home = open_folder / "home"
    server = daemon.start_server(home)
    asking = f"""
import os, socket
os.setuid({NOBODY})
s = socket.socket(socket.AF_UNIX)
s.settimeout({LIMIT_S})
s.connect({server.socket!r})
try:
    s.sendall(b"GET /healthz HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    print(s.recv(100))
except OSError as e:
    print(b"")
"""
    home.chmod(0o755)
    Path(server.socket).chmod(0o666)
    told = subprocess.run([sys.executable, "-I", "-c", asking], capture_output=True, text=True)
    assert told.stdout == "b''\n", told.stderr
    with pytest.raises(FleetError, match=r"other users can access the folder .* \(owner uid 0, mode 0755\)"):
        http.connect(home, start=False)
    daemon.stop_server(home)


def test_a_new_server_has_a_new_token_and_clients_of_the_old_one_go_on(home):
    daemon.start_server(home)
    old = tokens.read(home / "token")
    with http.connect(home, start=False) as first, http.connect(home, start=False) as second:
        assert first.jobs.list() == second.jobs.list() == []
        daemon.stop_server(home)
        server = daemon.start_server(home, 0)
        assert tokens.read(home / "token") != old
        assert first.jobs.list() == second.jobs.list() == []
    answer = httpx.get(f"{server.url}/v1/jobs", headers={"Authorization": f"Bearer {old}"}, trust_env=False)
    assert answer.status_code == 401


def test_a_server_in_a_folder_with_a_long_name_is_reached(tmp_path, monkeypatch):
    home = tmp_path / ("long-" * 30) / "home"
    server = daemon.start_server(home)
    try:
        assert server.socket == str(home / "server.sock")
        with http.connect(home, start=False) as client:
            assert client.jobs.list() == []
    finally:
        daemon.stop_server(home)
    assert not (home / "server.sock").exists()


def test_a_proof_is_bound_to_its_port(shared_home, running):
    """What listens elsewhere cannot hand on the answer of the real server."""
    server, home = running, shared_home
    with socket.create_server(("127.0.0.1", 0)) as relay:
        port = relay.getsockname()[1]

        def hand_on() -> None:
            near, _ = relay.accept()
            with near, socket.create_connection(("127.0.0.1", server.port)) as far:
                asked = near.recv(65536).replace(str(port).encode(), str(server.port).encode())
                far.sendall(asked)
                near.sendall(far.recv(65536))

        thread = threading.Thread(target=hand_on)
        thread.start()
        with (
            http.Client(f"http://127.0.0.1:{port}", tokens.read(home / "token")) as client,
            pytest.raises(FleetError, match="did not prove that it has the token"),
        ):
            client.jobs.list()
        thread.join(LIMIT_S)


def test_hundreds_of_idle_connections_leave_the_client_its_place(shared_home, running, wait_until):
    server, home = running, shared_home
    with http.connect(home, start=False) as client, ExitStack() as held:
        for _ in range(600):
            held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        assert client.jobs.list() == []
        with http.Client(server.url, tokens.read(home / "token")) as late:
            assert late.jobs.list() == []
        wait_until(lambda: len(psutil.Process(server.pid).net_connections("tcp")) <= MAX_UNAUTHENTICATED + 2)


def test_without_free_files_the_log_stays_short_and_the_server_comes_back(home, wait_until):
    server = daemon.start_server(home, 0)
    log = daemon.log_path(home)
    before = log.stat().st_size
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (60, 4096))
    with ExitStack() as held:
        for _ in range(200):
            held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        wait_until(lambda: "out of system resource" in log.read_text())
    with http.connect(home, start=False) as client:
        assert client.jobs.list() == []
    assert log.stat().st_size - before < 20_000
    assert len(re.findall("out of system resource", log.read_text())) <= 3


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """A server in a thread of this process, whose times a test may shorten."""
    app = make_app(None, "t" * 64, home=tmp_path)  # type: ignore[arg-type]  # nothing here reaches the service
    with listener(0) as listening:
        server = uvicorn.Server(server_config(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join(LIMIT_S)


def dribbled(port: int, first: bytes, piece: bytes) -> int:
    """Sends a piece ten times a second until the server has enough; how many it took."""
    with socket.create_connection(("127.0.0.1", port)) as s:
        s.sendall(first)
        s.settimeout(0.1)
        for number in range(int(LIMIT_S * 10)):
            try:
                s.sendall(piece)
                if s.recv(65536) == b"":
                    return number
            except TimeoutError:
                continue
            except OSError:
                return number
    raise AssertionError("the server took all of it")


@pytest.fixture
def pieces_taken(port: int, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """How many pieces the server takes, with the shortest of some values of a limit for which it is more than one."""

    def count(first: bytes, piece: bytes, limit: str = "HEAD_S") -> int:
        def dribble(limit_s: float) -> int:
            monkeypatch.setattr(connection_limits, limit, limit_s)
            return dribbled(port, first, piece)

        return sufficient_limit(dribble, lambda number: number > 1, LIMITS_S)[1]

    return count


def test_a_head_that_never_ends_is_cut_off(pieces_taken):
    assert pieces_taken(b"GET /healthz HTTP/1.1\r\n", b"X: y\r\n") > 1


def test_the_second_head_of_a_connection_is_cut_off_too(pieces_taken, port):
    host = f"Host: 127.0.0.1:{port}\r\n".encode()
    assert pieces_taken(b"GET /healthz HTTP/1.1\r\n" + host + b"\r\nGET /healthz HTTP/1.1\r\n", b"X: y\r\n") > 1


def test_a_connection_that_says_nothing_is_closed(port, monkeypatch):
    monkeypatch.setattr(connection_limits, "HEAD_S", 0.3)
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as s:
        assert s.recv(1) == b""


def test_empty_lines_do_not_keep_a_connection(pieces_taken, port):
    assert pieces_taken(b"\r\n", b"\r\n") > 1
    host = f"Host: 127.0.0.1:{port}\r\n".encode()
    assert pieces_taken(b"GET /healthz HTTP/1.1\r\n" + host + b"\r\n", b"\r\n") > 1


CHUNKED = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "first",
    [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n", CHUNKED + b"0\r\nX: ", CHUNKED + b"1;"],
    ids=["url", "one line", "many lines", "trailer", "chunk extension"],
)
def test_a_head_without_an_end_is_not_kept(port, first):
    piece = b"X: y\r\n" * 1000 if first.endswith(b"1.1\r\n") else b"y" * 6000
    sent = 0
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as s, suppress(ConnectionError):
        s.sendall(first)
        while sent < 100 * connection_limits.MAX_HEADER_BYTES and not select.select([s], [], [], 0)[0]:
            sent += s.send(piece)
    assert sent < 100 * connection_limits.MAX_HEADER_BYTES


@pytest.mark.parametrize(("count", "is_served"), [(8, True), (1500, False)])
def test_of_requests_sent_without_waiting_for_answers_only_a_few_are_kept(port, count, is_served):
    """Each answer lets the server read on: what waited grew faster than it was answered."""
    request, answers = f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode(), b""
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as s, suppress(ConnectionError):
        s.sendall(request * count)
        while answers.count(b"HTTP/1.1 200") < count and (more := s.recv(1 << 16)):
            answers += more
    assert (answers.count(b"HTTP/1.1 200") == count) is is_served


def test_a_body_that_comes_a_byte_at_a_time_is_cut_off(pieces_taken, port):
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {'t' * 64}\r\n"
        "Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    )
    assert pieces_taken(head.encode(), b" ", "BODY_S") > 1


def test_idle_streams_hold_no_threads_and_do_not_keep_others_waiting(shared_home, running):
    server, home = running, shared_home
    with http.connect(home, start=False) as client, ExitStack() as held:
        transport = httpx.HTTPTransport(uds=server.socket, limits=httpx.Limits(max_connections=None))
        headers = {"Authorization": f"Bearer {tokens.read(home / 'token')}"}
        many = held.enter_context(httpx.Client(transport=transport, headers=headers, base_url="http://localhost"))
        for _ in range(300):
            held.enter_context(many.stream("GET", "/v1/changes/stream", params={"after": 1}))
        assert client.changes.wait(after=1, timeout_s=0.1) == {"events": [], "last": 1}
        assert client.jobs.list() == []
        assert psutil.Process(server.pid).num_threads() < 64


def test_one_stream_too_many_is_refused_with_when_to_come_back(home, monkeypatch):
    server = daemon.start_server(home)
    with ExitStack() as held:
        transport = httpx.HTTPTransport(uds=server.socket, limits=httpx.Limits(max_connections=None))
        headers = {"Authorization": f"Bearer {tokens.read(home / 'token')}"}
        many = held.enter_context(httpx.Client(transport=transport, headers=headers, base_url="http://localhost"))
        for _ in range(streams.MAX_STREAMS):
            held.enter_context(many.stream("GET", "/v1/changes/stream", params={"after": 1}))
        refused = many.get("/v1/changes/stream")
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "10")
        assert refused.json()["error"]["message"] == "the server has its maximum of 512 streams open"
        assert many.get("/v1/jobs").status_code == 200
