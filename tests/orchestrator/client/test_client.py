"""The client finds the right server, says what went wrong, and gives errors back as the classes they were."""

import hashlib
import json
import os
import socket
import threading
import zipfile

import pytest
from patience import LIMIT_S

from cluster.errors import Conflict, FleetError, NotFound, PolyfleetError, SpecError, UserError
from cluster.host.processes import identify
from orchestrator.cli.jobs import logs
from orchestrator.client import client as http
from orchestrator.client import server_connection
from orchestrator.client.transport import error_from
from orchestrator.home import server_record
from orchestrator.home.server_record import ServerRecord
from orchestrator.store.events.unit_of_work import make_metrics_row

RUN = {"task": "run", "command": "true", "name": "hello"}


@pytest.fixture
def client(live):
    with http.connect(start=False) as client:
        yield client


def test_it_finds_the_server_of_its_home(client, live):
    assert client.url == live.address
    assert client.server.version()["home"] == str(live.home)


def test_without_a_server_and_without_starting_one_it_says_so(tmp_path):
    with pytest.raises(FleetError, match=r"no server is running; .*polyfleet server start"):
        http.connect(tmp_path, start=False)


def test_a_client_that_was_closed_says_so(live):
    """`polyfleet exec` sends input from a second thread, which may go on when the command has ended."""
    with http.connect(start=False) as client:
        pass
    with pytest.raises(FleetError, match="this client is closed"):
        client.fleet.show()


def test_a_server_of_another_version_is_named_with_the_remedy(live):
    own = identify(os.getpid())
    server_record.write(live.home, ServerRecord(own.pid, own.created, live.port, "9.9.9", "2026", str(live.socket)))
    with pytest.raises(UserError, match=r"has version 9\.9\.9, this command has version .*polyfleet server stop"):
        http.connect(start=False)


def test_a_wrong_token_is_told_at_once(live):
    (live.home / "token").write_text("0" * 64)
    with http.connect(start=False) as client, pytest.raises(UserError, match="does not know the token of this home"):
        client.fleet.show()


def test_every_verb_reaches_its_route(client, live, checkpoint):
    job = client.jobs.submit(RUN, key="k")
    assert client.jobs.submit(RUN, key="k")["id"] == job["id"]
    job = client.wait(job["id"])
    assert client.jobs.list(state=["SUCCEEDED"], limit=5) == [job]
    assert client.jobs.list(state=["FAILED"]) == []
    assert client.jobs.show("hello") == job
    assert client.jobs.plan(RUN)["would_start"]["candidate"] == 1
    assert [offer["chosen"] for offer in client.jobs.offers(RUN)["offers"]].count(True) == 1
    assert client.jobs.explain("hello")["state"] == "SUCCEEDED"
    then = client.jobs.explain("hello", changes=["pool cpu down", "+2 cpu"])
    assert then["if"] == {"changes": ["pool cpu is down", "2 more cpu on one node"], "others": []}
    with pytest.raises(UserError, match="if: no pool is called 'cpux'; did you mean 'cpu'"):
        client.jobs.explain("hello", changes=["pool cpux down"])
    assert client.jobs.history("hello")[0]["event"] == "submitted"
    metrics = {"step": 1, "of": 9, "loss": float("nan"), "time": 2, "seq": 3}
    live.service.store.metrics.queue(make_metrics_row(job["id"], 1, 1, 1.0, metrics))
    # durable after the report, so that is there too
    client.jobs.cancel(client.jobs.submit({**RUN, "name": "next"})["id"])
    (told,) = client.jobs.reports("hello")
    assert told == {"seq": 1, "attempt": 1, "step": 1, "of": 9, "reported_at": "1970-01-01T00:00:01.000+00:00",
                    "metrics": {"loss": "NaN", "time": 2, "seq": 3}}  # fmt: skip
    assert [pool["pool"] for pool in client.fleet.show()["pools"]] == ["cpu", "ipex", "xla"]
    assert [node["node"] for node in client.nodes.list()] == ["cpu-0", "ipex-0", "xla-0"]
    assert client.fleet.doctor() == []
    assert client.schema.show("job")["type"] == "object"
    assert client.changes.wait(after=0)["events"][0]["event"] == "submitted"
    assert next(client.changes.follow(after=0))["event"] == "submitted"
    assert client.checkpoints.list(pool="cpu", prefix="digits")[0]["path"] == "digits/step-00000012-adeb0f13"
    assert client.checkpoints.show(checkpoint)["step"] == 12
    assert client.checkpoints.plan(checkpoint, "tpu:v5e")["target"]["backend"] == "tpu"
    assert client.checkpoints.verify(checkpoint)["ok"] is True
    assert client.jobs.cancel("hello")["state"] == "SUCCEEDED"
    assert client.server.shutdown() == {"stopping": True}


def test_the_newest_jobs_come_last(client):
    ids = [client.jobs.submit({**RUN, "name": f"n{number}"})["id"] for number in range(4)]
    assert [job["id"] for job in client.jobs.list()] == ids
    assert [job["id"] for job in client.jobs.list(limit=2)] == ids[-2:]


