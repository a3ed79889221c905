"""Server-sent events: logs to their end, changes, checkpoint copies with progress; nothing outlives its client."""

import json
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from patience import LIMIT_S

from orchestrator.runtime.checkpoints import checkpoint_copy
from orchestrator.server.http import operations, streams
from orchestrator.verbs import jobs

RUN = {"task": "run", "command": "true", "name": "hello"}


def events(response):
    name = ""
    for line in response.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def submit(live, lines):
    job = live.ran(RUN)
    live.fleet.printed(job["id"], lines)
    return job["id"]


def texts(lines):
    return [line["text"] for line in lines]


@pytest.fixture
def running(live, talking, wait_for):
    """A job that runs and prints what the test tells it to."""
    with live.http as client:
        job = client.post("/v1/jobs", json={"spec": talking.spec}).json()["id"]
        wait_for(lambda: client.get(f"/v1/jobs/{job}").json()["state"] == "RUNNING")
    return job


def test_a_log_is_paged_with_its_cursor(live):
    submit(live, ["one", "two", "three"])
    with live.http as client:
        first = client.get("/v1/jobs/hello/logs").json()
        second = client.get("/v1/jobs/hello/logs", params={"cursor": json.dumps(first["cursor"])}).json()
    assert (texts(first["lines"]), first["ended"]) == (["one", "two", "three"], False)
    assert (texts(second["lines"]), second["ended"]) == ([], True)


@pytest.mark.parametrize(
    ("tail", "expected"), [(2, ["four", "five"]), (0, []), (100, ["one", "two", "three", "four", "five"])]
)
def test_the_tail_is_the_last_lines(live, tail, expected):
    submit(live, ["one", "two", "three", "four", "five"])
    with live.http as client:
        assert texts(client.get("/v1/jobs/hello/logs", params={"tail": tail}).json()["lines"]) == expected


def test_a_followed_log_ends_with_its_job(live, running, talking):
    talking.say("one\n")
    with live.http as client, client.stream("GET", f"/v1/jobs/{running}/logs/stream") as response:
        got = (event for event in events(response) if event[1].get("lines") != [])
        assert texts(next(got)[1]["lines"]) == ["one"]
        talking.say("two\nthree\n")
        lines = texts(next(got)[1]["lines"])
        talking.end()
        rest = list(got)
    assert lines + [text for name, data in rest if name == "log" for text in texts(data["lines"])] == ["two", "three"]
    assert rest[-1] == ("end", {"state": "SUCCEEDED"})


def test_a_followed_log_ends_with_a_job_that_is_cancelled_while_it_runs(live, running, talking):
    """With all that it printed; its devices are free then, and the next job runs on them."""
    talking.say("one\n")
    with live.http as client, client.stream("GET", f"/v1/jobs/{running}/logs/stream") as response:
        got = (event for event in events(response) if event[1].get("lines") != [])
        assert texts(next(got)[1]["lines"]) == ["one"]
        talking.say("two\n")
        assert texts(next(got)[1]["lines"]) == ["two"]
        with live.http as other:
            assert other.post(f"/v1/jobs/{running}/cancel", json={}).json()["state"] == "CANCELLED"
        assert list(got)[-1] == ("end", {"state": "CANCELLED"})
    assert jobs.show(live.hub, running)["attempts"][-1]["outcome"] == "cancelled"
    live.ran(RUN | {"name": "next"})


def test_a_followed_log_ends_with_a_job_that_is_cancelled_while_it_waits(live):
    live.fleet.hold(live.service)
    with live.http as client:
        job = client.post("/v1/jobs", json={"spec": RUN}).json()["id"]
        with client.stream("GET", f"/v1/jobs/{job}/logs/stream") as response:
            got = events(response)
            assert next(got)[1]["lines"] == []
            with live.http as other:
                assert other.post(f"/v1/jobs/{job}/cancel", json={}).json()["state"] == "CANCELLED"
            assert list(got)[-1] == ("end", {"state": "CANCELLED"})


def test_following_may_begin_with_the_tail(live):
    submit(live, ["one", "two", "three"])
    with live.http as client, client.stream("GET", "/v1/jobs/hello/logs/stream", params={"tail": 1}) as response:
        got = list(events(response))
    assert [texts(data["lines"]) for name, data in got if name == "log"] == [["three"]]
    assert got[-1] == ("end", {"state": "SUCCEEDED"})


