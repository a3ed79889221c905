"""Start and stop the Ray nodes of an embedded fleet.

Each is recorded, waited for, and stopped by process id.
"""

import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from cluster.environments import code_export, interpreters
from cluster.errors import FleetError
from cluster.fleet import fleet_record
from cluster.fleet.fleet_record import FleetRecord, NodeProcess
from cluster.fleet.fleet_spec import FleetSpec, PoolSpec
from cluster.fleet.identity import fleet_identity
from cluster.host import fences, termination_notice, tokens
from cluster.host.processes import (
    ProcessId,
    free_port,
    identify,
    is_alive,
    kill_trees,
    other_own_processes,
    reap,
    start_detached,
    stop,
)
from cluster.nodes.ray_node import node_environment, resource_counts, tls_environment, worker_command
from cluster.nodes.ray_start_hook import ADDRESS, SOCKETS
from cluster.paths import home, make_short_folder, private_dir, storage_dir

START_TIMEOUT_S = 120.0
STARTED_MARK = b"Ray runtime started"
GRACE_S = 5.0
MAX_LOG_LINE_LENGTH = 300
IGNORED_LINES = re.compile(r"^\s*$|\[state-dump\]|----- |Remaining processes will be killed")
FOLDER_PREFIX = "pf-"
"""Prefix of the names of fleets' temporary folders."""
TOKEN_FILE_PREFIX = "ray-token"  # noqa: S105 - the start of a file name
"""Prefix of the names of Ray's token files."""


def start_worker(
    record: FleetRecord, spec: FleetSpec, pool_and_number: tuple[str, str], interpreter: Path
) -> FleetRecord:
    """Start a node of a pool, with explicit labels and counts.

    `pool_and_number` has the pool's name, and the node's number or the host's name. The node runs from the pool's own
    interpreter if that can run Ray. Processes left of the previous node are killed, also those of a `ray start` that
    was killed before it was recorded.
    """
    name, node = pool_and_number[0], f"{pool_and_number[0]}-{pool_and_number[1]}"
    pool = spec.pools[name]
    labels = {
        "polyfleet.io/pool": name,
        "polyfleet.io/node": node,
        "polyfleet.io/backend": pool.backend,
        "polyfleet.io/environment": pool.environment_name,
    } | pool.labels
    devices = record.accelerator_counts.get(pool.backend, pool.devices)
    counts = resource_counts(pool.backend, devices, cpu_count(), pool.emulated)
    node_interpreter = interpreters.node_interpreter(interpreter) if pool.environment.is_named else interpreter
    command = worker_command(node_interpreter, record.address, labels, counts)
    # Always mask 0o002: the group may change what a job writes, but not every user.
    umask = {"POLYFLEET_UMASK": f"{record.umask | 0o002:03o}"}
    rank_variables = {"POLYFLEET_INTERPRETER": str(interpreter)} if node_interpreter != interpreter else {}
    variables = _variables(name, spec.pools, node) | umask | rank_variables
    if not record.host:  # on other machines, fences are read from Ray's own store only
        variables["POLYFLEET_FENCE_DIR"] = str(fences.local_folder())
    stop_leftover_processes(record.cwd(node))
    reap(p.process for p in record.processes if p.node == node)
    termination_notice.clear_notice(node_dir(node))
    return start_node(record, NodeProcess("worker", node, name, 0, 0.0), command, variables)


def cpu_count() -> int:
    """Return the number of CPUs that this process may use: its affinity, not the machine's count."""
    return (
        len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else (psutil.cpu_count() or 1)
    )


def _variables(name: str, pools: Mapping[str, PoolSpec], node: str) -> dict[str, str]:
    """Return the variables that the node's agent reads."""
    pool = pools[name]
    neighbours = {
        other_pool: str(storage_of(other_pool, spec)) for other_pool, spec in pools.items() if other_pool != name
    }
    return {
        "POLYFLEET_FLEET": fleet_identity(home()),
        "POLYFLEET_POOL": name,
        "POLYFLEET_NODE": node,
        "POLYFLEET_BACKEND": pool.backend,
        "POLYFLEET_ENVIRONMENT": pool.environment_name,
        "POLYFLEET_DEVICES": str(pool.devices),
        "POLYFLEET_NODE_DIR": str(node_dir(node)),
        "POLYFLEET_STORAGE": str(make_storage(name, pool)),
        "POLYFLEET_OBJECT_STORE": pool.object_store,
        "POLYFLEET_LOCAL_POOLS": json.dumps(neighbours),
        "POLYFLEET_POOL_VARIABLES": ",".join(pool.env),
    } | pool.env