def test_logs_are_paged_followed_and_filtered(client, live):
    job = live.ran(RUN)
    lines = ["one", "a\u2028b\x85c", "\u0000three"]
    live.fleet.printed(job["id"], lines)
    page = client.jobs.logs("hello", rank=0, attempt=1)
    assert [(line["text"], line["stream"]) for line in page["lines"]] == [(text, "stdout") for text in lines]
    assert (
        client.jobs.logs("hello", cursor={"1.0": len(f"{page['lines'][0]['time']} out one\n")})["lines"]
        == page["lines"][1:]
    )
    rest = {"job": job["id"], "lines": [], "cursor": page["cursor"], "ended": True, "away": []}
    assert client.jobs.logs("hello", cursor=page["cursor"]) == rest
    assert client.jobs.logs("hello", rank=1)["lines"] == []
    assert [line["text"] for page in client.jobs.follow("hello") for line in page["lines"]] == lines


def test_a_package_is_uploaded_only_when_the_server_lacks_it(client, live, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as made:
        made.writestr("train.py", "def train(ctx): ...")
    sha = hashlib.sha256((tmp_path / "a.zip").read_bytes()).hexdigest()
    client.upload_code_archive(sha, tmp_path / "a.zip")
    assert live.service.code_archives.is_stored(sha)
    client.upload_code_archive(sha, tmp_path / "absent.zip")


def test_a_copy_gives_progress_and_report_or_its_error(client, live, checkpoint):
    told = []
    report = client.checkpoints.copy(checkpoint, "xla:b", progress=lambda *n: told.append(n))
    assert report["target"] == "xla:b/step-00000012-adeb0f13"
    assert told[-1] == (report["bytes"], report["bytes"])
    with pytest.raises(NotFound, match="no checkpoint at cpu:absent"):
        client.checkpoints.copy("cpu:absent", "xla:b")


def test_waiting_ends_with_the_job_or_with_the_time(client, talking):
    job = client.jobs.submit(talking.spec)
    with pytest.raises(FleetError, match=rf"{job['id']} is still [A-Z]+ after 0 s"):
        client.wait(job["id"], timeout_s=0)
    seen = []

    def end_it(view):
        if view["state"] == "RUNNING" and "RUNNING" not in seen:
            talking.end()
        seen.append(view["state"])

    assert client.wait(job["id"], on_update=end_it)["state"] == "SUCCEEDED"
    assert seen[-1] == "SUCCEEDED" and "RUNNING" in seen


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda c: c.jobs.show("absent"), NotFound, "no job 'absent'"),
        (lambda c: c.jobs.show(".."), NotFound, "'..' is not a valid name"),
        (lambda c: c.jobs.show(""), NotFound, "'' is not a valid name"),
        (lambda c: c.jobs.show("a/../../v1/version"), NotFound, "'a/../../v1/version' is not a valid name"),
        (lambda c: c.jobs.show("a?b#c"), NotFound, "no job 'a?b#c'"),
        (lambda c: list(c.jobs.follow("absent")), NotFound, "no job 'absent'"),
        (lambda c: c.checkpoints.show("cpu:x"), NotFound, "no checkpoint at cpu:x"),
        (lambda c: c.checkpoints.show("nowhere:x"), SpecError, "no pool 'nowhere'"),
        (lambda c: c.jobs.submit({"broken": 1}), SpecError, "unknown key"),
    ],
)
def test_an_error_keeps_its_class_and_words(client, call, kind, text):
    with pytest.raises(kind) as caught:
        call(client)
    assert text in caught.value.message


def test_a_fault_of_the_server_is_told_as_such(client, live, monkeypatch):
    monkeypatch.setattr(live.service.readiness, "wait_until_ready", lambda: {}["absent"])
    with pytest.raises(PolyfleetError, match="the server failed: KeyError: 'absent'"):
        client.nodes.list()


def test_an_error_of_a_field_keeps_the_field(client):
    with pytest.raises(SpecError) as caught:
        client.jobs.submit({**RUN, "resources": {"accelerators": "tpu:v5p"}})
    assert caught.value.field == "resources"
    assert str(caught.value).startswith("resources: no pool has tpu:v5p; kinds here: cpu, cpu:ipex, tpu:emulated; ")


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (409, b'{"error": {"type": "Conflict", "message": "m", "remedy": "r"}}', Conflict),
        (422, b'{"error": {"type": "CheckpointError", "message": "m", "remedy": "r"}}', UserError),
        (503, b'{"error": {"type": "NewOne", "message": "m", "remedy": "r"}}', FleetError),
        (502, b"<html>", PolyfleetError),
        (404, b"[]", NotFound),
        (418, b'{"error": "tea"}', UserError),
    ],
)
def test_an_error_of_an_unknown_kind_is_the_nearest_we_know(status, body, kind):
    assert type(error_from(status, body)) is kind


