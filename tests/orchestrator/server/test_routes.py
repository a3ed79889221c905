"""Each route gives the service what it was sent and gives back what it answered; every error has one shape."""

import hashlib
import json

import pytest

from cluster.version import VERSION
from orchestrator.store.events.unit_of_work import make_metrics_row
from workers.protocol.messages import PROTOCOL

RUN = {"task": "run", "command": "true", "name": "hello"}


def test_a_submitted_job_is_created_once_per_key(live):
    with live.http as client:
        first = client.post("/v1/jobs", json={"spec": RUN}, headers={"Idempotency-Key": "k"})
        again = client.post("/v1/jobs", json={"spec": RUN}, headers={"Idempotency-Key": "k"})
    assert (first.status_code, first.json()["state"]) == (201, "PENDING")
    assert again.json() == first.json()
    assert live.specs == [RUN]


def test_without_a_key_each_submission_is_its_own(live):
    with live.http as client:
        ids = {client.post("/v1/jobs", json={"spec": RUN}).json()["id"] for _ in range(2)}
    assert len(ids) == 2


def test_a_cancel_counts_once_per_key(live, talking):
    keyed = {"Idempotency-Key": "k"}
    with live.http as client:
        job, other = (client.post("/v1/jobs", json={"spec": talking.spec}).json()["id"] for _ in range(2))
        first = client.post(f"/v1/jobs/{job}/cancel", json={}, headers=keyed)
        assert (first.status_code, first.json()["state"]) == (200, "CANCELLED")
        assert client.post(f"/v1/jobs/{job}/cancel", json={}, headers=keyed).content == first.content
        assert client.post(f"/v1/jobs/{other}/cancel", json={}, headers=keyed).status_code == 409
        assert client.get(f"/v1/jobs/{other}").json()["state"] != "CANCELLED"


def test_a_baseline_counts_once_per_key(live, measuring, wait_for):
    keyed = {"Idempotency-Key": "k"}
    with live.http as client:
        run = client.post("/v1/benchmarks", json={"request": {"cases": ["mlp"]}}).json()["run"]
        path = f"/v1/benchmarks/{run}"
        wait_for(lambda: client.get(path).json()["state"] == "SUCCEEDED")
        first = client.post(f"{path}/baseline", json={}, headers=keyed)
        assert (first.status_code, first.json()["baseline"]) == (200, True)
        assert client.post(f"{path}/baseline", json={}, headers=keyed).content == first.content
        kinds = [line["line"] for line in client.get(f"{path}/lines").json()]
        assert kinds.count("baseline") == 1
        assert client.post(f"{path}/cancel", json={}, headers=keyed).status_code == 409


def test_reading_routes_answer_with_what_the_service_knows(live, checkpoint):
    job = live.ran(RUN)
    with live.http as client:
        version = client.get("/v1/version").json()
        assert (version["version"], version["home"], version["protocol"]) == (VERSION, str(live.home), PROTOCOL)
        assert [pool["pool"] for pool in client.get("/v1/fleet").json()["pools"]] == ["cpu", "ipex", "xla"]
        assert [node["node"] for node in client.get("/v1/nodes").json()] == ["cpu-0", "ipex-0", "xla-0"]
        assert client.get("/v1/doctor").json() == []
        assert client.get("/v1/jobs", params={"state": ["SUCCEEDED"], "limit": 5}).json() == [job]
        assert client.get("/v1/jobs/hello").json() == job
        assert client.get("/v1/jobs/hello/explain").json()["state"] == "SUCCEEDED"
        assert client.get("/v1/jobs/hello/history").json()[0]["event"] == "submitted"
        told = client.get("/v1/jobs/hello/story").json()
        assert (told["job"], told["events"]) == (job["id"], client.get("/v1/jobs/hello/history").json())
        assert told["steps"][-1]["changes"][-1].startswith("remove files"), "the last that is done about an attempt"
        assert client.get("/v1/jobs/nobody/story").status_code == 404
        assert client.post("/v1/plan", json={"spec": RUN}).json()["would_start"]["candidate"] == 1
        assert client.post("/v1/offers", json={"spec": RUN}).json()["offers"][0]["when"] == "now"
        assert client.get("/v1/changes", params={"after": 0}).json()["events"][0]["event"] == "submitted"
        (found,) = client.get("/v1/checkpoints", params={"pool": "cpu", "prefix": "digits"}).json()
        assert found["path"] == "digits/step-00000012-adeb0f13"
        assert client.get("/v1/checkpoints/show", params={"ref": checkpoint}).json()["step"] == 12
        planned = client.get("/v1/checkpoints/plan", params={"ref": checkpoint, "to_kind": "tpu:v5e"}).json()
        assert planned["target"] == {"backend": "tpu", "kind": "tpu:v5e", "count": 1}
        assert client.post("/v1/jobs/hello/cancel", json={}).json()["state"] == "SUCCEEDED"


