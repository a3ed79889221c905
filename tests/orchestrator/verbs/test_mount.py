"""A declared verb becomes a route: each exchange, with verbs of its own on the real service."""

import json
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from patience import wait_for
from response_checks import BINARY, EVENTS
from typing_extensions import TypedDict

from cluster.errors import Conflict, NotFound
from orchestrator.server.app import make_app
from orchestrator.server.http import streams
from orchestrator.server.http.hub import Hub
from orchestrator.server.http.response_views import add_responses
from orchestrator.server.mount import add_verb, make_router
from orchestrator.services.service import Service
from orchestrator.verbs.declare import (
    Arg,
    Caller,
    Download,
    Events,
    Exchange,
    Key,
    Page,
    Progress,
    Role,
    Upload,
    verb,
    verb_of,
    verbs_of,
)
from orchestrator.views.values import StreamEvents

TOKEN = "t" * 64
NOUN = __name__.rpartition(".")[2]
Count = Annotated[int, Arg("how many", min=1, max=10)]


class BoxView(TypedDict):
    """A box."""

    name: str
    count: int


class BoxEvents(StreamEvents, total=False):
    box: BoxView


@verb("GET /v1/boxes/{name}", least=Role.VIEWER)
def show(hub: Hub, name: str, color: Annotated[Literal["red", "blue"], Arg("its color")] = "red") -> BoxView:
    """One box."""
    if name == "none":
        raise NotFound("no box none", "name another one")
    return {"name": f"{color} {name}", "count": 1}


@verb("GET /v1/boxes", least=Role.VIEWER)
def list_(hub: Hub, before: int | None = None, limit: Count = 2) -> Page[BoxView]:
    """Boxes, the newest last. A page has
    `limit` of them.
    """
    end = 5 if before is None else before
    first = max(0, end - limit)
    return Page([{"name": str(n), "count": n} for n in range(first, end)], first or None)


@verb("POST /v1/boxes/{name}/add", least=Role.MEMBER, status=201)
def add(hub: Hub, name: str, count: Count = 1, note: Annotated[str, Arg(in_query=True)] = "") -> BoxView:
    """Add to a box."""
    added.append(count)
    return {"name": f"{name} {note}".strip(), "count": len(added)}


@verb("POST /v1/boxes/{name}/make", least=Role.MEMBER)
async def make(hub: Hub, name: str, *, key: Key) -> BoxView:
    """Answers repeated requests itself."""
    return {"name": f"{name} {key}", "count": 0}


@verb("GET /v1/boxes/{name}/stream", least=Role.VIEWER)
async def follow(hub: Hub, name: str) -> Events[BoxEvents]:
    """Boxes as they come."""
    if name == "none":
        raise NotFound("no box none", "name another one")
    return Events(_boxes(name), lambda: ended.append(name))


async def _boxes(name: str) -> AsyncIterator[tuple[str, Any] | None]:
    yield "box", {"name": name, "count": 1}
    yield None
    if name == "torn":
        raise Conflict("the box is torn", "use another one")


@verb("POST /v1/boxes/{name}/pack", least=Role.MEMBER)
def pack(hub: Hub, name: str, count: Count = 1, *, progress: Progress) -> BoxView:
    """A long operation."""
    added.append(count)
    progress(count, 10)
    progress(10, 10)
    return {"name": name, "count": len(added)}


@verb("POST /v1/boxes/{name}/weigh", least=Role.MEMBER, idempotent=True)
def weigh(hub: Hub, name: str, *, progress: Progress) -> BoxView:
    """A long operation that may be repeated."""
    added.append(0)
    return {"name": name, "count": len(added)}


@verb("PUT /v1/boxes/{name}/content", least=Role.MEMBER, status=201, slow=True)
def fill(hub: Hub, name: str, content: bytes) -> BoxView:
    """A small binary body."""
    return {"name": name + content.decode(), "count": len(content)}


@verb("PUT /v1/boxes/{name}/stream", least=Role.MEMBER)
async def pour(hub: Hub, name: str, upload: Upload) -> BoxView:
    """A large binary body."""
    return {"name": name, "count": sum([len(chunk) async for chunk in upload.chunks])}


@verb("GET /v1/boxes/{name}/content", least=Role.VIEWER, slow=True)
def take(hub: Hub, name: str) -> Download:
    """A binary response."""
    return Download(name.encode(), {"Polyfleet-Name": name})


@verb("HEAD /v1/boxes/{name}", least=Role.VIEWER)
def exists(hub: Hub, name: str) -> None:
    """200 if there is such a box."""


