"""Server-sent events: logs to their end, changes, checkpoint copies with progress; nothing outlives its client."""

import json
import threading

import pytest

from orchestrator.server import streams

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
    with live.http as client:
        job = client.post("/v1/jobs", json={"spec": RUN}).json()
    live.service.lines[job["id"]] = lines
    return job["id"]


def texts(lines):
    return [line["text"] for line in lines]


def test_a_log_is_paged_with_its_cursor(live):
    submit(live, ["one", "two", "three"])
    with live.http as client:
        first = client.get("/v1/jobs/hello/logs").json()
        second = client.get("/v1/jobs/hello/logs", params={"cursor": json.dumps(first["cursor"])}).json()
    assert (texts(first["lines"]), first["ended"]) == (["one", "two"], False)
    assert (texts(second["lines"]), second["ended"]) == (["three"], True)


@pytest.mark.parametrize(
    ("tail", "expected"), [(2, ["four", "five"]), (0, []), (100, ["one", "two", "three", "four", "five"])]
)
def test_the_tail_is_the_last_lines(live, tail, expected):
    submit(live, ["one", "two", "three", "four", "five"])
    with live.http as client:
        assert texts(client.get("/v1/jobs/hello/logs", params={"tail": tail}).json()["lines"]) == expected


def test_a_followed_log_ends_with_its_job(live, wait_for):
    job_id = submit(live, ["one", "two", "three"])
    live.service.views[job_id]["state"] = "RUNNING"
    with live.http as client, client.stream("GET", "/v1/jobs/hello/logs/stream") as response:
        got = events(response)
        assert texts(next(got)[1]["lines"]) == ["one", "two"]
        assert texts(next(got)[1]["lines"]) == ["three"]
        live.service.lines[job_id].append("four")
        assert texts(next(got)[1]["lines"]) == ["four"]
        live.service.views[job_id]["state"] = "SUCCEEDED"
        assert list(got) == [("end", {"state": "SUCCEEDED"})]


def test_following_may_begin_with_the_tail(live):
    submit(live, ["one", "two", "three"])
    with live.http as client, client.stream("GET", "/v1/jobs/hello/logs/stream", params={"tail": 1}) as response:
        got = list(events(response))
    assert [texts(data["lines"]) for name, data in got if name == "log"] == [["three"]]
    assert got[-1] == ("end", {"state": "SUCCEEDED"})


def test_a_client_that_leaves_ends_its_stream(live, wait_for):
    job_id = submit(live, [])
    live.service.views[job_id]["state"] = "RUNNING"
    with live.http as client, client.stream("GET", "/v1/jobs/hello/logs/stream") as response:
        next(response.iter_raw())
    seen = []

    def quiet():
        seen.append(len(live.service.calls))
        return len(seen) > 250 and seen[-1] == seen[-200]

    wait_for(quiet)


def test_a_stream_ends_when_the_server_does(live):
    job_id = submit(live, [])
    live.service.views[job_id]["state"] = "RUNNING"
    with live.http as client, client.stream("GET", "/v1/jobs/hello/logs/stream") as response:
        live.app.state.stopping.set()
        assert list(events(response)) == []


def test_many_open_streams_do_not_keep_others_waiting(live):
    job_id = submit(live, [])
    live.service.views[job_id]["state"] = "RUNNING"
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


def test_a_stream_that_fails_says_so_as_its_last_event(live):
    submit(live, ["one"])
    live.service.logs = lambda *_: {}["absent"]
    with live.http as client, client.stream("GET", "/v1/jobs/hello/logs/stream") as response:
        name, error = next(events(response))
    assert (name, error["type"], error["message"]) == (
        "error",
        "InternalError",
        "the server failed: KeyError: 'absent'",
    )


def test_changes_come_as_they_happen(live):
    with live.http as client, client.stream("GET", "/v1/changes/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        name, data = next(events(response))
    assert (name, data["event"]) == ("change", "submitted")


def copy(client, target):
    return client.stream("POST", "/v1/checkpoints/copy", json={"source": "cpu:a", "target": target})


def test_a_copy_tells_its_progress_and_ends_with_the_report(live):
    with live.http as client, copy(client, "xla:b") as response:
        got = list(events(response))
    assert got[-1][0] == "report"
    assert got[-1][1]["target"] == "xla:b"
    assert ("progress", {"done_bytes": 10, "total_bytes": 10}) in got


def test_a_copy_that_fails_ends_with_the_error(live):
    with live.http as client, copy(client, "full:b") as response:
        assert list(events(response)) == [
            (
                "error",
                {"type": "FleetError", "message": "no space left in pool full", "remedy": "make room", "status": 503},
            )
        ]


def test_a_copy_nobody_waits_for_is_stopped(live):
    ended, whole = threading.Event(), live.service.checkpoint_copy

    def noticing(*arguments):
        try:
            return whole(*arguments)
        finally:
            ended.set()

    live.service.checkpoint_copy = noticing
    with live.http as client, copy(client, "slow:b") as response:
        next(events(response))
    assert ended.wait(10)
    assert not live.service.release.is_set()
