"""Checks every response of an application against the view that its route names, strictly: no key more, none missing.

In place of the application, `ResponseChecks` serves it and notes what is wrong; a fixture asserts in the end that
nothing is.
"""

import json
from functools import cache
from typing import Any
from urllib.parse import parse_qs

from pydantic import ConfigDict, TypeAdapter, ValidationError

from orchestrator.server.app import ROUTERS
from orchestrator.server.http.response_views import routes_of, view_of
from orchestrator.views.jobs import JobView
from orchestrator.views.values import ErrorBodyView

JSON, BINARY, EVENTS = "application/json", "application/octet-stream", "text/event-stream"
STRICT = ConfigDict(extra="forbid", strict=True)
STATUS = {route.endpoint: route.status_code or 200 for route in routes_of(ROUTERS)}
ENDPOINTS = {route.operation_id: route.endpoint for route in routes_of(ROUTERS)}
LIST_JOBS = ENDPOINTS["jobs.list"]
MAX_CHECKED_BYTES = 4 << 20


@cache
def adapter(view: Any) -> TypeAdapter[Any]:
    """Of a list: pydantic passes the configuration on to what a list contains, but not to a TypedDict itself."""
    return TypeAdapter(list[view], config=STRICT)


def problem(view: Any, text: bytes) -> str:
    """Why JSON is not of a view, or ""."""
    try:
        adapter(view).validate_json(b"[" + text + b"]")
    except ValidationError as e:
        errors = [f"{'.'.join(map(str, error['loc'][1:]))}: {error['msg']}" for error in e.errors()]
        return "; ".join(errors[:5])
    return ""


class ResponseChecks:
    """An ASGI application in place of `app`. `problems` are sentences; one is added as soon as a response is wrong."""

    def __init__(self, app: Any):
        self.app = app
        self.problems: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        response = _Response(self, scope)

        async def sending(message: Any) -> None:
            response.add(message)
            await send(message)

        await self.app(scope, receive, sending)

    def note(self, scope: Any, view: Any, text: bytes) -> None:
        if why := problem(view, text):
            name = getattr(view, "__name__", view)
            self.problems.append(f"{scope['method']} {scope['path']} does not return {name}: {why}\n{text[:500]!r}")


class _Response:
    def __init__(self, checks: ResponseChecks, scope: Any):
        self._checks, self._scope = checks, scope
        self._status, self._type, self._body = 0, "", bytearray()
        self._is_too_long = False

    def add(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = dict(message["headers"])
            self._type = headers.get(b"content-type", b"").decode().partition(";")[0]
            return
        self._is_too_long |= len(self._body) > MAX_CHECKED_BYTES
        if not self._is_too_long:
            self._body += message.get("body", b"")
        if self._type == EVENTS:
            self._check_events()
        elif not message.get("more_body") and not self._is_too_long:
            self._check_body()

    def _check_body(self) -> None:
        if self._scope["method"] == "HEAD" or (self._scope["path"], self._status) == ("/openapi.json", 200):
            return
        if self._status >= 400:
            self._check_type(JSON)
            self._checks.note(self._scope, ErrorBodyView, bytes(self._body))
            return
        endpoint = self._scope["endpoint"]
        if endpoint not in STATUS:
            return  # a test has added it
        if self._status != STATUS[endpoint]:
            self._note(f"returns {self._status}, not {STATUS[endpoint]}")
        named = view_of(endpoint)
        if named.view is None:
            if self._body:
                self._note("has a body")
        elif named.view is bytes:
            self._check_type(BINARY)
        elif fields := self._selected_fields():
            self._check_part(fields)
        else:
            self._check_type(JSON)
            self._checks.note(self._scope, named.view, bytes(self._body))

    def _note(self, problem: str) -> None:
        self._checks.problems.append(f"{self._scope['method']} {self._scope['path']} {problem}")

    def _check_type(self, expected: str) -> None:
        if self._type != expected:
            self._note(f"returns {self._type}, not {expected}")

    def _selected_fields(self) -> str:
        """The fields of jobs that the request selects; the other keys are absent then."""
        query = parse_qs(self._scope["query_string"].decode())
        return query["fields"][-1] if self._scope["endpoint"] is LIST_JOBS and "fields" in query else ""

    def _check_part(self, fields: str) -> None:
        names = {"id", *(name.strip() for name in fields.split(","))}
        for row in json.loads(self._body):
            if set(row) != names:
                self._note(f"returns the fields {sorted(row)}, not {sorted(names)}")
            for name, value in row.items():
                self._checks.note(self._scope, JobView.__annotations__[name], json.dumps(value).encode())

    def _check_events(self) -> None:
        *complete, rest = bytes(self._body).split(b"\n\n")
        self._body = bytearray(rest)
        for block in complete:
            if block.startswith(b":"):
                continue
            name, data = (line.partition(b": ")[2] for line in block.split(b"\n"))
            self._check_event(name.decode(), data)

    def _check_event(self, name: str, data: bytes) -> None:
        named = view_of(self._scope["endpoint"])
        self._checks.note(self._scope, named.view, b'{"%s": %s}' % (name.encode(), data))
