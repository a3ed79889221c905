"""No parameter of any route, however strange, makes the server fail: it is refused as the client's mistake."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote_from_bytes

import httpx
import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import LIMIT_S
from response_checks import ResponseChecks

from orchestrator.core.jobs.fold import submitted
from orchestrator.server.app import make_app
from orchestrator.server.serve import listener, server_config
from orchestrator.services.service import Service
from orchestrator.spec.job_spec import parse_job

TOKEN = "t" * 64
RUN = {"task": "run", "command": "true", "name": "hello"}
NUMBERS = (0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**19, 10**400)
WORDS = ("", "nan", "-nan", "inf", "-Infinity", "1e400", "1.9", "0x10", "true", "null", "16", " 1 ", "١٢", "a" * 5000)
CURSORS = (
    '{"1.0": 9223372036854775808}', '{"1.0": -1}', '{"1.0": 1e999}', '{"1.0": [1]}', '{"1.0": NaN}', '{"1.0": true}',
    "[" * 3000, '{"a":' * 40 + "1" + "}" * 40, '{"": 1}', '{"x.y": 1}', '{"1": 1}', '"a"', "7", '{"\\ud800": 1}',
)  # fmt: skip
BYTES = (
    b"\xed\xa0\x80",
    b"\xff\xfe",
    b"\x00",
    b"..",
    b"../../token",
    b"a\x00b",
    b"\xe2\x80\xa8",
    b"hello",
    b"cpu:x",
    b"x://y",
)
ENDED_BY_CLIENT = "/v1/changes/stream"
"""A stream without an end."""
WAIT = "/v1/changes"
NOT_ASKED = "/v1/shutdown"

texts = st.one_of(
    st.sampled_from([str(n) for n in NUMBERS] + list(WORDS) + list(CURSORS)).map(
        lambda s: s.encode("utf-8", "replace")
    ),
    st.sampled_from(BYTES),
    st.binary(max_size=40),
    st.integers().map(lambda n: str(n).encode()),
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from(NUMBERS), st.floats(), st.sampled_from(WORDS + CURSORS),
    st.text(st.characters(), max_size=20), st.sampled_from(["\ud800", "a\udfff", "\x00"]),
)  # fmt: skip
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
FIELDS = (
    "task", "command", "name", "resources", "accelerators", "count", "nodes", "priority", "checkpoint", "resume_from",
    "arguments", "secrets", "entry", "timeout_s", "cases", "rounds", "pools", "spec", "code_archive", "ref", "source",
)  # fmt: skip


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The real service without a fleet, with one job in its store, behind the real server."""
    home: Path = tmp_path_factory.mktemp("home")
    patch = pytest.MonkeyPatch()
    patch.setenv("POLYFLEET_HOME", str(home))
    service = Service(home)
    service.jobs_table.commit([submitted(parse_job(RUN).to_job("hello-1", time.time()), RUN, time.time())])
    app = make_app(service, TOKEN, home=home)
    checks = ResponseChecks(app)
    with listener(0) as listening:
        server = uvicorn.Server(server_config(checks))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        url, headers = f"http://127.0.0.1:{listening.getsockname()[1]}", {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=LIMIT_S) as client:
            yield client
        app.state.stopping.set()
        server.should_exit = True
        thread.join(LIMIT_S)
    service.close()
    patch.undo()
    assert not checks.problems, "\n".join(checks.problems)


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if path != NOT_ASKED
    ]


DOCUMENT = make_app(cast(Service, None), "").openapi()