@verb("GET /v1/whereabouts", least=Role.VIEWER)
def whereabouts(hub: Hub, caller: Caller) -> BoxView:
    """The port of the request."""
    return {"name": str(caller.port), "count": 0}


added: list[int] = []
ended: list[str] = []
BOXES = sys.modules[__name__]


@pytest.fixture
def service(tmp_path, monkeypatch) -> Iterator[Service]:
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))
    added.clear()
    ended.clear()
    service = Service(tmp_path)
    yield service
    service.close()


@pytest.fixture
def client(service, tmp_path) -> Iterator[TestClient]:
    """The real application, with the boxes beside its own routes."""
    app = make_app(service, TOKEN, home=tmp_path)
    app.include_verbs(make_router(BOXES), verbs_of(BOXES))
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    with TestClient(app, "http://127.0.0.1", headers=headers) as client:
        yield client


def events(text: str) -> list[tuple[str, Any]]:
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("event: ")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def field(response: Any) -> tuple[int, str]:
    """Status and name of the field that is wrong."""
    return response.status_code, response.json()["error"]["field"]


def test_each_verb_travels_in_the_way_that_its_signature_has():
    exchanges = {one.name: one.exchange for one in verbs_of(BOXES)}
    assert set(exchanges.values()) == set(Exchange)
    assert (exchanges["show"], exchanges["list"], exchanges["follow"]) == (
        Exchange.PLAIN,
        Exchange.PAGE,
        Exchange.STREAM,
    )
    assert (exchanges["pack"], exchanges["fill"], exchanges["pour"]) == (
        Exchange.OPERATION,
        Exchange.UPLOAD,
        Exchange.UPLOAD,
    )
    assert exchanges["take"] is Exchange.DOWNLOAD


def test_parameters_are_in_the_path_the_url_and_the_body(client):
    assert client.get("/v1/boxes/a").json() == {"name": "red a", "count": 1}
    assert client.get("/v1/boxes/a", params={"color": "blue"}).json() == {"name": "blue a", "count": 1}
    response = client.post("/v1/boxes/a/add", params={"note": "here"}, json={"count": 3})
    assert (response.status_code, response.json()) == (201, {"name": "a here", "count": 1})
    assert added == [3]


def test_bounds_of_a_parameter_are_checked_and_its_field_is_named(client):
    assert field(client.get("/v1/boxes/a", params={"color": "green"})) == (422, "color")
    assert field(client.get("/v1/boxes", params={"limit": 11})) == (422, "limit")
    assert field(client.get("/v1/boxes", params={"before": -1})) == (422, "before")
    assert field(client.get("/v1/boxes", params={"before": 2**63})) == (422, "before")
    assert field(client.post("/v1/boxes/a/add", json={"count": 0})) == (422, "count")
    assert field(client.post("/v1/boxes/a/add", json={"size": 1})) == (422, "size")
    assert added == []


def test_an_error_of_a_verb_has_its_status(client):
    response = client.get("/v1/boxes/none")
    assert (response.status_code, response.json()["error"]["remedy"]) == (404, "name another one")


def test_a_page_names_the_next_one_until_the_last(client):
    names, path = [], "/v1/boxes?limit=2"
    while path:
        response = client.get(path)
        names += [row["name"] for row in response.json()]
        path = response.links.get("next", {}).get("url", "")
    assert names == ["3", "4", "1", "2", "0"]


def test_a_request_with_a_key_counts_once(client):
    key = {"Idempotency-Key": "k"}
    first = client.post("/v1/boxes/a/add", json={}, headers=key)
    again = client.post("/v1/boxes/a/add", json={"count": 1}, headers=key)  # a default that is written out
    assert (first.status_code, first.json()) == (again.status_code, again.json()) == (201, {"name": "a", "count": 1})
    assert client.post("/v1/boxes/a/add", json={"count": 2}, headers=key).status_code == 409
    assert client.post("/v1/boxes/b/add", json={}, headers=key).status_code == 409
    assert added == [1]


def test_concurrent_requests_with_one_key_count_once(client):
    with ThreadPoolExecutor(4) as threads:
        sent = [
            threads.submit(client.post, "/v1/boxes/a/add", json={}, headers={"Idempotency-Key": "k"}) for _ in range(4)
        ]
    assert [one.result().json()["count"] for one in sent] == [1] * 4
    assert added == [1]


def test_a_request_without_a_key_counts_each_time(client):
    assert [client.post("/v1/boxes/a/add", json={}).json()["count"] for _ in range(2)] == [1, 2]


def test_a_verb_with_a_key_answers_repeated_requests_itself(client):
    assert client.post("/v1/boxes/a/make", headers={"Idempotency-Key": "k"}).json()["name"] == "a k"