def test_a_followed_name_stays_the_job_it_meant_at_first(live, running, talking, wait_for):
    """Also for a client whose connection breaks before anything was printed."""
    with live.http as client, client.stream("GET", "/v1/jobs/talks/logs/stream") as response:
        got = events(response)
        name, first = next(got)
        assert (name, first["job"], first["lines"]) == ("log", running, [])
        second = live.ran({**RUN, "name": "talks"})["id"]
        with live.http as other:
            assert other.get("/v1/jobs/talks/logs").json()["job"] == second
        talking.say("from the first\n")
        assert texts(next(got)[1]["lines"]) == ["from the first"]
        talking.end()
        rest = list(got)
    assert rest[-1][0] == "end"
    assert all(data["job"] == running for name, data in rest if name == "log")


def test_a_client_that_leaves_ends_its_stream(live, running, wait_for):
    with live.http as client, client.stream("GET", f"/v1/jobs/{running}/logs/stream") as response:
        pieces = response.iter_raw()  # kept: an iterator that goes closes its response
        next(pieces)
        wait_for(lambda: (live.app.state.hub.streams.open, live.app.state.hub.streams.logs) == (1, 1))
    wait_for(lambda: (live.app.state.hub.streams.open, live.app.state.hub.streams.logs) == (0, 0))


def test_a_stream_ends_when_the_server_does(live, running):
    with live.http as client, client.stream("GET", f"/v1/jobs/{running}/logs/stream") as response:
        live.app.state.stopping.set()
        assert all(name == "log" and data["lines"] == [] for name, data in events(response))


def test_many_open_streams_do_not_keep_others_waiting(live, running):
    with live.http as client:
        streams = [client.stream("GET", "/v1/changes/stream", params={"after": 1}) for _ in range(60)]
        for stream in streams:
            stream.__enter__()
        with live.http as other:
            assert other.get("/v1/fleet").status_code == 200
        for stream in streams:
            stream.__exit__(None, None, None)


def test_a_quiet_stream_says_that_it_is_alive(live, monkeypatch):
    monkeypatch.setattr(streams, "HEARTBEAT_S", 0.0)
    with live.http as client, client.stream("GET", "/v1/changes/stream", params={"after": 1}) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [": connected", "", ": still here", ""]


def test_a_stream_that_fails_says_so_as_its_last_event(live, monkeypatch):
    submit(live, ["one"])
    monkeypatch.setattr(live.service.job_logs, "read", lambda *_: {}["absent"])
    with live.http as client, client.stream("GET", "/v1/jobs/hello/logs/stream") as response:
        name, error = next(events(response))
    assert (name, error["type"], error["message"]) == (
        "error",
        "InternalError",
        "the server failed: KeyError: 'absent'",
    )


