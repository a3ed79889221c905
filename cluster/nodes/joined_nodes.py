"""Nodes on a machine whose fleet has its head elsewhere.

`join` starts them, a watchdog process restarts them, `leave` stops them. A raylet that was cut off from its head for
long ends once the connection is back (Ray 2.60). The watchdog restarts it, as the server does with nodes of its own
machine. It has no other task, and ends with the fleet's record here.
"""

import os
import secrets
import shutil
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from cluster.environments import code_export
from cluster.errors import Conflict, PolyfleetError
from cluster.fleet import fleet_record, identity
from cluster.fleet.fleet_record import FleetRecord, NodeProcess
from cluster.fleet.fleet_spec import FleetSpec
from cluster.host import tokens
from cluster.host.processes import free_port, is_alive, start_detached
from cluster.nodes import embedded, ray_head
from cluster.nodes.node_repair import NodeRepair
from cluster.nodes.raylets import (
    TOKEN_FILE_PREFIX,
    log_of,
    new_temporary_folder,
    remove_temp_dir,
    remove_tokens,
    stop_all,
    stop_leftover_processes,
)
from cluster.paths import home, private_dir, umask, write_private
from cluster.version import VERSION

WATCHDOG = "watchdog"
CHECK_EVERY_S = 1.0
Progress = embedded.Progress


@dataclass(frozen=True, slots=True)
class Request:
    """Request to a host to join a fleet.

    `fleet` is the host's part of the fleet file, `host` its name there, `address` the address of its nodes,
    `interpreters` its Pythons by pool, `certificates` the texts of its certificate files by name. `port` is that of the
    head to start, 0 for any free port; `cluster` is as in the fleet's record.
    """

    name: str
    identity: str
    head: str
    host: str
    address: str
    token: str
    certificates: dict[str, str]
    fleet: dict[str, Any]
    interpreters: dict[str, str]
    cluster: str = ""
    port: int = 0


def start_head(request: Request, progress: Progress) -> dict[str, Any]:
    """Start the fleet's head here: from its storage if it has ended, as a new head if that is lost.

    Returns {"address", "cluster"}, which nodes join afterwards. A watchdog restarts the head if it ends. Raises
    FleetError; nothing new runs here then.
    """
    with embedded.fleet_lock():
        record = fleet_record.read()
        if record is not None and not _has_this_head(record, request):
            stop_all(record)
            record = None
        if record is not None and record.is_headless:
            record = _restart_head(record, progress)
        if record is None:
            progress("starting the head")
            record = _start_new_head(_new_head_record(request))
        record = _ensure_watchdog(replace(record, state="up"))
        return {"address": record.address, "cluster": record.cluster}


def _has_this_head(record: FleetRecord, request: Request) -> bool:
    """Return whether the record has the head of exactly this fleet, running or not."""
    try:
        is_same_token = tokens.read(Path(record.token_path)) == request.token
    except (PolyfleetError, OSError):
        return False
    return is_same_token and bool(record.head_spec) and record.pools == embedded.plain_pools(_spec(request))


def _restart_head(record: FleetRecord, progress: Progress) -> FleetRecord | None:
    """Restart the head. Return None if its storage is lost; then all of it is stopped and removed."""
    try:
        return ray_head.restart(record, progress)
    except ray_head.StorageLost as e:
        progress(f"{e.message}: starting a new head")
        stop_all(record)
        return None


def _new_head_record(request: Request) -> FleetRecord:
    """Return the record of a fleet whose head is to start here."""
    private_dir(home())
    _check_identity(request.identity)
    record = _new_record(request, f"{request.address}:{request.port or free_port()}")
    spec = {"address": request.address, "port": request.port}
    shutil.rmtree(ray_head.storage(record), ignore_errors=True)
    return replace(record, head_spec=spec, cluster=secrets.token_hex(8))


def _start_new_head(record: FleetRecord) -> FleetRecord:
    fleet_record.write(record)
    try:
        return ray_head.start(record)
    except BaseException:
        if (started := fleet_record.read()) is not None:
            stop_all(started)
        raise


def _spec(request: Request) -> FleetSpec:
    """Return the host's part of the fleet. A host with only the head has no pools."""
    return embedded.local_pools(request.name, request.fleet)


def join(request: Request, accelerators: dict[str, int], progress: Progress) -> dict[str, Any]:
    """Start the nodes that are not running, and the watchdog process if none runs. Idempotent.

    A machine that joined an earlier head of this fleet leaves that first. `accelerators` counts them by backend.
    Raises FleetError if a node does not start; then nothing runs here, except the head if this machine has it.
    """
    spec = _spec(request)
    with embedded.fleet_lock():
        record = _current(request, spec, progress)
        interpreters = {pool: Path(python) for pool, python in request.interpreters.items()}
        try:
            record = _ensure_watchdog(
                embedded.start_missing_nodes(
                    replace(record, accelerator_counts=accelerators), spec, interpreters, progress
                )
            )
        except BaseException:
            if (started := fleet_record.read()) is not None and not started.head_spec:  # others need the head
                stop_all(started)
            raise
        return {"nodes": [p.node for p in record.running() if p.role == "worker"]}


