"""How requests reach the server, and how its errors come back as the classes they were."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx

from cluster.errors import Conflict, FleetError, NotFound, PolyfleetError, SpecError, UserError

Data = dict[str, Any]
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
PATIENT = httpx.Timeout(None, connect=5.0)
BY_NAME = {e.__name__: e for e in (NotFound, Conflict, UserError, FleetError)}
BY_STATUS = {404: NotFound, 409: Conflict, 503: FleetError}


class BrokenConnection(FleetError):
    """The connection ended before an answer came: the server may or may not have acted."""


class Transport:
    """One server, one token. Raises PolyfleetError subclasses and nothing of httpx."""

    def __init__(self, url: str, token: str):
        self.url = url
        # trust_env off: a proxy from the environment must see neither loopback traffic nor the token
        self._http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=TIMEOUT, trust_env=False
        )

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> Data:
        answer: Data = self.call("GET", path, params=given(**params))
        return answer

    def rows(self, path: str, **params: Any) -> list[Data]:
        answer: list[Data] = self.call("GET", path, params=given(**params))
        return answer

    def post(self, path: str, body: Data, **options: Any) -> Data:
        answer: Data = self.call("POST", path, json=body, **options)
        return answer

    def call(self, method: str, path: str, **options: Any) -> Any:
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as e:
            raise _unreachable(self.url, e) from e
        if response.is_error:
            raise error_from(response.status_code, response.content)
        return response.json() if response.content else None

    def events(self, method: str, path: str, **options: Any) -> Iterator[tuple[str, Any]]:
        """(event name, data) of a stream of server-sent events. An `error` event is raised."""
        try:
            with self._http.stream(method, path, timeout=PATIENT, **options) as response:
                if response.is_error:
                    raise error_from(response.status_code, response.read())
                name = ""
                for line in response.iter_lines():
                    field, _, value = line.partition(": ")
                    if field == "event":
                        name = value
                    elif field == "data":
                        data = json.loads(value)
                        if name == "error":
                            raise _error(data, FleetError)
                        yield name, data
        except httpx.HTTPError as e:
            raise _unreachable(self.url, e) from e


def _unreachable(url: str, error: httpx.HTTPError) -> FleetError:
    remedy = "`polyfleet server status` shows whether it runs; its log is logs/server.log"
    if isinstance(error, httpx.TimeoutException):
        return FleetError(f"the server at {url} did not answer in time", remedy)
    if isinstance(error, httpx.ConnectError):
        return FleetError(f"the server at {url} cannot be reached: {error}", remedy)
    return BrokenConnection(f"the connection to the server at {url} broke: {error or type(error).__name__}", remedy)


def error_from(status: int, content: bytes) -> PolyfleetError:
    """The error an answer carries, of the class it had in the server or of the nearest one we know."""
    fallback = BY_STATUS.get(status, UserError if status < 500 else PolyfleetError)
    try:
        return _error(json.loads(content)["error"], fallback)
    except (ValueError, KeyError, TypeError):
        return fallback(f"the server answered {status}" + ("" if status != 404 else ": not found"))


def _error(body: Data, fallback: type[PolyfleetError]) -> PolyfleetError:
    if "field" in body:
        return SpecError(body["field"], body["message"].removeprefix(f"{body['field']}: "), body["remedy"])
    return BY_NAME.get(body["type"], fallback)(body["message"], body["remedy"])


def given(**params: Any) -> Data:
    return {name: value for name, value in params.items() if value is not None}


def segment(text: str) -> str:
    """One path segment, whatever a user typed. Raises NotFound for what a URL takes for a step up or for nothing."""
    if text in ("", ".", ".."):
        raise NotFound(f"nothing is called {text!r}", "give an id or a name")
    return quote(text, safe="")