def test_a_stream_sends_its_events_and_then_calls_back(client):
    response = client.get("/v1/boxes/a/stream")
    assert response.headers["content-type"].startswith(EVENTS)
    assert events(response.text) == [("box", {"name": "a", "count": 1})]
    wait_for(lambda: ended == ["a"])


def test_an_error_before_a_stream_has_a_status_and_a_later_one_is_an_event(client):
    assert client.get("/v1/boxes/none/stream").status_code == 404
    name, data = events(client.get("/v1/boxes/torn/stream").text)[-1]
    assert (name, data["status"], data["message"]) == ("error", 409, "the box is torn")


def test_a_stream_that_cannot_begin_calls_back_too(client, monkeypatch):
    monkeypatch.setattr(streams, "MAX_STREAMS", 0)
    assert client.get("/v1/boxes/a/stream").status_code == 503
    assert ended == ["a"]


def test_an_operation_sends_progress_and_its_result_once_for_each_key(client):
    packed = [client.post("/v1/boxes/a/pack", json={}, headers={"Idempotency-Key": "k"}).text for _ in range(2)]
    first, again = map(events, packed)
    assert ("progress", {"done_bytes": 10, "total_bytes": 10}) in first
    assert first[-1] == again[-1] == ("result", {"name": "a", "count": 1})
    assert added == [1]
    other = events(client.post("/v1/boxes/a/pack", json={"count": 2}, headers={"Idempotency-Key": "k"}).text)
    assert [(name, data["status"]) for name, data in other] == [("error", 409)]


def test_an_operation_that_may_be_repeated_runs_again_despite_a_key(client):
    def weighed():
        response = client.post("/v1/boxes/a/weigh", json={}, headers={"Idempotency-Key": "k"})
        return events(response.text)[-1][1]["count"]

    assert [weighed(), weighed()] == [1, 2]


def test_an_upload_is_read_whole_or_as_it_arrives(client):
    raw = {"Content-Type": BINARY}
    response = client.put("/v1/boxes/a/content", content=b"bc", headers=raw)
    assert (response.status_code, response.json()) == (201, {"name": "abc", "count": 2})
    assert client.put("/v1/boxes/a/stream", content=b"x" * 100_000, headers=raw).json() == {
        "name": "a",
        "count": 100_000,
    }


def test_a_download_is_binary_and_has_headers(client):
    response = client.get("/v1/boxes/a/content")
    assert (response.content, response.headers["polyfleet-name"]) == (b"a", "a")
    assert response.headers["content-type"] == BINARY


def test_a_verb_without_a_result_has_no_body(client):
    response = client.head("/v1/boxes/a")
    assert (response.status_code, response.content) == (200, b"")


def test_a_verb_knows_where_its_request_came_in(client):
    assert client.get("/v1/whereabouts").json()["name"] == "80"


def test_operations_of_the_document_are_actions_and_name_their_views():
    router = make_router(BOXES)
    app = FastAPI()
    app.include_router(router)
    document = app.openapi()
    add_responses(document, [router])
    operations = {one["operationId"]: one for methods in document["paths"].values() for one in methods.values()}
    assert set(operations) == {one.action for one in verbs_of(BOXES)}
    assert operations[f"{NOUN}.show"]["description"] == "One box."
    assert operations[f"{NOUN}.list"]["summary"] == "Boxes, the newest last"
    ok = {name: one["responses"].get("200", {}).get("content", {}) for name, one in operations.items()}
    assert ok[f"{NOUN}.show"]["application/json"]["schema"]["$ref"].endswith("/BoxView")
    names = [one["properties"]["event"]["const"] for one in ok[f"{NOUN}.pack"][EVENTS]["itemSchema"]["oneOf"]]
    assert names == ["error", "progress", "result"]
    keys = {name for name, one in operations.items() if "idempotency-key" in json.dumps(one)}
    assert keys == {f"{NOUN}.{name}" for name in ("add", "make", "pack")}


def test_a_declaration_that_contradicts_itself_is_refused():
    async def change(hub: Hub) -> BoxView:
        return {"name": "", "count": 0}

    def lost(hub: Hub) -> BoxView:
        return {"name": "", "count": 0}

    async def long(hub: Hub, progress: Progress) -> BoxView:
        return {"name": "", "count": 0}

    for function, route in ((change, "POST /a"), (lost, "GET /a/{name}"), (long, "POST /a")):
        verb(route, least=Role.MEMBER)(function)
        with pytest.raises(TypeError, match=function.__name__):
            add_verb(APIRouter(), verb_of(function))
