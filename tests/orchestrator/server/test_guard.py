"""Nobody gets past the root without the token, from a foreign host name, with a form's content type or a huge body."""

import asyncio
import hashlib
import socket

import httpx
import pytest
from fastapi import FastAPI
from patience import LIMIT_S

from orchestrator.server.actions import Action, ActionTable
from orchestrator.server.app import GuardedApp
from orchestrator.server.guard import Guard
from orchestrator.verbs.declare import Role

VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def paths(app):
    """Every path the application documents, with some that it has not: OpenAPI lists what FastAPI routes."""
    declared = (
        p.replace("{ref}", "x").replace("{sha}", "0" * 64).replace("{kind}", "job") for p in app.openapi()["paths"]
    )
    return sorted(
        {*declared, "/openapi.json", "/docs", "/nowhere", "/healthz/", "//healthz", "/HEALTHZ", "/healthz%00"}
    )


def test_every_route_and_verb_without_a_token_is_refused_alike(live):
    with live.client({}) as bare, live.client({"Authorization": f"Bearer {live.token[:-1]}"}) as wrong:
        answers = {}
        for path in paths(live.app):
            for verb in VERBS:
                if (verb, path) == ("GET", "/healthz"):
                    continue
                for client in (bare, wrong):
                    answer = client.request(verb, path)
                    answers[verb, path, client is bare] = (
                        answer.status_code,
                        answer.content if verb != "HEAD" else None,
                    )
    assert len(paths(live.app)) > 20
    assert {status for status, _ in answers.values()} == {401}
    assert len({body for _, body in answers.values() if body is not None}) == 1


def test_health_needs_no_token_and_says_nothing(live):
    with live.client({}) as bare:
        assert (bare.get("/healthz").status_code, bare.get("/healthz").json()) == (200, {"ok": True})


@pytest.mark.parametrize(
    "header",
    [b"Bearer \xc3\xa9\xff", b"Bearer", b"", b"Basic dXNlcjpw", b"Bearer  x", b"bearer\tx", b"TOKEN"],
)
def test_a_strange_authorization_header_is_refused_not_an_error(live, header):
    with live.client({}) as bare:
        assert bare.get("/v1/jobs", headers={b"Authorization": header}).status_code == 401


def test_a_second_authorization_header_is_refused(live):
    with live.client({}) as bare:
        twice = [("Authorization", f"Bearer {live.token}"), ("Authorization", "Bearer other")]
        assert bare.get("/v1/jobs", headers=twice).status_code == 401


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1",
        "127.0.0.1:1",
        "localhost.:{port}",
        "[::1]:{port}",
        "127.0.0.1:{port}.evil",
        "127.0.0.1:{port}@evil",
        "",
    ],
)
def test_a_foreign_host_is_misdirected_even_with_the_token(live, host):
    with live.http as client:
        for path in ("/healthz", "/v1/jobs"):
            assert client.get(path, headers={"Host": host.format(port=live.port)}).status_code == 421


def test_names_of_this_machine_are_hosts(live):
    with live.http as client:
        for host in (f"localhost:{live.port}", f"LOCALHOST:{live.port}", f"127.0.0.1:{live.port}"):
            assert client.get("/v1/fleet", headers={"Host": host}).status_code == 200


def test_a_forwarded_host_changes_nothing(live):
    with live.client({"X-Forwarded-Host": f"127.0.0.1:{live.port}", "Host": "evil.example"}) as client:
        assert client.get("/healthz").status_code == 421


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "application/jsonp"]
)
def test_what_a_form_can_send_is_no_json(live, content_type):
    with live.http as client:
        answer = client.post("/v1/jobs", content=b'{"spec": {"task": "run"}}', headers={"Content-Type": content_type})
    assert answer.status_code == 415
    assert live.specs == []


def test_the_content_type_may_have_parameters(live):
    with live.http as client:
        answer = client.post(
            "/v1/plan",
            content=b'{"spec": {"command": "true"}}',
            headers={"Content-Type": "Application/JSON; charset=utf-8"},
        )
    assert answer.status_code == 200


