"""Send requests to the server, and turn its error responses back into exceptions of their classes.

The token is sent only over a connection whose other end has been checked: a Unix socket of a process of this user, in a
folder that only this user can enter; or a TCP port of this user whose server proved that it has the token.
"""

import json
import os
import ssl
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from cluster.errors import Conflict, FleetError, NotFound, PolyfleetError, SpecError, UserError
from cluster.host import ports
from orchestrator.home import server_authentication, unix_socket
from orchestrator.home.server_record import UNIX

Data = dict[str, Any]
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
NO_TIMEOUT = httpx.Timeout(None, connect=5.0)
MAX_TRIES = 5
"""Maximum number of times that a request is sent which the server refuses because of overload."""
MAX_PAUSE_S = 10.0
HTTP_PORT = 80
LOOPBACK = ("127.0.0.1", "localhost", "::1")
OWN_UIDS = frozenset({os.geteuid()})
REMEDY = "`polyfleet server status` shows whether it runs; its log is logs/server.log"
BY_NAME = {e.__name__: e for e in (NotFound, Conflict, UserError, FleetError)}
BY_STATUS = {404: NotFound, 409: Conflict, 429: FleetError, 503: FleetError}


class ServerUnreachable(FleetError):
    """No response arrived. After a restart of the server, the same request may be sent again."""


class BrokenConnection(ServerUnreachable):
    """The connection ended before a response arrived: the server may or may not have acted."""


class Transport:
    """HTTP client of one server with one token. Raises subclasses of PolyfleetError, never exceptions of httpx.

    `url` is `unix:` and the path of a socket, or the URL of a TCP port. Raises ServerUnreachable, FleetError.
    """

    def __init__(self, url: str, token: str):
        self._open(url, token)

    def switch_server(self, url: str, token: str) -> None:
        """Switch to another server. Raises as the constructor does."""
        self.close()
        self._open(url, token)

    def close(self) -> None:
        self._http.close()
        self._close_folder()

    def _open(self, url: str, token: str) -> None:
        self.url, self._token, self._close_folder = url, token, _close_nothing
        uds = None
        if url.startswith(UNIX):
            uds = self._open_socket_folder(Path(url.removeprefix(UNIX)))
        self._http = _connection(url, token, uds)

    def _open_socket_folder(self, path: Path) -> str:
        """Return the path to connect to. Its folder stays open until `close` or until this object is collected."""
        try:
            folder = unix_socket.open_folder(path)
        except OSError as e:
            raise ServerUnreachable(f"the server at {self.url} cannot be reached: {e.strerror}", REMEDY) from None
        self._close_folder = weakref.finalize(self, os.close, folder)
        return unix_socket.short_socket_path(folder, path)

    def _reload_token(self) -> bool:
        """Switch to a new token if there is one; return whether there was."""
        return False

    def _check_peer(self, event: str, info: Data) -> None:
        """Callback of httpx's request extension `trace`, called at each step of a request (decision 0026). Checks the
        other end of a new connection before anything is sent to it. Raises ServerUnreachable.
        """
        if event not in ("connection.connect_unix_socket.complete", "connection.connect_tcp.complete"):
            return
        stream = info["return_value"]
        try:
            if reason := self._peer_problem(stream):
                raise ServerUnreachable(f"the process that listens at {self.url} {reason}; nothing was sent", REMEDY)
        except BaseException:
            stream.close()
            raise

    def _peer_problem(self, stream: Any) -> str:
        """Why the other end is not this home's server; "" if it is."""
        if self.url.startswith(UNIX):
            uid = unix_socket.peer_uid(stream.get_extra_info("socket"))
            return "" if uid in (None, os.geteuid()) else "belongs to another user"
        url = urlsplit(self.url)
        port = url.port or HTTP_PORT
        if url.hostname in LOOPBACK and (ports.listener_uids(port) or OWN_UIDS) != OWN_UIDS:
            return "belongs to another user"
        if not server_authentication.verify_server(stream, port, self._token):
            return "is not this home's server: it did not prove that it has the token"
        return ""

    def get(self, path: str, **params: Any) -> Data:
        result: Data = self.call("GET", path, params=non_empty(**params))
        return result

    def rows(self, path: str, **params: Any) -> list[Data]:
        result: list[Data] = self.call("GET", path, params=non_empty(**params))
        return result

    def post(self, path: str, body: Data, **options: Any) -> Data:
        result: Data = self.call("POST", path, json=body, **options)
        return result

    def call(self, method: str, path: str, **options: Any) -> Any:
        response = self.send_request(method, path, **options)
        return response.json() if response.content else None

    def send_request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request and return its successful response. If the server is overloaded, retry a few times after the
        pause that it requests. `content` is bytes, or an open file, which a retry sends from its start.
        """
        file = content if hasattr(content := options.get("content"), "seek") else None
        for tries_left in reversed(range(MAX_TRIES)):
            response = self._send(method, path, **options)
            if response.status_code == 401 and file is None and self._reload_token():
                response = self._send(method, path, **options)
            if not response.is_error:
                return response
            error = error_from(response.status_code, response.content)
            pause_s = retry_after_s(response)
            if pause_s is None or not tries_left:
                break
            self._pause(pause_s, error)
            if file is not None:
                file.seek(0)
        raise error

    def _pause(self, pause_s: float, error: PolyfleetError) -> None:
        """Wait before sending a refused request again."""
        time.sleep(pause_s)

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request; repeat a GET if the connection breaks, since the server may close idle ones any time."""
        try:
            return self._request(method, path, **options)
        except BrokenConnection:
            if method != "GET":
                raise
            return self._request(method, path, **options)

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, extensions={"trace": self._check_peer}, **options)
        except httpx.HTTPError as e:
            raise _unreachable(self.url, e) from e
        except UnicodeEncodeError as e:
            raise _encoding_error(e) from None
        except RuntimeError:
            if not self._http.is_closed:
                raise
            raise FleetError(
                f"this client is closed; it was connected to the server at {self.url}", "connect again"
            ) from None

    def events(self, method: str, path: str, **options: Any) -> Iterator[tuple[str, Any]]:
        """Yield (event name, data) of a stream of server-sent events. An `error` event is raised. If the server is
        overloaded, retry as `send_request` does.
        """
        for tries_left in reversed(range(MAX_TRIES)):
            with self._stream(method, path, **options) as response:
                if not response.is_error:
                    yield from _events_of(response)
                    return
                error = error_from(response.status_code, response.read())
                pause_s = retry_after_s(response)
            if pause_s is None or not tries_left:
                raise error
            self._pause(pause_s, error)

    @contextmanager
    def _stream(self, method: str, path: str, **options: Any) -> Iterator[httpx.Response]:
        try:
            extensions = {"trace": self._check_peer}
            with self._http.stream(method, path, timeout=NO_TIMEOUT, extensions=extensions, **options) as response:
                if response.status_code == 401 and self._reload_token():
                    raise BrokenConnection("the server was restarted in the meantime", REMEDY)
                yield response
        except httpx.HTTPError as e:
            raise _unreachable(self.url, e) from e
        except UnicodeEncodeError as e:
            raise _encoding_error(e) from None


