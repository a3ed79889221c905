"""Our nodes on a machine whose fleet has its head elsewhere: `join` starts them, a keeper restarts them, `leave` stops.

A raylet that was cut off from its head for long ends itself once the cut heals (Ray 2.60); the keeper starts it again,
as the server does with nodes of its own machine. It ends with the fleet's record here, and does nothing but that.
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

from cluster import code_export, embedded, fleet_record, identity, ray_head, tokens
from cluster.errors import Conflict, PolyfleetError
from cluster.fleet_record import FleetRecord, NodeProcess
from cluster.fleet_spec import FleetSpec
from cluster.node_repair import NodeRepair
from cluster.paths import home, private_dir, umask, write_private
from cluster.processes import alive, free_port, start_detached
from cluster.raylets import (
    AUTHENTICATION,
    log_of,
    new_temporary,
    remove_temp_dir,
    remove_tokens,
    stop_all,
    stop_leftover_processes,
)
from cluster.version import VERSION

KEEPER = "keeper"
LOOK_EVERY_S = 1.0
Progress = embedded.Progress


@dataclass(frozen=True, slots=True)
class Request:
    """What a machine is told to be. `fleet` is its part of the fleet file, `host` its name there, `address` where its
    nodes listen; `interpreters` by pool; `certificates` are the texts of its files by name. `port` is of the head that
    it is to have, 0 for any free one; `cluster` as in the fleet's record.
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


def lead(request: Request, progress: Progress) -> dict[str, Any]:
    """Start the fleet's head here, or again on its own storage, or as a new one where that is lost: {"address",
    "cluster"}, which nodes join afterwards. A keeper starts it again when it ends. Raises FleetError: nothing new runs
    here then.
    """
    with embedded.fleet_lock():
        found = fleet_record.read()
        if found is not None and not _leads(found, request):
            stop_all(found)
            found = None
        if found is not None and found.headless:
            found = _again(found, progress)
        if found is None:
            progress("starting the head")
            found = _begun(_leading(request))
        found = _kept(replace(found, state="up"))
        return {"address": found.address, "cluster": found.cluster}


def _leads(record: FleetRecord, request: Request) -> bool:
    """The head of this very fleet is here, alive or not."""
    try:
        same = tokens.read(Path(record.token_path)) == request.token
    except (PolyfleetError, OSError):
        return False
    return same and bool(record.head_spec) and record.pools == embedded.plain_pools(_spec(request))


def _again(record: FleetRecord, progress: Progress) -> FleetRecord | None:
    """None where its storage is lost: then nothing of it is left."""
    try:
        return ray_head.restart(record, progress)
    except ray_head.StorageLost as e:
        progress(f"{e.message}: a new one is started")
        stop_all(record)
        return None


def _leading(request: Request) -> FleetRecord:
    """A record with a head to come."""
    private_dir(home())
    _identify(request.identity)
    record = _new_record(request, f"{request.address}:{request.port or free_port()}")
    spec = {"address": request.address, "port": request.port}
    shutil.rmtree(ray_head.storage(record), ignore_errors=True)
    return replace(record, head_spec=spec, cluster=secrets.token_hex(8))


def _begun(record: FleetRecord) -> FleetRecord:
    fleet_record.write(record)
    try:
        return ray_head.start(record)
    except BaseException:
        if (begun := fleet_record.read()) is not None:
            stop_all(begun)
        raise


def _spec(request: Request) -> FleetSpec:
    """What is here; a host with nothing but the head has no pools."""
    return embedded.pools_here(request.name, request.fleet)


def join(request: Request, found: dict[str, int], progress: Progress) -> dict[str, Any]:
    """Start the nodes that do not run, and a keeper if none lives. Idempotent; a machine that belonged to an earlier
    head of this fleet leaves that first. Raises FleetError where a node does not start: nothing runs here then, but the
    head where this machine has it.
    """
    spec = _spec(request)
    with embedded.fleet_lock():
        record = _current(request, spec, progress)
        interpreters = {pool: Path(python) for pool, python in request.interpreters.items()}
        try:
            record = _kept(embedded.start_missing_nodes(replace(record, found=found), spec, interpreters, progress))
        except BaseException:
            if (begun := fleet_record.read()) is not None and not begun.head_spec:  # others need the head
                stop_all(begun)
            raise
        return {"nodes": [p.node for p in record.living() if p.role == "worker"]}


