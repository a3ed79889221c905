"""Each route gives the service what it was sent and gives back what it answered; every error has one shape."""

import json

import pytest

from cluster.version import VERSION
from workers.messages import PROTOCOL

RUN = {"task": "run", "command": "true", "name": "hello"}


def test_a_submitted_job_is_created_once_per_key(live):
    with live.http as client:
        first = client.post("/v1/jobs", json={"spec": RUN}, headers={"Idempotency-Key": "k"})
        again = client.post("/v1/jobs", json={"spec": RUN}, headers={"Idempotency-Key": "k"})
    assert (first.status_code, first.json()["state"], first.json()["id"]) == (201, "SUCCEEDED", again.json()["id"])
    assert live.service.calls[0] == ("submit", RUN, "", "k")


def test_without_a_key_each_submission_is_its_own(live):
    with live.http as client:
        ids = {client.post("/v1/jobs", json={"spec": RUN}).json()["id"] for _ in range(2)}
    assert len(ids) == 2


def test_reading_routes_answer_with_what_the_service_knows(live):
    with live.http as client:
        job = client.post("/v1/jobs", json={"spec": RUN}).json()
        version = client.get("/v1/version").json()
        assert (version["version"], version["home"], version["protocol"]) == (VERSION, str(live.home), PROTOCOL)
        assert client.get("/v1/fleet").json() == live.service.fleet()
        assert client.get("/v1/nodes").json() == live.service.nodes()
        assert client.get("/v1/doctor").json() == []
        assert client.get("/v1/jobs", params={"state": ["SUCCEEDED"], "limit": 5}).json() == [job]
        assert client.get("/v1/jobs/hello").json() == job
        assert client.get("/v1/jobs/hello/explain").json()["state"] == "SUCCEEDED"
        assert client.get("/v1/jobs/hello/history").json()[0]["event"] == "submitted"
        assert client.post("/v1/plan", json={"spec": RUN}).json()["would_start"]["candidate"] == 0
        assert client.get("/v1/changes", params={"after": 0}).json()["last"] == 1
        assert (
            client.get("/v1/checkpoints", params={"pool": "cpu", "prefix": "a/"}).json()[0]["path"] == "a/digits/step-1"
        )
        assert client.get("/v1/checkpoints/show", params={"ref": "cpu:x"}).json()["step"] == 1
        planned = client.get("/v1/checkpoints/plan", params={"ref": "cpu:x", "to_kind": "tpu:v5e"}).json()
        assert planned["target"] == {"backend": "tpu", "kind": "tpu:v5e", "count": 1}
        assert client.post("/v1/checkpoints/verify", json={"ref": "cpu:x"}).json()["ok"] is True
        assert client.post("/v1/jobs/hello/cancel", json={}).json()["state"] == "CANCELLED"


def test_numbers_that_json_has_not_are_words(live):
    with live.http as client:
        client.post("/v1/jobs", json={"spec": RUN})
        assert json.loads(client.get("/v1/jobs/hello/reports").content, parse_constant=pytest.fail) == [
            {"number": 1, "step": 1, "loss": "NaN"}
        ]