def _current(request: Request, spec: FleetSpec, progress: Progress) -> FleetRecord:
    """Return the record of the nodes here for that head, or write a new record."""
    private_dir(home())
    _check_identity(request.identity)
    pools = embedded.plain_pools(spec)
    record_here, watchdog = fleet_record.read(), tuple[NodeProcess, ...]()
    is_same_head = record_here is not None and (record_here.address, record_here.cluster) == (
        request.head,
        request.cluster,
    )
    if record_here is not None and is_same_head and record_here.pools == pools:
        return record_here
    if record_here is not None and is_same_head and record_here.head_spec:
        message = f"host {request.host} runs the fleet's head with other pools than the fleet file has now"
        raise Conflict(message, "run `polyfleet down`, then `polyfleet up -f` with the changed file")
    if record_here is not None:
        progress(f"leaving the head at {record_here.address}")
        watchdog = _leave_previous_head(record_here, pools)
    record = replace(_new_record(request, request.head), processes=watchdog)
    fleet_record.write(record)
    return record


def _new_record(request: Request, head: str) -> FleetRecord:
    token = home() / f"{TOKEN_FILE_PREFIX}-joined"
    write_private(token, request.token)
    return FleetRecord(
        name=request.name,
        state="starting",
        address=head,
        version=VERSION,
        started_s=time.time(),
        token_path=str(token),
        temp_dir=new_temporary_folder(),
        loopback=False,
        pools=embedded.plain_pools(_spec(request)),
        umask=umask(),
        node_address=request.address,
        host=request.host,
        tls_dir=str(_certificates(request)),
        cluster=request.cluster,
    )


def _leave_previous_head(record: FleetRecord, pools: dict[str, Any]) -> tuple[NodeProcess, ...]:
    """Stop the nodes of the previous head. Returns the watchdog, which continues.

    If the pools stay the same, their attempts keep running, and new agents adopt them.
    """
    if record.pools != pools:
        stop_all(record)
        return ()
    stop_leftover_processes(Path(record.temp_dir))
    remove_temp_dir(Path(record.temp_dir))
    remove_tokens()
    return tuple(p for p in record.processes if p.role == WATCHDOG)


def _check_identity(fleet_id: str) -> None:
    """Bind this home to one fleet for ever. Raises Conflict if it belongs to another fleet."""
    path = home() / identity.FILE
    if not path.exists():
        write_private(path, fleet_id)
    if identity.fleet_identity(home()) != fleet_id:
        raise Conflict(
            f"{home()} belongs to another fleet",
            "run `polyfleet down` on the machine from which that fleet was started",
        )


def _certificates(request: Request) -> Path:
    folder = home() / "tls"
    shutil.rmtree(folder, ignore_errors=True)
    private_dir(folder)
    for name, text in request.certificates.items():
        write_private(folder / Path(name).name, text)
    return folder


def _ensure_watchdog(record: FleetRecord) -> FleetRecord:
    """Make sure that a watchdog is running; returns the record with it."""
    if any(p.role == WATCHDOG and is_alive(p.process) for p in record.processes):
        return record
    command = [sys.executable, "-P", "-m", "workers.node.host", "keep"]
    environment = {**os.environ, "PYTHONPATH": str(code_export.export()), "POLYFLEET_HOME": str(home())}
    started = start_detached(command, env=environment, cwd=home(), log=log_of(WATCHDOG))
    watchdog = NodeProcess(WATCHDOG, WATCHDOG, "", started.pid, started.created)
    other_processes = tuple(p for p in record.processes if p.role != WATCHDOG)
    record = replace(record, processes=(*other_processes, watchdog))
    fleet_record.write(record)
    return record


def leave(progress: Progress) -> list[str]:
    """Stop all of the fleet's processes here. Returns the nodes that ran."""
    stopped = [node for node in embedded.down(progress) if node != WATCHDOG]
    shutil.rmtree(home() / ray_head.STORAGE, ignore_errors=True)
    return stopped


def run_watchdog() -> None:
    """Restart nodes that end, until this machine leaves the fleet."""

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, on_sigterm)
    repairs = NodeRepair(_log)
    reported: dict[str, str] = {}
    while (record := fleet_record.read()) is not None and record.state != "stopping":
        waiting = dict(repairs.restart_lost_nodes().postponed)
        for node, reason in waiting.items():
            if node not in reported:
                _log(f"{node}: {reason}")
        reported = waiting
        time.sleep(CHECK_EVERY_S)


def _log(line: str) -> None:
    sys.stdout.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n")
    sys.stdout.flush()