def node_dir(node: str) -> Path:
    """Return the folder in which the node's agent keeps its attempts."""
    return private_dir(home() / "nodes" / node)


def storage_of(name: str, pool: PoolSpec) -> Path:
    """Return the pool's checkpoint folder on this machine."""
    return Path(pool.storage_folder) if pool.storage_folder else home() / "storage" / name


def make_storage(name: str, pool: PoolSpec) -> Path:
    """Create the pool's checkpoint folder.

    Raises UserError for an unsuitable folder, OSError if it cannot be created.
    """
    return storage_dir(storage_of(name, pool)) if pool.storage_folder else private_dir(storage_of(name, pool))


def start_node(record: FleetRecord, node: NodeProcess, command: list[str], variables: Mapping[str, str]) -> FleetRecord:
    """Start a node of an embedded fleet and record it; this replaces the record of the previous one."""
    ports = {"autoscaler": free_port(), "dashboard": free_port()}
    node_variables = {SOCKETS: f"{record.ray_dir}/{node.node}", ADDRESS: record.node_address} | tls_environment(
        record.tls_dir
    )
    env = node_environment(Path(record.token_path), code_export.export(), ports, node_variables | dict(variables))
    return start_recorded(record, node, command, env, private_dir(record.cwd(node.node)))


def start_recorded(
    record: FleetRecord, node: NodeProcess, command: list[str], env: Mapping[str, str], cwd: Path
) -> FleetRecord:
    """Start `node` with `command` and record it; this replaces the record of the previous one."""
    log = log_of(node.node)
    log.unlink(missing_ok=True)
    process = start_detached(command, env=env, cwd=cwd, log=log)
    other_processes = tuple(p for p in record.processes if p.node != node.node)
    started = replace(node, pid=process.pid, created=process.created)
    record = replace(record, processes=(*other_processes, started))
    fleet_record.write(record)
    return record


def log_of(node: str) -> Path:
    """Return the path of the output of that node's `ray start`."""
    return home() / "logs" / f"ray-{node}.log"


def wait_until_started(node: NodeProcess) -> None:
    """Wait until a node is up.

    Raises FleetError with the end of its log if it ends, or after START_TIMEOUT_S.
    """
    log = log_of(node.node)
    deadline = time.monotonic() + START_TIMEOUT_S
    while STARTED_MARK not in log.read_bytes():
        if not is_alive(node.process):
            raise FleetError(
                f"node {node.node} did not start: {log_tail(log)}", f"see {log} and ray-session/ beside it"
            )
        if time.monotonic() > deadline:
            raise FleetError(f"node {node.node} is not up after {START_TIMEOUT_S:.0f} s: {log_tail(log)}", f"see {log}")
        time.sleep(0.05)


def log_tail(log: Path, lines: int = 5) -> str:
    """Return the last lines that a node's processes wrote, without Ray's own frame lines and state dumps."""
    try:
        written = log.read_text(errors="replace").splitlines()
    except OSError as e:
        return f"its log {log} cannot be read: {e.strerror}"
    tail = [line.strip()[:MAX_LOG_LINE_LENGTH] for line in written if not IGNORED_LINES.search(line)]
    return " | ".join(tail[-lines:]) or "it printed nothing"


def preserve_logs(record: FleetRecord) -> None:
    """Copy Ray's own logs of a fleet that did not start, before its temporary folder is removed."""
    source = record.ray_dir / "session_latest" / "logs"
    copy = home() / "logs" / "ray-session"
    shutil.rmtree(copy, ignore_errors=True)
    if source.is_dir():
        shutil.copytree(source, copy, ignore_dangling_symlinks=True)


def stop_all(record: FleetRecord) -> None:
    """Stop a fleet and remove its record, last."""
    with suppress(OSError):  # a full disk must not prevent the fleet from stopping
        fleet_record.write(replace(record, state="stopping"))
    stop_processes(record)
    if record.is_ours:
        remove_tokens()
    fleet_record.remove()


