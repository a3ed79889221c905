"""Whoever sits behind a benchmark session's address: the agent that asks is answered in time, or gives up."""

import json
import os
import socket
import threading
import time

import pytest
from patience import LIMIT_S

from cluster.errors import FleetError, UserError
from workers.benchmark.session_server import ADDRESS, request, serve


@pytest.fixture
def served(tmp_path):
    """A session that answers {"do": "wait"} once `go` is set, and anything else at once with what it was asked."""
    go, said = threading.Event(), []

    def handle(message):
        if message["do"] == "wait":
            assert go.wait(LIMIT_S)
        return message

    serving = threading.Thread(target=lambda: said.append(serve(tmp_path, handle, lambda: False)), daemon=True)
    serving.start()
    while not (tmp_path / ADDRESS).exists():
        serving.join(0.01)
    yield go
    assert request(tmp_path, {"do": "describe"}, LIMIT_S) == {"do": "describe"}
    request(tmp_path, {"do": "end"}, LIMIT_S)
    serving.join(LIMIT_S)
    assert said == ["ended"]


def connected(folder):
    asking = socket.socket(socket.AF_UNIX)
    asking.connect(json.loads((folder / ADDRESS).read_text())["socket"])
    return asking


def test_a_session_whose_asker_is_killed_amid_a_call_answers_the_next_one(tmp_path, served):
    with connected(tmp_path) as asking:
        asking.sendall(b'{"do": "wait"}\n')
    served.set()


@pytest.mark.parametrize("said", [b"", b'{"do": "wa', b"[1]\n", b"7\n", b"\xff\n", b'{"x": 1}', b"[" * 100_000 + b"\n"])
def test_a_session_that_is_asked_for_nothing_it_can_read_answers_the_next_one(tmp_path, served, said):
    with connected(tmp_path) as asking:
        asking.sendall(said)
        asking.shutdown(socket.SHUT_WR)
        asking.settimeout(LIMIT_S)
        assert asking.recv(1 << 16) == b""


@pytest.fixture
def answering(tmp_path):
    """answering(talk): whoever connects is given to `talk`. Returns nothing; the address is in tmp_path."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "s"))
    listening.listen()
    done = threading.Event()

    def begin(talk):
        def serve():
            asking, _ = listening.accept()
            with asking:
                try:
                    asking.recv(1000)
                    talk(asking, done)
                except OSError:
                    return

        (tmp_path / ADDRESS).write_text(json.dumps({"socket": str(tmp_path / "s")}))
        threading.Thread(target=serve, daemon=True).start()

    yield begin
    done.set()
    listening.close()


def asked(folder, timeout_s=0.5):
    """What asking raises, within the hang limit."""
    found = []

    def run():
        try:
            found.append(request(folder, {"do": "describe"}, timeout_s))
        except Exception as e:
            found.append(e)

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(LIMIT_S)
    assert found, f"asking hung for {LIMIT_S:.0f} s"
    return found[0]


@pytest.mark.parametrize(
    "put",
    [
        os.mkfifo,
        os.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text('{"socket": 7}'),
        lambda path: path.write_text('{"socket": "/etc/passwd"}'),
        lambda path: path.write_text(json.dumps({"socket": "a\0b"})),
        lambda path: path.write_text(json.dumps({"socket": "/x" * 500})),
        lambda path: path.write_text(json.dumps({"socket": "x" * 9000})),
    ],
)
def test_an_address_that_is_none_is_an_answer_that_does_not_come(tmp_path, put):
    put(tmp_path / ADDRESS)
    assert isinstance(asked(tmp_path), FleetError)


def drip(asking, done):
    while not done.is_set():
        asking.sendall(b" ")
        time.sleep(0.02)


def flood(asking, done):
    while not done.is_set():
        asking.sendall(b"x" * (1 << 20))


@pytest.mark.parametrize(
    ("talk", "why"),
    [
        (lambda asking, done: done.wait(LIMIT_S), "timed out"),
        (drip, "timed out"),
        (flood, "is longer than|timed out"),
        (lambda asking, done: None, "ended during a request"),
        (lambda asking, done: asking.sendall(b"[" * 100_000 + b"\n"), "is nested"),
        (lambda asking, done: asking.sendall(b'{"result": NaN}\n'), "not a number"),
        (lambda asking, done: asking.sendall(b"[]\n"), "neither a result nor an error"),
    ],
)
def test_an_answer_is_bounded_in_time_size_and_depth(tmp_path, answering, talk, why):
    answering(talk)
    error = asked(tmp_path)
    assert isinstance(error, FleetError)
    assert any(part in error.message for part in why.split("|"))


def test_an_error_of_any_shape_is_told_as_text(tmp_path, answering):
    answering(lambda asking, done: asking.sendall(b'{"error": {"a": 1}}\n'))
    error = asked(tmp_path)
    assert isinstance(error, UserError)
    assert error.message == "{'a': 1}"