def test_half_a_surrogate_pair_in_a_log_still_leaves_as_utf8(live):
    with live.http as client:
        job = client.post("/v1/jobs", json={"spec": RUN}).json()
        live.service.lines[job["id"]] = ["a\ud800b"]
        assert client.get("/v1/jobs/hello/logs").json()["lines"][0]["text"] == "a?b"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("GET", "/v1/jobs/absent", None, 404, "NotFound"),
        ("GET", "/v1/jobs/absent/logs", None, 404, "NotFound"),
        ("GET", "/v1/jobs/absent/logs/stream", None, 404, "NotFound"),
        ("GET", "/v1/nothing", None, 404, "NotFound"),
        ("DELETE", "/v1/jobs", {}, 405, "UserError"),
        ("GET", "/v1/jobs?limit=0", None, 422, "SpecError"),
        ("GET", "/v1/jobs?limit=x", None, 422, "SpecError"),
        ("GET", "/v1/jobs/hello/logs?cursor=[1]", None, 422, "SpecError"),
        ("GET", "/v1/schema/pool", None, 422, "SpecError"),
        ("POST", "/v1/jobs", {"spec": RUN, "extra": 1}, 422, "SpecError"),
        ("POST", "/v1/jobs", {"spec": RUN, "package": "../../etc/passwd"}, 422, "SpecError"),
        ("POST", "/v1/jobs", {"spec": []}, 422, "SpecError"),
        ("POST", "/v1/jobs", [], 422, "SpecError"),
        ("POST", "/v1/jobs", {"spec": {"task": "run", "resources": {"accelerators": "tpu:v5p"}}}, 422, "SpecError"),
        ("POST", "/v1/jobs", {"spec": {"broken": 1}}, 500, "InternalError"),
        ("PUT", "/v1/packages/abc", None, 422, "SpecError"),
        ("GET", "/v1/packages/..%2f..%2ftoken", None, 404, "NotFound"),
    ],
)
def test_every_error_has_the_one_shape(live, method, path, body, status, kind):
    with live.http as client:
        headers = {"Content-Type": "application/zip"} if method == "PUT" else {}
        answer = (
            client.request(method, path, json=body, headers=headers)
            if body is not None
            else client.request(method, path, headers=headers)
        )
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, kind)
    assert error["message"]
    assert error["remedy"]
    assert live.token not in answer.text


def test_an_error_names_the_field(live):
    with live.http as client:
        answer = client.post("/v1/jobs", json={"spec": {"task": "run", "resources": {"accelerators": "tpu:v5p"}}})
    assert answer.json()["error"] == {
        "type": "SpecError",
        "field": "resources.accelerators",
        "message": "resources.accelerators: no pool has tpu:v5p",
        "remedy": "kinds here: cpu",
    }


def deep(levels):
    return b'{"spec": ' + b'{"a": ' * levels + b"1" + b"}" * levels + b"}"


@pytest.mark.parametrize(
    "body",
    [
        deep(40),
        deep(900),
        deep(50_000),
        b'{"spec": {"a": [' + b"1," * 30_000 + b"1]}}",
        b'{"spec": {"a": NaN}}',
        b'{"spec": {"a": 1e999}}',
        b'{"spec": {"a": ' + b"9" * 100_000 + b"}}",
        b'{"spec": ',
        b"\xff\xfe",
        b"",
        b"null",
    ],
    ids=range(11),
)
def test_a_bomb_is_refused_and_never_an_internal_error(live, body):
    with live.http as client:
        answer = client.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text[:200]
    assert live.service.calls == []


@pytest.mark.parametrize(
    "ref",
    ["..", "../../token", "..%2f..%2ftoken", "%2e%2e", "..%5c..", "a%00b", "%EF%BC%8E%EF%BC%8E", "file:%2f%2f%2fetc"],
)
def test_a_ref_is_a_name_and_never_a_path(live, ref):
    with live.http as client:
        for path in (f"/v1/jobs/{ref}", f"/v1/jobs/{ref}/logs"):
            answer = client.get(path)
            assert answer.status_code in (404, 405)
            assert live.token not in answer.text


def test_shutdown_asks_the_server_to_end(live):
    with live.http as client:
        assert client.post("/v1/shutdown", json={}).status_code == 202
    assert live.stopped.is_set()


def test_openapi_lists_every_route_behind_the_token(live):
    with live.http as client:
        document = client.get("/openapi.json").json()
    expected = {
        "/v1/jobs",
        "/v1/jobs/{ref}/logs/stream",
        "/v1/checkpoints/copy",
        "/v1/packages/{sha}",
        "/v1/schema/{kind}",
    }
    assert expected <= set(document["paths"])
    assert all(operation["description"] for path in document["paths"].values() for operation in path.values())
