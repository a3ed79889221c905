"""Start, find and stop this home's server from a client. Imports neither FastAPI nor Ray: every CLI call runs this."""

import fcntl
import http.client
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.errors import Conflict, FleetError, UserError
from cluster.fleet import fleet_record
from cluster.host.processes import ProcessId, age_s, is_alive, processes_of_module, start_detached, stop
from cluster.paths import check_owner, open_private, private_dir
from orchestrator.home import server_record, token, unix_socket
from orchestrator.home.server_record import ServerRecord

START_TIMEOUT_S = 90.0
STOP_GRACE_S = 15.0
UNRECORDED_S = 15.0
POLL_S = 0.02
MIN_FREE_BYTES = 1 << 20
LOG_LIMIT_BYTES = 10 * 1024 * 1024
COMMAND = (sys.executable, "-P", "-m", "orchestrator.server")

Progress = Callable[[str], None]


def find_server(home: Path) -> ServerRecord | None:
    """The running server of this home. A record whose process has ended, or whose pid was reused, counts as none.

    Raises UserError for another user's home: its record could direct our token to a port of that user.
    """
    check_owner(home)
    record = server_record.read(home)
    return record if record and is_alive(record.process) else None


def start_server(
    home: Path, port: int | None = None, *, progress: Progress | None = None, command: Sequence[str] = COMMAND
) -> ServerRecord:
    """Return the server of this home; start it if none runs. Concurrent callers get the same one.

    It listens on the home's Unix socket, and on a TCP port too unless `port` is None (0: any free port).

    Raises UserError if `port` is in use or other users can read the token, Conflict if a server runs without a record,
    FleetError if it does not respond; the message has the last error of its log.
    """
    token.check_token_private(private_dir(home))
    progress = progress or _quiet
    with _start_lock(home, progress):
        if (running := find_server(home) or _await_recorded(home, progress)) is not None:
            return running
        if port is not None:
            _check_port(port)
        progress("starting the server")
        return _spawn(home, port, command, progress)


def _quiet(text: str) -> None:
    """Discard progress: the default when the caller passes no callback."""


def stop_server(home: Path) -> bool:
    """Stop the server: terminate it, then kill it. Return False if none was running. Works with other versions, too.

    Nodes of the fleet that the server restarted are its children; they keep running.
    """
    record = find_server(home)
    running = [record.process] if record else _server_processes(home)
    stop(running, grace_s=STOP_GRACE_S, exclude=_nodes())
    server_record.remove(home)
    return bool(running)


def _nodes() -> list[ProcessId]:
    try:
        fleet = fleet_record.read()
    except fleet_record.DamagedRecord:
        return []
    return [p.process for p in fleet.processes] if fleet else []


def _await_recorded(home: Path, progress: Progress) -> ServerRecord | None:
    """Wait for the record of a server that already runs, e.g. because the client that started it was interrupted. It
    writes its record soon, or after it has upgraded the store. Raises Conflict for a server that has lost its record.
    """
    last_reported, busy_s = "", float("-inf")
    while unrecorded := _server_processes(home):
        if (running := find_server(home)) is not None:
            return running
        if step := _startup_step(home):
            last_reported, busy_s = _print_step(progress, step, last_reported), time.monotonic()
        elif min(age_s(unrecorded[0]), time.monotonic() - busy_s) > UNRECORDED_S:
            raise Conflict(
                f"a server of {home} runs as process {unrecorded[0].pid}, but "
                f"{home / server_record.NAME} does not contain its address",
                "run `polyfleet server stop`, then this command again; jobs keep running",
            )
        time.sleep(0.1)
    return None


def _server_processes(home: Path) -> list[ProcessId]:
    """Processes of this user that serve this home, regardless of its record."""
    return [
        process
        for process, arguments in processes_of_module("orchestrator.server")
        if arguments[:2] == ["--home", str(home)]
    ]


def _check_port(port: int) -> None:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError as e:
            remedy = "choose another with --port, or leave it out"
            raise UserError(f"port {port} cannot be used: {e.strerror}", remedy) from None


def log_path(home: Path) -> Path:
    return home / "logs" / "server.log"


@contextmanager
def _start_lock(home: Path, progress: Progress) -> Iterator[None]:
    with open_private(home / "server-start.lock") as lock:
        last_reported = ""
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if step := _startup_step(home):
                last_reported = _print_step(progress, step, last_reported)
            time.sleep(POLL_S)
        yield


def _startup_step(home: Path) -> str:
    """Current startup step of the process that is becoming this home's server; "" if there is none."""
    status = server_record.read_startup_status(home)
    return status[1] if status and is_alive(status[0]) else ""


def _print_step(progress: Progress, step: str, last_reported: str) -> str:
    if step != last_reported:
        progress(f"the server is {step}")
    return step


def _spawn(home: Path, port: int | None, command: Sequence[str], progress: Progress) -> ServerRecord:
    server_record.remove(home)
    log = log_path(home)
    private_dir(log.parent)
    if log.exists() and log.stat().st_size > LOG_LIMIT_BYTES:
        log.replace(log.with_suffix(".log.1"))
    log_offset = log.stat().st_size if log.exists() else 0
    child = start_detached(
        [*command, "--home", str(home), *(["--port", str(port)] if port is not None else [])],
        env=os.environ | {"POLYFLEET_HOME": str(home)},
        cwd=private_dir(home / "server-cwd"),
        log=log,
    )
    try:
        return _await_ready(home, child, log, log_offset, progress)
    except BaseException:
        if not _startup_step(home):  # stopping it during an upgrade of the store would undo the work done so far
            stop([child], grace_s=1)
        raise


def _await_ready(home: Path, child: ProcessId, log: Path, log_offset: int, progress: Progress) -> ServerRecord:
    """Wait until the server responds; START_TIMEOUT_S begins again with each startup step that it records. If this
    process was stopped for longer than that, it looks once more.
    """
    started_s, last_reported = time.monotonic(), ""
    while True:
        is_late = time.monotonic() > started_s + START_TIMEOUT_S
        if (running := find_server(home)) is not None and _is_ready(running):
            return running
        if not is_alive(child):
            raise _start_error(home, log, log_offset)
        if step := _startup_step(home):
            started_s, last_reported = time.monotonic(), _print_step(progress, step, last_reported)
        elif is_late:
            raise FleetError(f"the server did not respond within {START_TIMEOUT_S:.0f} s", f"see its log: {log}")
        time.sleep(POLL_S)


def _is_ready(server: ServerRecord) -> bool:
    connection = http.client.HTTPConnection("localhost", timeout=5)
    try:
        connection.sock = unix_socket.connect(Path(server.socket), timeout_s=5)
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _start_error(home: Path, log: Path, offset: int) -> FleetError:
    """Error with the last error message in the log since `offset` and its remedy, else with the last line."""
    lines = log.read_bytes()[offset:].decode(errors="replace").rstrip().splitlines()
    error_index = next((i for i in reversed(range(len(lines))) if lines[i].startswith("error: ")), None)
    if error_index is not None:
        remedy = "".join(f"{line.strip()}; " for line in lines[error_index + 1 : error_index + 2])
        return FleetError(
            f"the server did not start: {lines[error_index].removeprefix('error: ')}", f"{remedy}see {log}"
        )
    if shutil.disk_usage(home).free < MIN_FREE_BYTES:
        return FleetError(f"the server did not start: the disk of {home} is full", "free disk space there")
    return FleetError(f"the server did not start: {lines[-1] if lines else 'it printed nothing'}", f"see {log}")
