"""A connection to the server of a home that outlives the server: broken requests are sent again, and count once."""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from cluster.errors import FleetError, PolyfleetError, UserError
from cluster.version import VERSION
from orchestrator.server import daemon, token
from orchestrator.server.server_record import ServerRecord
from orchestrator.transport import REMEDY, BrokenConnection, ServerUnreachable, Transport

Data = dict[str, Any]
Progress = Callable[[str], None]
Bytes = Callable[[int, int], None]
"""Told bytes done and bytes in all."""
RECONNECT_S = 30.0
RECONNECT_EVERY_S = 0.2
TRIES = 4
"""How often a request with a key is sent while no answer comes."""


class ResponseLost(ServerUnreachable):
    """No answer came to a request with a key: it counts once, and may be asked again with the same key."""

    def __init__(self, said: str, key: str):
        super().__init__(
            f"{said}; whether it was accepted is not known",
            f"repeat the same with the same key: it counts once. On the command line: --key {key}",
        )
        self.args = (said, key)
        self.key = key


def check_version(server: ServerRecord) -> None:
    if server.version != VERSION:
        raise UserError(
            f"the server is of version {server.version}, this is {VERSION}",
            "run `polyfleet server stop`, then this command again; jobs keep running",
        )


class ServerConnection(Transport):
    """Closes its connections at the end of a `with`.

    With a `home`, waiting and following outlive a restart of its server: the next one is looked for, not started.
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

    def tell(self, text: str) -> None:
        """Something the user has to know, "" being nothing; a warning of Python's where nobody listens."""
        if text and self._progress:
            self._progress(text)
        elif text:
            warnings.warn(text, stacklevel=4)

    def _pause(self, pause_s: float, error: PolyfleetError) -> None:
        if self._progress:
            self._progress(f"{error.message}; asking again in {pause_s:g} s")
        super()._pause(pause_s, error)

    def once(self, path: str, body: Data, key: str) -> Data:
        """Sent again with the same key while no answer comes, to the server that is there by then."""
        key = key or uuid4().hex
        for tries_left in reversed(range(TRIES)):
            try:
                return self.post(path, body, headers={"Idempotency-Key": key})
            except ServerUnreachable as e:
                self._again(e, key, tries_left)
        raise AssertionError("the last try returns or raises")

    def _again(self, error: ServerUnreachable, key: str, tries_left: int) -> None:
        """Returns when it makes sense to ask again. Raises ResponseLost."""
        if not tries_left:
            raise ResponseLost(error.message, key) from error
        if self._home is not None:
            try:
                self.reconnect(error)
            except ServerUnreachable:
                raise ResponseLost(error.message, key) from error

    def reconnect(self, error: FleetError) -> None:
        """Returns once a server of this home answers again; raises `error` when none does within RECONNECT_S."""
        if self._home is None:
            raise error
        if self._progress:
            self._progress(f"{error.message}; waiting {RECONNECT_S:.0f} s for it to come back")
        deadline = time.monotonic() + RECONNECT_S
        while time.monotonic() < deadline:
            time.sleep(RECONNECT_EVERY_S)
            if (server := daemon.find_server(self._home)) is None:
                continue
            check_version(server)
            try:
                self.join(server.address, token.read(self._home))
                self.get("/v1/version")
            except ServerUnreachable:
                continue
            return
        raise error

    def _renewed(self) -> bool:
        """A server that was started anew has a new token, at the same place."""
        if self._home is None or (server := daemon.find_server(self._home)) is None:
            return False
        if (fresh := token.read(self._home)) == self._token:
            return False
        check_version(server)
        self.join(server.address, fresh)
        return True

    def told(self, path: str, order: Data, progress: Bytes | None, key: str) -> Data:
        """The report of long work. Where the connection breaks it is asked for again with the same key."""
        key = key or uuid4().hex
        for tries_left in reversed(range(TRIES)):
            try:
                for name, data in self.events("POST", path, json=order, headers={"Idempotency-Key": key}):
                    if name == "report":
                        report: Data = data
                        return report
                    if progress and name == "progress":
                        progress(data["done_bytes"], data["total_bytes"])
                gone: ServerUnreachable = BrokenConnection("the server stopped before the work was finished", REMEDY)
            except ServerUnreachable as e:
                gone = e
            self._again(gone, key, tries_left)
        raise AssertionError("the last try returns or raises")