def _current(request: Request, spec: FleetSpec, progress: Progress) -> FleetRecord:
    """The record of what runs here for that head, or a new one."""
    private_dir(home())
    _identify(request.identity)
    pools = embedded.plain_pools(spec)
    found, keeper = fleet_record.read(), tuple[NodeProcess, ...]()
    same = found is not None and (found.address, found.cluster) == (request.head, request.cluster)
    if found is not None and same and found.pools == pools:
        return found
    if found is not None and same and found.head_spec:
        told = f"host {request.host} has the fleet's head, and other pools than it is to have now"
        raise Conflict(told, "`polyfleet down`, then `polyfleet up -f` with the changed file")
    if found is not None:
        progress(f"leaving the head at {found.address}")
        keeper = _parted(found, pools)
    record = replace(_new_record(request, request.head), processes=keeper)
    fleet_record.write(record)
    return record


def _new_record(request: Request, head: str) -> FleetRecord:
    token = home() / f"{AUTHENTICATION}-joined"
    write_private(token, request.token)
    return FleetRecord(
        name=request.name,
        state="starting",
        address=head,
        version=VERSION,
        started_s=time.time(),
        token_path=str(token),
        temp_dir=new_temporary(),
        loopback=False,
        pools=embedded.plain_pools(_spec(request)),
        umask=umask(),
        node_address=request.address,
        host=request.host,
        tls_dir=str(_certificates(request)),
        cluster=request.cluster,
    )


def _parted(record: FleetRecord, pools: dict[str, Any]) -> tuple[NodeProcess, ...]:
    """Without the nodes of the head before. Where the same pools follow, their attempts live on: new agents adopt them.
    Returns the keeper, which goes on.
    """
    if record.pools != pools:
        stop_all(record)
        return ()
    stop_leftover_processes(Path(record.temp_dir))
    remove_temp_dir(Path(record.temp_dir))
    remove_tokens()
    return tuple(p for p in record.processes if p.role == KEEPER)


def _identify(wanted: str) -> None:
    """This folder is of one fleet for ever. Raises Conflict where it is another's."""
    path = home() / identity.FILE
    if not path.exists():
        write_private(path, wanted)
    if identity.fleet_identity(home()) != wanted:
        raise Conflict(f"{home()} belongs to another fleet", "run `polyfleet down` where that one was brought up")


def _certificates(request: Request) -> Path:
    folder = home() / "tls"
    shutil.rmtree(folder, ignore_errors=True)
    private_dir(folder)
    for name, text in request.certificates.items():
        write_private(folder / Path(name).name, text)
    return folder


def _kept(record: FleetRecord) -> FleetRecord:
    """With a keeper that lives."""
    if any(p.role == KEEPER and alive(p.process) for p in record.processes):
        return record
    command = [sys.executable, "-P", "-m", "workers.host", "keep"]
    environment = {**os.environ, "PYTHONPATH": str(code_export.export()), "POLYFLEET_HOME": str(home())}
    started = start_detached(command, env=environment, cwd=home(), log=log_of(KEEPER))
    keeper = NodeProcess(KEEPER, KEEPER, "", started.pid, started.created)
    others = tuple(p for p in record.processes if p.role != KEEPER)
    record = replace(record, processes=(*others, keeper))
    fleet_record.write(record)
    return record


def leave(progress: Progress) -> list[str]:
    """Stop all that is ours here. Returns the nodes that ran."""
    stopped = [node for node in embedded.down(progress) if node != KEEPER]
    shutil.rmtree(home() / ray_head.STORAGE, ignore_errors=True)
    return stopped


def keep() -> None:
    """Start again what ends, until this machine is told to leave."""

    def ended(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, ended)
    repairs = NodeRepair(_say)
    told: dict[str, str] = {}
    while (record := fleet_record.read()) is not None and record.state != "stopping":
        waiting = dict(repairs.restart_lost().waiting)
        for node, why in waiting.items():
            if node not in told:
                _say(f"{node}: {why}")
        told = waiting
        time.sleep(LOOK_EVERY_S)


def _say(line: str) -> None:
    sys.stdout.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n")
    sys.stdout.flush()