def test_a_server_whose_socket_is_gone_is_named(tmp_path):
    with pytest.raises(FleetError, match=r"absent/server.sock cannot be reached: No such file"):
        http.Client(f"unix:{tmp_path}/absent/server.sock", "t")
    with (
        http.Client(f"unix:{tmp_path}/server.sock", "t") as client,
        pytest.raises(FleetError, match=r"server.sock cannot be reached"),
    ):
        client.fleet.show()


def test_a_server_whose_port_is_free_is_named():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with (
        http.Client(f"http://127.0.0.1:{port}", "t") as client,
        pytest.raises(FleetError, match=f"{port} cannot be reached"),
    ):
        client.fleet.show()


@pytest.fixture
def hanging_up(tmp_path):
    """A listener that reads a request and then closes: what a server killed in the middle looks like."""
    (tmp_path / "s").mkdir(mode=0o700)
    path = tmp_path / "s" / "socket"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()

    def serve(answers):
        with listening:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

    threads = []

    def start(answers):
        threads.append(threading.Thread(target=serve, args=(answers,), daemon=True))
        threads[0].start()
        return f"unix:{path}"

    yield start
    for thread in threads:
        thread.join(LIMIT_S)


def test_a_submission_whose_answer_is_lost_is_sent_again_with_the_same_key(hanging_up):
    created = b'HTTP/1.1 201 Created\r\nContent-Length: 11\r\nConnection: close\r\n\r\n{"id": "x"}'
    address = hanging_up([b"", created])
    with http.Client(address, "t") as client:
        assert client.jobs.submit(RUN) == {"id": "x"}


def test_a_stream_that_breaks_is_an_error_of_the_fleet(hanging_up):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    address = hanging_up([head])
    with http.Client(address, "t") as client, pytest.raises(FleetError, match="broke"):
        list(client.jobs.follow("x"))


def test_following_goes_on_with_the_next_server_where_it_stopped(live, hanging_up):
    job = live.ran(RUN)
    live.fleet.printed(job["id"], ["one", "two", "three"])
    with http.connect(start=False) as client:
        first = client.jobs.logs("hello")["lines"][0]
    live.ran(RUN)  # the newest job of that name by now
    told, at = [], len(f"{first['time']} out one\n")
    body = f"event: log\ndata: {json.dumps({'job': job['id'], 'lines': [first], 'cursor': {'1.0': at}})}\n\n"
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    address = hanging_up([f"{head}{len(body):x}\r\n{body}\r\n".encode()])
    with http.Client(address, live.token, live.home, told.append) as client:
        assert [line["text"] for page in client.jobs.follow("hello") for line in page["lines"]] == [
            "one",
            "two",
            "three",
        ]
        assert client.url == live.address
    assert [words.partition(" at ")[0] for words in told] == ["the connection to the server"]


def test_waiting_goes_on_with_the_next_server(live, hanging_up):
    job = live.ran(RUN)
    address = hanging_up([b""])
    with http.Client(address, live.token, live.home) as client:
        assert client.wait(job["id"])["state"] == "SUCCEEDED"


def test_a_server_that_does_not_come_back_is_waited_for_and_then_named(tmp_path, monkeypatch, hanging_up):
    """A try that is in the line of the listener when it closes is broken, a later one is refused."""
    monkeypatch.setattr(server_connection, "RECONNECT_S", 0.3)
    address = hanging_up([b""])
    with (
        http.Client(address, "t", tmp_path) as client,
        pytest.raises(FleetError, match=r"the server at .* (cannot be reached|broke)"),
    ):
        client.wait("x")


def test_following_a_log_without_a_server_names_the_job(tmp_path, monkeypatch, hanging_up):
    monkeypatch.setattr(server_connection, "RECONNECT_S", 0.3)
    address = hanging_up([b""])
    with http.Client(address, "t", tmp_path) as client, pytest.raises(FleetError) as raised:
        list(logs.follow_pages(client, "hello-1a2b3c4d"))
    assert raised.value.remedy.startswith("run `polyfleet logs -f hello-1a2b3c4d`: it starts a server")


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (
            "t" * 64,
            0o644,
            r"other users can read the token .*/token \(mode 0644\); run `polyfleet server stop`, remove that file",
        ),
        (None, 0o600, r"the server runs, but its token .*/token does not exist; run `polyfleet server stop`"),
        ("", 0o600, r"/token does not contain a valid token"),
        ("a\nb", 0o600, r"/token does not contain a valid token"),
        ("t" * 31, 0o600, r"the token .*/token has 31 characters; the minimum is 32"),
        ("\udcff", 0o600, r"/token cannot be read"),
    ],
)
def test_a_token_that_is_none_is_told_with_its_path_and_what_to_do(live, content, mode, message):
    path = live.home / "token"
    path.unlink()
    if content is not None:
        path.write_text(content, errors="surrogateescape")
        path.chmod(mode)
    with pytest.raises(UserError, match=message):
        http.connect(start=False)


def test_a_proxy_of_the_environment_sees_nothing(live, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with http.connect(start=False) as client:
        assert client.fleet.show()["name"] == "demo"
