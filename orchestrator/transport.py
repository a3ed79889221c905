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


class Unreachable(FleetError):
    """No answer came. Where a server is started again, the same question may be asked once more."""


class BrokenConnection(Unreachable):
    """The connection ended before an answer came: the server may or may not have acted."""


class Transport:
    """One server, one token. Raises PolyfleetError subclasses and nothing of httpx."""

    def __init__(self, url: str, token: str):
        self.url, self._http = url, _connection(url, token)

    def join(self, url: str, token: str) -> None:
        """Speak to this server from now on."""
        self.close()
        self.url, self._http = url, _connection(url, token)

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
        except UnicodeEncodeError as e:
            raise _not_text(e) from None
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
                            raise _error(data, _by_status(data.get("status", 503)))
                        yield name, data
        except httpx.HTTPError as e:
            raise _unreachable(self.url, e) from e
        except UnicodeEncodeError as e:
            raise _not_text(e) from None


def _connection(url: str, token: str) -> httpx.Client:
    # trust_env off: a proxy from the environment must see neither loopback traffic nor the token
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=TIMEOUT, trust_env=False)


def _not_text(error: UnicodeEncodeError) -> UserError:
    """What was typed or read holds bytes that are no text: Python keeps such a byte as half a surrogate pair."""
    around = error.object[max(error.start - 20, 0) : error.end + 20]
    return UserError(f"not UTF-8 text: {around!r}", "write it as UTF-8; data that is no text belongs into a file")


def _unreachable(url: str, error: httpx.HTTPError) -> Unreachable:
    remedy = "`polyfleet server status` shows whether it runs; its log is logs/server.log"
    if isinstance(error, httpx.TimeoutException):
        return Unreachable(f"the server at {url} did not answer in time", remedy)
    if isinstance(error, httpx.ConnectError):
        return Unreachable(f"the server at {url} cannot be reached: {error}", remedy)
    return BrokenConnection(f"the connection to the server at {url} broke: {error or type(error).__name__}", remedy)


def error_from(status: int, content: bytes) -> PolyfleetError:
    """The error an answer carries, of the class it had in the server or of the nearest one we know."""
    fallback = _by_status(status)
    if status == 401:
        return UserError(
            "the server does not know the token of this home",
            "`polyfleet server stop`, then the same again: the next one reads it anew; jobs and fleet go on meanwhile",
        )
    try:
        return _error(json.loads(content)["error"], fallback)
    except (ValueError, KeyError, TypeError):
        return fallback(f"the server answered {status}" + ("" if status != 404 else ": not found"))


def _by_status(status: int) -> type[PolyfleetError]:
    return BY_STATUS.get(status, UserError if status < 500 else PolyfleetError)


def _error(body: Data, fallback: type[PolyfleetError]) -> PolyfleetError:
    if "field" in body:
        return SpecError(body["field"], body["message"].removeprefix(f"{body['field']}: "), body["remedy"])
    return BY_NAME.get(body["type"], fallback)(body["message"], body["remedy"])


def given(**params: Any) -> Data:
    return {name: value for name, value in params.items() if value is not None}


def segment(text: str) -> str:
    """One path segment, whatever a user typed. Raises NotFound for what no name is: a step up, nothing, several."""
    if text in ("", ".", "..") or "/" in text or not text.isprintable():
        raise NotFound(f"nothing is called {text!r}", "give an id or a name; `polyfleet jobs` lists them")
    return quote(text, safe="")