def _events_of(response: httpx.Response) -> Iterator[tuple[str, Any]]:
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


def _connection(url: str, token: str, uds: str | None) -> httpx.Client:
    return httpx.Client(
        base_url="http://localhost" if uds else url,
        headers={"Authorization": f"Bearer {token}"},
        timeout=TIMEOUT,
        trust_env=False,  # a proxy from the environment must see neither loopback traffic nor the token
        # There is no TLS: a context without certificates saves reading the system's.
        transport=httpx.HTTPTransport(uds=uds, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)),
    )


def _close_nothing() -> None:
    """Release nothing: a TCP transport has no folder to close."""


def _encoding_error(error: UnicodeEncodeError) -> UserError:
    """Error for input with bytes that are not UTF-8: Python represents such a byte as half a surrogate pair."""
    around = error.object[max(error.start - 20, 0) : error.end + 20]
    return UserError(f"not UTF-8 text: {around!r}", "write it as UTF-8, or put binary data into a file")


def _unreachable(url: str, error: httpx.HTTPError) -> ServerUnreachable:
    if isinstance(error, httpx.TimeoutException):
        return ServerUnreachable(f"the server at {url} did not respond in time", REMEDY)
    if isinstance(error, httpx.ConnectError):
        return ServerUnreachable(f"the server at {url} cannot be reached: {error}", REMEDY)
    return BrokenConnection(f"the connection to the server at {url} broke: {error or type(error).__name__}", REMEDY)


def error_from(status: int, content: bytes) -> PolyfleetError:
    """The error in a response, of the class it had in the server, or the nearest one that exists here."""
    fallback = _by_status(status)
    if status == 401:
        return UserError(
            "the server does not know the token of this home",
            "run `polyfleet server stop`, then this command again: the new server reads the token; jobs keep running",
        )
    try:
        return _error(json.loads(content)["error"], fallback)
    except (ValueError, KeyError, TypeError):
        return fallback(f"the server returned status {status}" + ("" if status != 404 else ": not found"))


def _by_status(status: int) -> type[PolyfleetError]:
    return BY_STATUS.get(status, UserError if status < 500 else PolyfleetError)


def _error(body: Data, fallback: type[PolyfleetError]) -> PolyfleetError:
    if "field" in body:
        return SpecError(body["field"], body["message"].removeprefix(f"{body['field']}: "), body["remedy"])
    return BY_NAME.get(body["type"], fallback)(body["message"], body["remedy"])


def retry_after_s(response: httpx.Response) -> float | None:
    """Seconds after which to repeat a refused request, at most MAX_PAUSE_S. None: do not repeat it."""
    text = response.headers.get("Retry-After", "")
    if response.status_code not in (429, 503) or not text.isascii() or not text.isdigit():
        return None
    return min(float(text[:9]), MAX_PAUSE_S)


def non_empty(**params: Any) -> Data:
    return {name: value for name, value in params.items() if value is not None}


def segment(text: str) -> str:
    """Quote a name that a user typed as one segment of a path. NotFound for "", ".", ".." or with a slash."""
    if text in ("", ".", "..") or "/" in text or not text.isprintable():
        raise NotFound(f"{text!r} is not a valid name", "write an id or a name; `polyfleet jobs` lists them")
    return quote(text, safe="")