def test_changes_come_as_they_happen(live):
    live.ran(RUN)
    with live.http as client, client.stream("GET", "/v1/changes/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        name, data = next(events(response))
    assert (name, data["event"]) == ("change", "submitted")


@pytest.fixture
def without_events(live, monkeypatch):
    """The live server after its newest events were removed, and how often it has been asked for changes since."""
    live.ran(RUN)
    with closing(sqlite3.connect(live.home / "polyfleet.db")) as other, other:
        other.execute("DELETE FROM events")
    asked, changes = [], live.service.changes
    monkeypatch.setattr(live.service, "changes", lambda *words: asked.append(words) or changes(*words))
    return asked


def test_who_waits_for_changes_below_events_that_are_gone_is_told_how_far_he_has_seen(live, without_events):
    with live.http as client:
        first = client.get("/v1/changes", params={"timeout_s": 0.5}).json()
        assert first == {"events": [], "last": live.service.store.last_seq}
        assert len(without_events) <= 3
        second = client.get("/v1/changes", params={"after": first["last"] - 1, "timeout_s": 0.5}).json()
    assert second == first and len(without_events) <= 6


def test_a_stream_of_changes_below_events_that_are_gone_waits_for_the_next(live, without_events):
    last = live.service.store.last_seq
    with live.http as client, client.stream("GET", "/v1/changes/stream") as response:
        got = events(response)
        live.ran(RUN | {"name": "next"})
        assert next(got)[1]["seq"] == last + 1
    assert sum(after < last for after, _ in without_events) == 1


def copy(client, source, target):
    return client.stream("POST", "/v1/checkpoints/copy", json={"source": source, "target": target})


def test_a_copy_tells_its_progress_and_ends_with_the_report(live, checkpoint):
    with live.http as client, copy(client, checkpoint, "xla:b") as response:
        got = list(events(response))
    name, report = got[-1]
    assert (name, report["target"]) == ("result", "xla:b/step-00000012-adeb0f13")
    assert ("progress", {"done_bytes": report["bytes"], "total_bytes": report["bytes"]}) in got


def test_a_copy_that_fails_ends_with_the_error(live):
    with live.http as client, copy(client, "cpu:absent", "xla:b") as response:
        ((name, error),) = events(response)
    assert (name, error["type"], error["status"]) == ("error", "NotFound", 404)
    assert error["message"] == "no checkpoint at cpu:absent"


def test_a_copy_nobody_waits_for_is_stopped(live, checkpoint, monkeypatch):
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(checkpoints, request, progress):
        progress(1, 10)
        begun.set()
        try:
            while not go_on.wait(0.01):
                progress(1, 10)
        finally:
            ended.set()

    monkeypatch.setattr(checkpoint_copy, "copy", slow)
    with live.http as client, copy(client, checkpoint, "xla:b") as response:
        next(events(response))
    assert ended.wait(LIMIT_S)
    assert not go_on.is_set()


PRUNED = {"root": "cpu:a", "kept": [], "deleted": [], "bytes": 0, "dry_run": True}


class Slow:
    """A checkpoint tool that ends when `go_on` is set; `bytes` is the number of its runs. It checks for no client."""

    def __init__(self, live, monkeypatch):
        self.begun, self.go_on, self.runs = threading.Semaphore(0), threading.Event(), []
        monkeypatch.setattr(live.service.checkpoint_service, "tool", self)

    def __call__(self, verb, locations, options, progress):
        self.runs.append(locations["root"])
        self.begun.release()
        assert self.go_on.wait(LIMIT_S)
        return PRUNED | {"bytes": len(self.runs)}


def ask(client, place, key=""):
    headers = {"Idempotency-Key": key} if key else {}
    return client.stream(
        "POST", "/v1/checkpoints/prune", json={"root": place, "keep": 1}, headers=headers, timeout=LIMIT_S
    )


def asked(live, place, key=""):
    with live.http as client, ask(client, place, key) as response:
        return list(events(response))


def test_a_verb_asked_again_while_its_abandoned_run_ends_has_one_run_and_its_report(live, monkeypatch, wait_for):
    slow = Slow(live, monkeypatch)
    with live.http as client, ask(client, "cpu:a", "key"):
        assert slow.begun.acquire(timeout=LIMIT_S)
    found = live.app.state.hub.operations
    wait_for(lambda: found.by_key["key"].abandoned.is_set())
    with ThreadPoolExecutor(1) as thread:
        again = thread.submit(asked, live, "cpu:a", "key")
        wait_for(lambda: live.app.state.hub.streams.open == 1)
        slow.go_on.set()
        assert again.result(LIMIT_S) == [("result", PRUNED | {"bytes": 1})]
    assert (slow.runs, found.by_key, found.count) == (["cpu:a"], {}, 0)


def test_an_abandoned_verb_whose_key_is_never_used_again_is_not_kept(live, monkeypatch, wait_for):
    slow = Slow(live, monkeypatch)
    with live.http as client, ask(client, "cpu:a", "key"):
        assert slow.begun.acquire(timeout=LIMIT_S)
    slow.go_on.set()
    wait_for(lambda: live.app.state.hub.operations.count == 0)
    assert live.app.state.hub.operations.by_key == {}


def test_a_verb_whose_client_left_before_it_began_never_begins(live, monkeypatch, wait_for):
    monkeypatch.setattr(operations, "MAX_RUNNING", 1)
    slow = Slow(live, monkeypatch)
    with live.http as client, ask(client, "cpu:first", "1"):
        assert slow.begun.acquire(timeout=LIMIT_S)
        with live.http as other, ask(other, "cpu:second", "2"):
            wait_for(lambda: live.app.state.hub.operations.count == 2)
        wait_for(lambda: live.app.state.hub.operations.by_key["2"].abandoned.is_set())
        slow.go_on.set()
        wait_for(lambda: live.app.state.hub.operations.count == 0)
    assert slow.runs == ["cpu:first"]


def test_one_verb_too_many_is_refused_with_when_to_come_back(live, monkeypatch):
    monkeypatch.setattr(operations, "MAX_RUNNING", 1)
    monkeypatch.setattr(operations, "MAX_WAITING", 0)
    slow = Slow(live, monkeypatch)
    with live.http as client, ask(client, "cpu:first", "1"):
        assert slow.begun.acquire(timeout=LIMIT_S)
        with live.http as other, ask(other, "cpu:second", "2") as refused:
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "10")
        slow.go_on.set()
