"""REST client of the server, which it finds or starts. The CLI and `orchestrator.Orchestrator` both use it."""

import base64
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cluster import paths
from cluster.errors import FleetError, NotFound
from orchestrator.client.file_client import FileClient
from orchestrator.client.server_connection import TRIES, Bytes, Data, Progress, check_version
from orchestrator.client.transport import NO_TIMEOUT, ServerUnreachable, non_empty, segment
from orchestrator.core.states import TERMINAL
from orchestrator.home import daemon, token

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


class Client(FileClient):
    """One method per route; docs/reference/rest.md describes the responses."""

    def version(self) -> Data:
        return self.get("/v1/version")

    def fleet(self) -> Data:
        return self.get("/v1/fleet")

    def nodes(self) -> list[Data]:
        return self.rows("/v1/nodes")

    def health(self) -> Data:
        return self.get("/v1/health")

    def doctor(self) -> list[Data]:
        return self.rows("/v1/doctor")

    def schema(self, kind: str) -> Data:
        return self.get(f"/v1/schema/{segment(kind)}")

    def shutdown(self) -> Data:
        return self.post("/v1/shutdown", {})

    def submit(self, spec: Data, code_archive: str = "", key: str = "") -> Data:
        """Submit a job and return it as accepted. Raises ResponseLost if no response arrives; repeating the call with
        the same key submits the job only once.
        """
        return self.post_once("/v1/jobs", {"spec": spec, "code_archive": code_archive}, key)

    def submit_many(self, jobs: list[Data], key: str = "") -> Data:
        """Submit up to 1,000 of {"spec", "code_archive"}, all or none. Returns {"jobs": [{"id", "name"}], "note"}.

        Raises as `submit` does.
        """
        return self.post_once("/v1/jobs/bulk", {"jobs": jobs}, key)

    def plan(self, spec: Data, content_sha: str = "") -> Data:
        """Plan a job without submitting it. `content_sha`: SHA-256 of the content of its folder, "" without one."""
        return self.post("/v1/plan", {"spec": spec, "content_sha": content_sha})

    def offers(self, spec: Data, content_sha: str = "") -> Data:
        """List where a job could run now: {"offers", "impossible"}. `content_sha` as for `plan`."""
        return self.post("/v1/offers", {"spec": spec, "content_sha": content_sha})

    def jobs(
        self,
        states: list[str] | None = None,
        limit: int = 100,
        *,
        name: str = "",
        since_s: float = 0.0,
        fields: tuple[str, ...] = (),
    ) -> list[Data]:
        """The newest `limit` jobs, the newest last. `fields`: those of a job's view."""
        return self.rows("/v1/jobs", **_job_params(states, limit, name, since_s, fields))

    def job_pages(
        self,
        states: list[str] | None = None,
        *,
        name: str = "",
        since_s: float = 0.0,
        fields: tuple[str, ...] = (),
        page: int = 1000,
    ) -> Iterator[list[Data]]:
        """All jobs, page by page: the newest page first; within a page the newest job is last."""
        path: str = "/v1/jobs"
        params: Data | None = _job_params(states, page, name, since_s, fields)
        while path:
            response = self.send_request("GET", path, params=params)
            yield response.json()
            path, params = response.links.get("next", {}).get("url", ""), None

    def job(self, ref: str) -> Data:
        return self.get(f"/v1/jobs/{segment(ref)}")

    def wait(self, ref: str, timeout_s: float | None = None, on_update: Callable[[Data], None] | None = None) -> Data:
        """Wait until the job has ended and return it. Each view until then is passed to `on_update`. Raises FleetError
        after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = POLL_S[0]
        while True:
            try:
                view = self.job(ref)
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

    def cancel(self, ref: str) -> Data:
        return self.post(f"/v1/jobs/{segment(ref)}/cancel", {})

    def migrate(self, ref: str, to: str) -> Data:
        """Move a job. `to` is a pool, a kind or a back end."""
        return self.post(f"/v1/jobs/{segment(ref)}/migrate", {"to": to})

    def node_drain(self, node: str, now: bool = False, reason: str = "") -> Data:
        return self.post(f"/v1/nodes/{segment(node)}/drain", {"now": now, "reason": reason})

    def node_resume(self, node: str) -> Data:
        return self.post(f"/v1/nodes/{segment(node)}/resume", {})

    def node_remove(self, node: str) -> Data:
        return self.post(f"/v1/nodes/{segment(node)}/remove", {})

    def explain(self, ref: str, changes: Sequence[str] = ()) -> Data:
        return self.get(f"/v1/jobs/{segment(ref)}/explain", **({"if": list(changes)} if changes else {}))

    def history(self, ref: str) -> list[Data]:
        return self.rows(f"/v1/jobs/{segment(ref)}/history")

    def story(self, ref: str) -> Data:
        """Events of a job, and what the server did about it after which message: {"job", "events", "steps"}."""
        return self.get(f"/v1/jobs/{segment(ref)}/story")

    def reports(self, ref: str, after: int = 0) -> list[Data]:
        return self.rows(f"/v1/jobs/{segment(ref)}/reports", after=after)

    def logs(
        self,
        ref: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        tail: int | None = None,
        cursor: dict[str, int] | None = None,
    ) -> Data:
        """One page of the log: {"job", "lines", "cursor", "ended", "away"}. To read all, repeat with the job and cursor
        of the last page until a page has no lines.
        """
        where = {"rank": rank, "attempt": attempt, "tail": tail, "cursor": json.dumps(cursor) if cursor else None}
        return self.get(f"/v1/jobs/{segment(ref)}/logs", **where)

    def follow_logs(
        self, ref: str, *, rank: int | None = None, attempt: int | None = None, tail: int | None = None
    ) -> Iterator[Data]:
        """Yield every log line as it arrives, until the job has ended and its log is read to the end."""
        for lines in self.follow_log_pages(ref, rank=rank, attempt=attempt, tail=tail):
            yield from lines

    def follow_log_pages(
        self, ref: str, *, rank: int | None = None, attempt: int | None = None, tail: int | None = None
    ) -> Iterator[list[Data]]:
        """Yield the lines of `follow_logs` in the batches in which they arrive. A job's name is resolved only once."""
        for page in self.log_pages(ref, rank=rank, attempt=attempt, tail=tail):
            yield page["lines"]

    def log_pages(
        self,
        ref: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        tail: int | None = None,
        cursor: dict[str, int] | None = None,
    ) -> Iterator[Data]:
        """Yield the same batches as {"job", "lines", "cursor"}; an interrupted caller can continue with `cursor`."""
        while True:
            at = json.dumps(cursor) if cursor else None
            where = non_empty(rank=rank, attempt=attempt, tail=tail, cursor=at)
            try:
                for name, data in self.events("GET", f"/v1/jobs/{segment(ref)}/logs/stream", params=where):
                    if name == "end":
                        return
                    ref, cursor, tail = data["job"], data["cursor"], None
                    yield data
                error = FleetError(
                    "the server has stopped", f"run `polyfleet logs -f {ref}`: it starts a server and continues the log"
                )
            except ServerUnreachable as e:
                error = e
            self.reconnect(error)

    def exec_run(self, ref: str, order: Data) -> Iterator[tuple[str, Data]]:
        """Run a command in a job. Yields ("started", {"exec", "job", "attempt", "rank", "node"}), then ("output",
        {"stream", "data"}) as it arrives, then ("end", {"code", "reason"}). Closing this iterator ends the command.
        `order` is the request's body.
        """
        yield from self.events("POST", f"/v1/jobs/{segment(ref)}/exec", json=order)

    def exec_input(self, exec_id: str, offset: int, data: bytes, end: bool = False) -> Data:
        """Send input. Returns {"taken": bytes accepted so far, "closed": the command accepts no more}."""
        body = {"offset": offset, "data": base64.b64encode(data).decode(), "end": end}
        return self.post(f"/v1/execs/{segment(exec_id)}/input", body)

    def exec_resize(self, exec_id: str, rows: int, columns: int) -> None:
        self.post(f"/v1/execs/{segment(exec_id)}/size", {"rows": rows, "columns": columns})

    def exec_end(self, exec_id: str) -> None:
        self.post(f"/v1/execs/{segment(exec_id)}/end", {})

    def benchmark_begin(self, request: Data, code_archive: str = "", key: str = "") -> Data:
        """Start a benchmark run. Raises ResponseLost as `submit` does."""
        return self.post_once("/v1/benchmarks", {"request": request, "code_archive": code_archive}, key)

    def benchmarks(self) -> list[Data]:
        return self.rows("/v1/benchmarks")

    def benchmark(self, ref: str) -> Data:
        return self.get(f"/v1/benchmarks/{segment(ref)}")

    def benchmark_lines(self, ref: str, after: int = 0) -> list[Data]:
        return self.rows(f"/v1/benchmarks/{segment(ref)}/lines", after=after)

    def benchmark_cancel(self, ref: str) -> Data:
        return self.post(f"/v1/benchmarks/{segment(ref)}/cancel", {})

    def benchmark_baseline(self, ref: str) -> Data:
        return self.post(f"/v1/benchmarks/{segment(ref)}/baseline", {})

    def changes(self, after: int = 0, timeout_s: float = 10.0) -> Data:
        return self.get("/v1/changes", after=after, timeout_s=timeout_s)

    def follow_changes(self, after: int = 0) -> Iterator[Data]:
        """Yield every change of every job after number `after`, until the server stops."""
        for _, data in self.events("GET", "/v1/changes/stream", params={"after": after}):
            yield data

    def upload(self, sha: str, archive: Path) -> None:
        """Send a code archive unless the server has it. Its content hash is its name, so sending it twice is safe."""
        for tries_left in reversed(range(TRIES)):
            try:
                self._upload(f"/v1/code-archives/{sha}", archive)
                return
            except ServerUnreachable as e:
                if not tries_left:
                    raise
                if self._home is not None:
                    self.reconnect(e)

    def _upload(self, path: str, archive: Path) -> None:
        try:
            self.call("HEAD", path)
        except NotFound:
            with archive.open("rb") as f:
                self.call("PUT", path, content=f, headers={"Content-Type": "application/zip"}, timeout=NO_TIMEOUT)

    def checkpoints(self, pool: str = "", prefix: str = "") -> list[Data]:
        return self.rows("/v1/checkpoints", pool=pool, prefix=prefix)

    def checkpoints_away(self, pool: str = "") -> list[str]:
        """A sentence for each storage whose checkpoints are not listed now, with the reason."""
        reasons: list[str] = self.call("GET", "/v1/checkpoints/away", params={"pool": pool})
        return reasons

    def checkpoint_show(self, ref: str) -> Data:
        return self.get("/v1/checkpoints/show", ref=ref)

    def checkpoint_plan(self, ref: str, to_kind: str, count: int = 1) -> Data:
        return self.get("/v1/checkpoints/plan", ref=ref, to_kind=to_kind, count=count)

    def checkpoint_copy(self, order: Data, progress: Bytes | None = None, key: str = "") -> Data:
        """Copy a checkpoint and return the result. `order` is the request's body. `progress` receives bytes done and
        bytes in total.
        """
        return self.run_operation("/v1/checkpoints/copy", order, progress, key)

    def checkpoint_tool(self, verb: str, arguments: Data, progress: Bytes | None = None, key: str = "") -> Data:
        """Run a checkpoint tool on a node and return its result."""
        return self.run_operation(f"/v1/checkpoints/{verb}", arguments, progress, key)


def _job_params(states: list[str] | None, limit: int, name: str, since_s: float, fields: tuple[str, ...]) -> Data:
    params: Data = {"state": states, "limit": limit, "name": name, "fields": ",".join(fields)}
    return {key: value for key, value in params.items() if value} | ({"since": since_s} if since_s else {})