def stop_processes(record: FleetRecord) -> None:
    """Stop a fleet's processes and remove its temporary folders.

    Attempts stop first, because they may save; then workers, so that none complains of a lost head; then the head and
    processes whose parent was killed.
    """
    stop(_supervisors(), GRACE_S)
    # A node that ends notifies its head; without a head it would try in vain, so it gets no time for that.
    stop([p.process for p in record.processes if p.role != "head"], 0.0 if record.is_headless else GRACE_S)
    stop([p.process for p in record.processes if p.role == "head"], GRACE_S)
    for folder in filter(None, (record.temp_dir, record.previous_temp_dir, record.joined_dir)):
        stop_leftover_processes(Path(folder))
        remove_temp_dir(Path(folder))
    reap(p.process for p in record.processes)


def new_token() -> Path:
    """Create a token file for Ray that no other cluster had."""
    return tokens.create_token(home() / f"{TOKEN_FILE_PREFIX}-{secrets.token_hex(4)}")


def remove_tokens(but: str = "") -> None:
    """Remove the tokens of fleets that ended; `but` is the token of the running one."""
    for path in home().glob(f"{TOKEN_FILE_PREFIX}*"):
        if str(path) != but:
            path.unlink(missing_ok=True)


def stop_unrecorded_processes() -> int:
    """Stop the processes that use this home's Ray token, without a record, and remove their folders.

    Returns the number of processes.
    """
    stop(_supervisors(), GRACE_S)
    folders = {process: cwd for process, cwd in _ray_processes() if _has_our_token(process)}
    stop(list(folders), GRACE_S)
    for folder in {temporary for cwd in folders.values() if (temporary := _temporary_folder_of(cwd))}:
        stop_leftover_processes(folder)
        remove_temp_dir(folder)
    remove_tokens()
    fleet_record.remove()
    return len(folders)


def stop_leftover_processes(folder: Path) -> None:
    """Kill the Ray processes that work in `folder` or below: their parent ended before it could stop them.

    They get no SIGTERM first, because a node would then let its attempts save and end.
    """
    kill_trees([process for process, cwd in _ray_processes() if cwd.is_relative_to(folder)])


def new_temporary_folder() -> str:
    return str(make_short_folder(FOLDER_PREFIX))


def remove_temp_dir(folder: Path) -> None:
    """Remove a fleet's folder, unless it is a link or another user's by now."""
    with suppress(OSError):
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            shutil.rmtree(folder, ignore_errors=True)


def _temporary_folder_of(cwd: Path) -> Path | None:
    """Return the fleet's folder above a process's working folder."""
    return next((folder for folder in cwd.parents if folder.name.startswith(FOLDER_PREFIX)), None)


def _ray_processes() -> Iterator[tuple[ProcessId, Path]]:
    """Yield our user's Ray processes, each with its working folder."""
    for process in other_own_processes():
        with suppress(psutil.Error):
            process_id = identify(process.pid)
            if _is_ray_process(process.cmdline()):
                yield process_id, Path(process.cwd())


def _is_ray_process(command: list[str]) -> bool:
    """Return whether a command line is Ray's, by its program: `tail -f` of Ray's log is not."""
    program, first = [*command, "", ""][:2]
    if Path(program).name in ("raylet", "gcs_server"):
        return "/ray/core/src/ray/" in program
    if Path(program).name.startswith("python"):
        return command[1:3] == ["-m", "ray.scripts.scripts"] or ("/ray/" in first and first.endswith(".py"))
    return program.startswith("ray::")  # the title that Ray gives its Python processes


def _has_our_token(process: ProcessId) -> bool:
    with suppress(psutil.Error):
        token_path = psutil.Process(process.pid).environ().get("RAY_AUTH_TOKEN_PATH", "")
        return token_path.startswith(str(home() / TOKEN_FILE_PREFIX))
    return False


def _supervisors() -> list[ProcessId]:
    """Return the supervisors of attempts on this home's nodes. On SIGTERM, their ranks save."""
    return termination_notice.supervisors_in(home() / "nodes")
