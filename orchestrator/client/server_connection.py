"""Connection to a home's server that survives its restart: interrupted requests are repeated and count once."""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cluster.errors import FleetError, PolyfleetError, UserError
from cluster.version import VERSION
from orchestrator.client.transport import REMEDY, BrokenConnection, ServerUnreachable, Transport
from orchestrator.home import daemon, token
from orchestrator.home.server_record import ServerRecord

Data = dict[str, Any]
Progress = Callable[[str], None]
Bytes = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""
RECONNECT_S = 30.0
RECONNECT_POLL_S = 0.2
TRIES = 4
"""Maximum number of times that a request with a key is sent while no response arrives."""


class ResponseLost(ServerUnreachable):
    """No response arrived to a request with a key. It may be repeated with the same key and then counts only once."""

    def __init__(self, message: str, key: str):
        super().__init__(
            f"{message}; it is unknown whether the server accepted the request",
            f"repeat the command with the same key: it then counts once. On the command line: --key {key}",
        )
        self.args = (message, key)
        self.key = key


def check_version(server: ServerRecord) -> None:
    if server.version != VERSION:
        raise UserError(
            f"the server has version {server.version}, this command has version {VERSION}",
            "run `polyfleet server stop`, then this command again; jobs keep running",
        )


class ServerConnection(Transport):
    """Transport that reconnects, and closes its connections at the end of a `with`.

    With a `home`, waiting and following continue after a restart of the server; the connection itself starts none.
    """

    def __init__(self, url: str, token: str, home: Path | None = None, progress: Progress | None = None):
        super().__init__(url, token)
        self._home = home
        self._progress = progress

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def notify(self, text: str) -> None:
        """Show a message to the user unless it is empty: through `progress`, or as a Python warning without it."""
        if text and self._progress:
            self._progress(text)
        elif text:
            warnings.warn(text, stacklevel=4)

    def _pause(self, pause_s: float, error: PolyfleetError) -> None:
        if self._progress:
            self._progress(f"{error.message}; retrying in {pause_s:g} s")
        super()._pause(pause_s, error)

    def post_once(self, path: str, body: Data, key: str, **options: Any) -> Data:
        """Post a request, repeated with the same key while no response arrives, after a restart to the new server."""
        for tries_left in reversed(range(TRIES)):
            try:
                return self.post(path, body, headers={"Idempotency-Key": key}, **options)
            except ServerUnreachable as e:
                self._prepare_retry(e, key, tries_left)
        raise AssertionError("the last try returns or raises")

    def _prepare_retry(self, error: ServerUnreachable, key: str, tries_left: int) -> None:
        """Wait until a request can be sent again. Raises ResponseLost."""
        if not tries_left:
            raise ResponseLost(error.message, key) from error
        if self._home is not None:
            try:
                self.reconnect(error)
            except ServerUnreachable:
                raise ResponseLost(error.message, key) from error

    def reconnect(self, error: FleetError) -> None:
        """Wait until a server of this home responds again. Raises `error` if none does within RECONNECT_S."""
        if self._home is None:
            raise error
        if self._progress:
            self._progress(f"{error.message}; waiting up to {RECONNECT_S:.0f} s for the server to come back")
        deadline = time.monotonic() + RECONNECT_S
        while time.monotonic() < deadline:
            time.sleep(RECONNECT_POLL_S)
            if (server := daemon.find_server(self._home)) is None:
                continue
            check_version(server)
            try:
                self.switch_server(server.address, token.read(self._home))
                self.get("/v1/version")
            except ServerUnreachable:
                continue
            return
        raise error

    def _reload_token(self) -> bool:
        """Read the token of a restarted server, which has a new one in the same file."""
        if self._home is None or (server := daemon.find_server(self._home)) is None:
            return False
        if (fresh := token.read(self._home)) == self._token:
            return False
        check_version(server)
        self.switch_server(server.address, fresh)
        return True

    def run_operation(self, path: str, body: Data, progress: Bytes | None, key: str, **options: Any) -> Data:
        """Run a long operation and return its result. If the connection breaks, repeat it with the same key."""
        options |= {"json": body, "headers": {"Idempotency-Key": key}}
        for tries_left in reversed(range(TRIES)):
            try:
                for name, data in self.events("POST", path, **options):
                    if name == "result":
                        result: Data = data
                        return result
                    if progress and name == "progress":
                        progress(data["done_bytes"], data["total_bytes"])
                error: ServerUnreachable = BrokenConnection(
                    "the server stopped before the operation was finished", REMEDY
                )
            except ServerUnreachable as e:
                error = e
            self._prepare_retry(error, key, tries_left)
        raise AssertionError("the last try returns or raises")