def test_a_body_that_says_it_is_huge_is_refused_before_it_is_read(live):
    with socket.create_connection(("127.0.0.1", live.port), timeout=LIMIT_S) as raw:
        head = (
            f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1:{live.port}\r\nAuthorization: Bearer {live.token}\r\n"
            "Content-Type: application/json\r\nContent-Length: 999999999999\r\n\r\n"
        )
        raw.sendall(head.encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


def test_a_chunked_body_is_counted(live):
    with live.http as client:
        pieces = (b" " * 65536 for _ in range(40))
        assert client.post("/v1/jobs", content=pieces, headers={"Content-Type": "application/json"}).status_code == 413
    assert live.specs == []


def test_a_route_without_a_row_in_the_table_of_actions_does_not_exist(live):
    extra = FastAPI()
    extra.get("/x")(lambda: "secret")
    live.app.mount("/extra", extra)
    live.app.get("/v1/secrets")(lambda: "secret")
    live.app.delete("/v1/fleet")(lambda: "secret")
    with live.client({}) as bare, live.http as client:
        for method, path, status in (
            ("GET", "/extra/x", 404),
            ("GET", "/v1/secrets", 404),
            ("DELETE", "/v1/fleet", 405),
        ):
            assert bare.request(method, path).status_code == 401
            answer = client.request(method, path)
            assert (answer.status_code, "secret" in answer.text) == (status, False)


def test_a_method_that_a_path_has_not_is_answered_with_those_it_has(live):
    with live.http as client:
        answer = client.put("/v1/jobs", json={})
        assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, POST")
        assert answer.json()["error"]["message"] == "Method Not Allowed"


@pytest.mark.parametrize("path", ["/v1/jobs/", "/v1//jobs", "/V1/jobs", "/v1/jobs/a%2fb", "/v1/jobs;"])
def test_another_spelling_of_a_path_is_another_path(live, path):
    with live.http as client:
        answer = client.get(httpx.URL(live.url).copy_with(raw_path=path.encode()))
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFound")


def test_a_role_below_that_of_the_action_is_refused(live, monkeypatch):
    monkeypatch.setattr("orchestrator.server.guard.TOKEN_ROLE", Role.VIEWER)
    with live.http as client:
        assert client.get("/v1/jobs").status_code == 200
        answer = client.post("/v1/jobs", json={"spec": {"command": "true"}})
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "Forbidden")
        assert client.post("/v1/shutdown", json={}).status_code == 403
        assert client.get("/openapi.json").status_code == 200
    assert live.specs == []


def test_answers_forbid_guessing_caching_and_framing(live):
    with live.http as client:
        headers = client.get("/v1/jobs").headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "server" not in headers
    assert "access-control-allow-origin" not in headers


def test_a_web_socket_is_closed_before_it_is_accepted(live):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(live.app({"type": "websocket", "path": "/v1/jobs", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_fastapi_itself_adds_nothing_outside_the_guard(live):
    outer = type(live.app).__call__
    assert outer is GuardedApp.__call__
    with live.client({}) as bare:
        assert bare.post("/v1/jobs", content=b"x" * 100).status_code == 401


@pytest.mark.parametrize(("port", "status"), [(80, 200), (8080, 421)])
def test_on_the_port_of_http_a_host_names_no_port(port, status):
    """Clients leave it out there; a server on any other port is refused without it."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/healthz",
        "server": ("127.0.0.1", port),
        "headers": [(b"host", b"127.0.0.1")],
    }

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    actions = ActionTable()
    actions.add(Action("GET", "/healthz", None))
    asyncio.run(Guard(app, "t", actions)(scope, None, send))
    assert sent[0]["status"] == status


def test_pieces_of_files_are_plain_bytes_of_at_most_8_mib_and_nothing_else_is(live):
    raw = {"Content-Type": "application/octet-stream"}
    asked = {"node": "cpu-0", "path": "f", "offset": 0, "sha256": hashlib.sha256(b"x").hexdigest()}
    with live.http as client:
        sent = client.post("/v1/uploads/upload-0001", json={}, params={"node": "cpu-0"})
        assert sent.json() == {"there": {}}
        url = "/v1/uploads/upload-0001/content"
        assert client.put(url, content=b"x", params=asked, headers=raw).status_code == 201
        assert client.put(url, content=b"y", params=asked, headers=raw).status_code == 422
        assert client.put(url, json={}, params=asked).status_code == 415
        large = bytes((8 << 20) + 2048)
        for path in (url, "/v1/checkpoints/incoming/chunk"):
            assert client.put(path, content=large, params=asked, headers=raw).status_code == 413
        assert client.post("/v1/jobs", content=b"{}", headers=raw).status_code == 415
        assert client.put("/v1/code-archives/" + "0" * 64, content=b"", headers=raw).status_code == 415
        for where in ("../x", "/etc/x", "a/../../x"):
            assert client.put(url, content=b"x", params=asked | {"path": where}, headers=raw).status_code == 422
        assert client.put("/v1/uploads/..%2f..%2fx/content", content=b"x", params=asked, headers=raw).status_code == 404