def of_kind(parameter: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Mostly what is nearly right for it: numbers where there should be one, JSON for a cursor."""
    if parameter["name"] == "cursor":
        return st.sampled_from([c.encode() for c in CURSORS]) | texts
    whole = {part.get("type") for part in [parameter["schema"], *parameter["schema"].get("anyOf", [])]}
    if whole & {"integer", "number"}:
        return st.sampled_from([str(n).encode() for n in NUMBERS]) | texts
    return st.just(b"hello-1") | texts


def asked(data: st.DataObject, path: str, operation: dict[str, Any]) -> str:
    """The path with its parameters filled in; each query parameter is there or not."""
    query = []
    for parameter in operation.get("parameters", []):
        name = parameter["name"]
        if parameter["in"] == "path":
            path = path.replace(f"{{{name}}}", quote_from_bytes(data.draw(of_kind(parameter)), safe="") or "x")
        elif parameter["in"] == "query" and (parameter.get("required") or data.draw(st.booleans())):
            query.append(f"{name}={quote_from_bytes(data.draw(of_kind(parameter)), safe='')}")
    return path + ("?" + "&".join(query) if query else "")


def body(data: st.DataObject, operation: dict[str, Any]) -> dict[str, Any]:
    """Something near to what the route wants, or nothing like it."""
    names: list[str] = []
    for content in operation.get("requestBody", {}).get("content", {}).values():
        names = list(DOCUMENT["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]["properties"])
    mapping = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), values, max_size=4)
    near = st.fixed_dictionaries({}, optional=dict.fromkeys(names, mapping | values))
    sent = json.dumps(data.draw(near | values), allow_nan=True).encode()
    return {"content": sent, "headers": {"Content-Type": "application/json"}}


def ask(live: httpx.Client, method: str, path: str, **options: Any) -> tuple[int, str]:
    """Status and text; of a stream without an end only the status. A wait for changes that was accepted is cut off."""
    try:
        return answered(live, method, path, options)
    except httpx.ReadTimeout:
        assert path.startswith(WAIT)
        return 200, ""


def answered(live: httpx.Client, method: str, path: str, options: dict[str, Any]) -> tuple[int, str]:
    timeout_s = 0.5 if path.startswith(WAIT) and not path.startswith(ENDED_BY_CLIENT) else 30
    with live.stream(method, path, timeout=timeout_s, **options) as response:
        endless = response.status_code == 200 and path.startswith(ENDED_BY_CLIENT)
        follows = response.status_code == 200 and "/logs/stream" in path
        if endless or follows:
            return response.status_code, ""
        return response.status_code, response.read().decode()


@pytest.mark.parametrize(
    ("method", "path", "operation"),
    operations(DOCUMENT),
    ids=[f"{verb}-{path}" for verb, path, _ in operations(DOCUMENT)],
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_no_parameter_makes_the_server_fail(
    live: httpx.Client, method: str, path: str, operation: dict[str, Any], data: st.DataObject
):
    url = asked(data, path, operation)
    options = body(data, operation) if method == "POST" else {}
    if method == "PUT":
        options = {"content": data.draw(st.binary(max_size=50)), "headers": {"Content-Type": "application/zip"}}
    status, text = ask(live, method, url, **options)
    assert status != 500 and "InternalError" not in text, (method, url, options, text[:500])
    assert status < 500 or status == 503, (method, url, text[:500])


@pytest.mark.parametrize("after", [2**63, 10**400, -1])
@pytest.mark.parametrize(
    "path", ["/v1/jobs/hello-1/reports", "/v1/changes", "/v1/changes/stream", "/v1/benchmarks/x/lines"]
)
def test_a_number_beyond_64_bits_is_refused_with_its_name(live: httpx.Client, path: str, after: int):
    answer = live.get(path, params={"after": str(after)})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "after")


@pytest.mark.parametrize("cursor", CURSORS)
def test_a_cursor_that_is_none_is_refused_or_ignored(live: httpx.Client, cursor: str):
    answer = live.get("/v1/jobs/hello-1/logs", params={"cursor": cursor})
    assert answer.status_code in (200, 422), answer.text


@pytest.mark.parametrize("timeout_s", ["nan", "inf", "-1", "1e400", "31"])
def test_a_wait_has_a_length(live: httpx.Client, timeout_s: str):
    assert live.get("/v1/changes", params={"timeout_s": timeout_s}).status_code == 422


@pytest.mark.parametrize("number", ["9" * 19, "-" + "9" * 19, "1" + "0" * 400])
def test_a_body_holds_no_number_beyond_64_bits(live: httpx.Client, number: str):
    headers = {"Content-Type": "application/json"}
    sent = '{"spec": {"task": "run", "command": "true", "priority": ' + number + "}}"
    assert live.post("/v1/jobs", content=sent.encode(), headers=headers).status_code == 422
