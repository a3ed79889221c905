"""Start, find and stop this home's server from outside. Imports neither FastAPI nor Ray: every CLI call passes here."""

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

from cluster import fleet_record
from cluster.errors import Conflict, FleetError, UserError
from cluster.paths import check_owner, open_private, private_dir
from cluster.processes import ProcessId, age_s, alive, processes_of_module, start_detached, stop
from orchestrator.server import server_record, token, unix_socket
from orchestrator.server.server_record import ServerRecord

START_TIMEOUT_S = 90.0
STOP_GRACE_S = 15.0
STARTING_S = 15.0
LOOK_S = 0.02
ROOM_BYTES = 1 << 20
LOG_LIMIT_BYTES = 10 * 1024 * 1024
COMMAND = (sys.executable, "-P", "-m", "orchestrator.server")

Progress = Callable[[str], None]


def find_server(home: Path) -> ServerRecord | None:
    """The living server of this home. A record whose process is gone, or is another one by now, counts as none.

    Raises UserError for another user's home: its record would lead our token to a port of theirs.
    """
    check_owner(home)
    found = server_record.read(home)
    return found if found and alive(found.process) else None


def start_server(
    home: Path, port: int | None = None, *, progress: Progress | None = None, command: Sequence[str] = COMMAND
) -> ServerRecord:
    """The server of this home, started if there is none: two callers at once get the same one.

    It listens on the home's Unix socket, and on a TCP port too unless `port` is None (0: any free one).

    Raises UserError when `port` is taken or the token is open to others, Conflict when a server runs that is nowhere
    recorded, FleetError when it does not answer; the message has the end of its log.
    """
    token.check_token_private(private_dir(home))
    progress = progress or _silent
    with _one_starter(home, progress):
        if (running := find_server(home) or _await_recorded(home, progress)) is not None:
            return running
        if port is not None:
            _refuse_taken(port)
        progress("starting the server")
        return _spawn(home, port, command, progress)


def _silent(text: str) -> None:
    """Nobody wants to be told."""


def stop_server(home: Path) -> bool:
    """Ask it to end, then make it. False when none was running. Works on a server of another version too.

    Nodes of the fleet that it had to start again are its children, and live on.
    """
    found = find_server(home)
    running = [found.process] if found else _unrecorded(home)
    stop(running, grace_s=STOP_GRACE_S, spare=_nodes())
    server_record.remove(home)
    return bool(running)


def _nodes() -> list[ProcessId]:
    try:
        fleet = fleet_record.read()
    except fleet_record.DamagedRecord:
        return []
    return [p.process for p in fleet.processes] if fleet else []


def _await_recorded(home: Path, progress: Progress) -> ServerRecord | None:
    """A server whose starter was interrupted records itself in a moment, or once it has brought the store up to date;
    one that has lost its record never does.
    """
    told, busy_s = "", float("-inf")
    while strays := _unrecorded(home):
        if (running := find_server(home)) is not None:
            return running
        if doing := _doing(home):
            told, busy_s = _tell(progress, doing, told), time.monotonic()
        elif min(age_s(strays[0]), time.monotonic() - busy_s) > STARTING_S:
            raise Conflict(
                f"a server of {home} runs as process {strays[0].pid}, but "
                f"{home / server_record.NAME} does not say where",
                "run `polyfleet server stop`, then this command again; jobs keep running",
            )
        time.sleep(0.1)
    return None


def _unrecorded(home: Path) -> list[ProcessId]:
    """Processes of our own user that serve this home, whatever its record says."""
    return [
        process for process, words in processes_of_module("orchestrator.server") if words[:2] == ["--home", str(home)]
    ]


def _refuse_taken(port: int) -> None:
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
def _one_starter(home: Path, progress: Progress) -> Iterator[None]:
    with open_private(home / "server-start.lock") as lock:
        told = ""
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if doing := _doing(home):
                told = _tell(progress, doing, told)
            time.sleep(LOOK_S)
        yield


def _doing(home: Path) -> str:
    """What the process that is to be this home's server does before it answers; "" where that takes no time."""
    found = server_record.read_startup_status(home)
    return found[1] if found and alive(found[0]) else ""


def _tell(progress: Progress, doing: str, told: str) -> str:
    if doing != told:
        progress(f"the server is {doing}")
    return doing


def _spawn(home: Path, port: int | None, command: Sequence[str], progress: Progress) -> ServerRecord:
    server_record.remove(home)
    log = log_path(home)
    private_dir(log.parent)
    if log.exists() and log.stat().st_size > LOG_LIMIT_BYTES:
        log.replace(log.with_suffix(".log.1"))
    said_before = log.stat().st_size if log.exists() else 0
    child = start_detached(
        [*command, "--home", str(home), *(["--port", str(port)] if port is not None else [])],
        env=os.environ | {"POLYFLEET_HOME": str(home)},
        cwd=private_dir(home / "server-cwd"),
        log=log,
    )
    try:
        return _await_answer(home, child, log, said_before, progress)
    except BaseException:
        if not _doing(home):  # what it has done to the store would be taken back, and begun anew the next time
            stop([child], grace_s=1)
        raise


def _await_answer(home: Path, child: ProcessId, log: Path, said_before: int, progress: Progress) -> ServerRecord:
    """However long it takes while the server tells what it does."""
    deadline, told = time.monotonic() + START_TIMEOUT_S, ""
    while time.monotonic() < deadline:
        if (running := find_server(home)) is not None and _answers(running):
            return running
        if not alive(child):
            raise _did_not_start(home, log, said_before)
        if doing := _doing(home):
            deadline, told = time.monotonic() + START_TIMEOUT_S, _tell(progress, doing, told)
        time.sleep(LOOK_S)
    raise FleetError(f"the server did not answer within {START_TIMEOUT_S:.0f} s", f"see {log}")


def _answers(server: ServerRecord) -> bool:
    connection = http.client.HTTPConnection("localhost", timeout=5)
    try:
        connection.sock = unix_socket.connect(Path(server.socket), timeout_s=5)
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _did_not_start(home: Path, log: Path, offset: int) -> FleetError:
    """With the last error it printed since `offset` and its remedy, else its last line."""
    lines = log.read_bytes()[offset:].decode(errors="replace").rstrip().splitlines()
    at = next((i for i in reversed(range(len(lines))) if lines[i].startswith("error: ")), None)
    if at is not None:
        remedy = "".join(f"{line.strip()}; " for line in lines[at + 1 : at + 2])
        return FleetError(f"the server did not start: {lines[at].removeprefix('error: ')}", f"{remedy}see {log}")
    if shutil.disk_usage(home).free < ROOM_BYTES:
        return FleetError(f"the server did not start: the disk of {home} is full", "free space there")
    return FleetError(f"the server did not start: {lines[-1] if lines else 'it printed nothing'}", f"see {log}")