def test_files_are_put_once_per_key(live):
    job, keyed, upload = live.ran(RUN)["id"], {"Idempotency-Key": "k"}, "an-upload"
    with live.http as client:
        place = client.get(f"/v1/jobs/{job}/files/place", params={"path": "a"}).json()
        target = {name: place[name] for name in ("attempt", "node", "pool")}
        piece = {"node": place["node"], "path": "a", "sha256": hashlib.sha256(b"A").hexdigest(), "size_bytes": 1}
        client.post(f"/v1/uploads/{upload}", json={}, params={"node": place["node"]})
        raw = {"Content-Type": "application/octet-stream"}
        sent = client.put(f"/v1/uploads/{upload}/content", params=piece, content=b"A", headers=raw)
        assert sent.status_code == 201
        body = {"upload": upload, "files": [{"uploaded": "a", "path": "a"}]} | target
        path = f"/v1/jobs/{job}/files"
        first = client.post(path, json=body, headers=keyed)
        assert (first.status_code, first.json()) == (200, {"placed": ["a"]})
        assert client.post(path, json=body, headers=keyed).content == first.content
        assert client.post(path, json=body).status_code == 404, "without a key it needs the upload again"
        assert client.post(path, json=body | {"force": True}, headers=keyed).status_code == 409


def test_numbers_that_json_has_not_are_words(live):
    job = live.ran(RUN)
    live.service.store.metrics.queue(make_metrics_row(job["id"], 1, 1, 1.0, {"step": 1, "loss": float("nan")}))
    live.ran(RUN)  # its events are durable after the report
    with live.http as client:
        (told,) = json.loads(client.get(f"/v1/jobs/{job['id']}/reports").content, parse_constant=pytest.fail)
    assert (told["seq"], told["step"], told["metrics"]) == (1, 1, {"loss": "NaN"})


def test_what_is_no_text_in_a_log_still_leaves_as_utf8(live):
    job = live.ran(RUN)
    live.fleet.printed(job["id"], ["a\ud800b"])
    with live.http as client:
        assert client.get("/v1/jobs/hello/logs").json()["lines"][0]["text"] == "a\ufffd\ufffd\ufffdb"


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
        ("POST", "/v1/jobs", {"spec": RUN, "code_archive": "../../etc/passwd"}, 422, "SpecError"),
        ("POST", "/v1/jobs", {"spec": []}, 422, "SpecError"),
        ("POST", "/v1/jobs", [], 422, "SpecError"),
        ("POST", "/v1/jobs", {"spec": RUN | {"resources": {"accelerators": "tpu:v5p"}}}, 422, "SpecError"),
        ("POST", "/v1/jobs", {"spec": {"broken": 1}}, 422, "SpecError"),
        ("POST", "/v1/offers", {"spec": {"broken": 1}}, 422, "SpecError"),
        ("POST", "/v1/offers", {"spec": RUN, "content_sha": "../../etc/passwd"}, 422, "SpecError"),
        ("GET", "/v1/doctor", None, 500, "InternalError"),
        ("PUT", "/v1/code-archives/abc", None, 422, "SpecError"),
        ("GET", "/v1/code-archives/..%2f..%2ftoken", None, 404, "NotFound"),
    ],
)
def test_every_error_has_the_one_shape(live, monkeypatch, method, path, body, status, kind):
    monkeypatch.setattr(live.service.health_collector, "findings", lambda: {}["absent"])
    live.ran(RUN)
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
        answer = client.post("/v1/jobs", json={"spec": RUN | {"resources": {"accelerators": "tpu:v5p"}}})
    assert answer.json()["error"] == {
        "type": "SpecError",
        "field": "resources",
        "message": "resources: no pool has tpu:v5p; kinds here: cpu, cpu:ipex, tpu:emulated",
        "remedy": "`polyfleet inventory` shows what is here",
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
    assert live.specs == []


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
        "/v1/code-archives/{sha}",
        "/v1/schema/{kind}",
    }
    assert expected <= set(document["paths"])
    assert all(operation["description"] for path in document["paths"].values() for operation in path.values())
