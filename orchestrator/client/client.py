"""REST client of the server, which it finds or starts. The CLI and `orchestrator.Orchestrator` both use it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import paths
from cluster.errors import FleetError
from orchestrator.client.link import Link
from orchestrator.client.server_connection import TRIES, Progress, check_version
from orchestrator.client.transport import ServerUnreachable
from orchestrator.client.verbs.benchmarks import Benchmarks
from orchestrator.client.verbs.changes import Changes
from orchestrator.client.verbs.checkpoints import Checkpoints
from orchestrator.client.verbs.code_archives import CodeArchives
from orchestrator.client.verbs.data import Data as DataVerbs
from orchestrator.client.verbs.execs import Execs
from orchestrator.client.verbs.files import Files
from orchestrator.client.verbs.fleet import Fleet
from orchestrator.client.verbs.jobs import Jobs
from orchestrator.client.verbs.nodes import Nodes
from orchestrator.client.verbs.schema import Schema
from orchestrator.client.verbs.server import Server
from orchestrator.core.states import TERMINAL
from orchestrator.home import daemon, token

if TYPE_CHECKING:
    from orchestrator.views.jobs import JobView

POLL_S = (0.05, 1.0)


def connect(home: Path | None = None, *, start: bool = True, progress: Progress | None = None) -> "Client":
    """Return a client of this home's server. If none runs, start one; raises FleetError instead if `start` is false.

    Raises UserError if the running server has another version.
    """
    home = home or paths.home()
    token.check_token_private(home)
    server = daemon.find_server(home)
    if server is None and not start:
        raise FleetError("no server is running", "start it with `polyfleet server start`")
    server = server or daemon.start_server(home, progress=progress)
    check_version(server)
    return Client(server.address, token.read(home), home, progress)


class Client(Link):
    """The server's verbs by noun, and what is more than one verb. docs/reference/rest.md describes the responses."""

    @property
    def benchmarks(self) -> Benchmarks:
        return Benchmarks(self)

    @property
    def changes(self) -> Changes:
        return Changes(self)

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self)

    @property
    def code_archives(self) -> CodeArchives:
        return CodeArchives(self)

    @property
    def data(self) -> DataVerbs:
        return DataVerbs(self)

    @property
    def execs(self) -> Execs:
        return Execs(self)

    @property
    def files(self) -> Files:
        return Files(self)

    @property
    def fleet(self) -> Fleet:
        return Fleet(self)

    @property
    def jobs(self) -> Jobs:
        return Jobs(self)

    @property
    def nodes(self) -> Nodes:
        return Nodes(self)

    @property
    def schema(self) -> Schema:
        return Schema(self)

    @property
    def server(self) -> Server:
        return Server(self)

    def wait(
        self, ref: str, timeout_s: float | None = None, on_update: "Callable[[JobView], None] | None" = None
    ) -> "JobView":
        """Wait until the job has ended and return it. Each view until then is passed to `on_update`. Raises FleetError
        after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = POLL_S[0]
        while True:
            try:
                view = self.jobs.show(ref)
            except ServerUnreachable as e:
                self.reconnect(e)
                continue
            ref = view["id"]
            if on_update:
                on_update(view)
            if view["state"] in TERMINAL:
                return view
            if deadline is not None and time.monotonic() > deadline:
                raise FleetError(
                    f"{view['id']} is still {view['state']} after {timeout_s:g} s",
                    "the job is still running; wait again",
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.3, POLL_S[1])

    def upload_code_archive(self, sha: str, archive: Path) -> None:
        """Send a code archive unless the server has it. Its content hash is its name, so sending it twice is safe."""
        for tries_left in reversed(range(TRIES)):
            try:
                if not self.code_archives.check(sha):
                    with archive.open("rb") as f:
                        self.code_archives.put(sha, f)
                return
            except ServerUnreachable as e:
                if not tries_left:
                    raise
                if self._home is not None:
                    self.reconnect(e)
