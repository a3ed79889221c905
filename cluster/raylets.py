"""Starting and stopping the Ray nodes of an embedded fleet: written down first, waited for, stopped by process id."""

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

from cluster import code_export, fences, fleet_record, interpreters, termination_notice, tokens
from cluster.errors import FleetError
from cluster.fleet_record import FleetRecord, NodeProcess
from cluster.fleet_spec import FleetSpec, PoolSpec
from cluster.identity import fleet_identity
from cluster.paths import home, make_short_folder, private_dir, storage_dir
from cluster.processes import (
    ProcessId,
    alive,
    current_process,
    free_port,
    identify,
    kill_trees,
    start_detached,
    stop,
    terminate,
)
from cluster.ray_node import node_environment, resource_counts, tls_environment, worker_command
from cluster.ray_start_hook import ADDRESS, SOCKETS

START_TIMEOUT_S = 120.0
STARTED_MARK = b"Ray runtime started"
GRACE_S = 5.0
LONGEST_WORDS = 300
NO_WORDS = re.compile(r"^\s*$|\[state-dump\]|----- |Remaining processes will be killed")
TEMPORARY = "pf-"
"""How the names of fleets' temporary folders begin."""
AUTHENTICATION = "ray-token"
"""What the name of a token file of Ray begins with."""


def start_worker(record: FleetRecord, spec: FleetSpec, place: tuple[str, str], interpreter: Path) -> FleetRecord:
    """Node `place[1]` (a number, or the host's name) of pool `place[0]`, from the pool's own interpreter where Ray runs
    under it, with explicit
    labels and counts.

    What is left of the node before is killed: a `ray start` that was killed before it could be written down too.
    """
    name, node = place[0], f"{place[0]}-{place[1]}"
    pool = spec.pools[name]
    labels = {
        "polyfleet.io/pool": name,
        "polyfleet.io/node": node,
        "polyfleet.io/backend": pool.backend,
        "polyfleet.io/environment": pool.environment_name,
    } | pool.labels
    devices = record.found.get(pool.backend, pool.devices)
    counts = resource_counts(pool.backend, devices, cpu_count(), pool.emulated)
    from_ = interpreters.for_nodes(interpreter) if pool.environment.is_named else interpreter
    command = worker_command(from_, record.address, labels, counts)
    # Never 0o002: what a job writes may be its group's to change, but not everybody's.
    umask = {"POLYFLEET_UMASK": f"{record.umask | 0o002:03o}"}
    ranks = {"POLYFLEET_INTERPRETER": str(interpreter)} if from_ != interpreter else {}
    variables = _variables(name, spec.pools, node) | umask | ranks
    if not record.host:  # elsewhere, fences are read from Ray's own store alone
        variables["POLYFLEET_FENCES"] = str(fences.local_folder())
    stop_leftover_processes(record.cwd(node))
    terminate(p.process for p in record.processes if p.node == node)
    termination_notice.clear_notice(node_dir(node))
    return start_node(record, NodeProcess("worker", node, name, 0, 0.0), command, variables)


def cpu_count() -> int:
    """CPUs this process may use: its affinity, not the machine's count."""
    return (
        len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else (psutil.cpu_count() or 1)
    )


def _variables(name: str, pools: Mapping[str, PoolSpec], node: str) -> dict[str, str]:
    """What the node's agent reads."""
    pool = pools[name]
    neighbours = {other: str(storage_of(other, spec)) for other, spec in pools.items() if other != name}
    return {
        "POLYFLEET_FLEET": fleet_identity(home()),
        "POLYFLEET_POOL": name,
        "POLYFLEET_NODE": node,
        "POLYFLEET_BACKEND": pool.backend,
        "POLYFLEET_ENVIRONMENT": pool.environment_name,
        "POLYFLEET_DEVICES": str(pool.devices),
        "POLYFLEET_NODE_DIR": str(node_dir(node)),
        "POLYFLEET_STORAGE": str(make_storage(name, pool)),
        "POLYFLEET_NEIGHBOURS": json.dumps(neighbours),
        "POLYFLEET_POOL_VARIABLES": ",".join(pool.env),
    } | pool.env


def node_dir(node: str) -> Path:
    """Where the node's agent keeps its attempts."""
    return private_dir(home() / "nodes" / node)


def storage_of(name: str, pool: PoolSpec) -> Path:
    """The pool's checkpoint folder on this machine."""
    return Path(pool.storage) if pool.storage else home() / "storage" / name


def make_storage(name: str, pool: PoolSpec) -> Path:
    """Raises UserError for a named folder that cannot be one, OSError for one that cannot be made."""
    return storage_dir(storage_of(name, pool)) if pool.storage else private_dir(storage_of(name, pool))


def start_node(record: FleetRecord, node: NodeProcess, command: list[str], variables: Mapping[str, str]) -> FleetRecord:
    """Start a node of an embedded fleet and write it down in place of the one before."""
    ports = {"autoscaler": free_port(), "dashboard": free_port()}
    own = {SOCKETS: f"{record.ray_dir}/{node.node}", ADDRESS: record.node_address} | tls_environment(record.tls_dir)
    env = node_environment(Path(record.token_path), code_export.export(), ports, own | dict(variables))
    return begin(record, node, command, env, private_dir(record.cwd(node.node)))


def begin(record: FleetRecord, node: NodeProcess, command: list[str], env: Mapping[str, str], cwd: Path) -> FleetRecord:
    """Start `node` by `command` and write it down in place of the one before."""
    log = log_of(node.node)
    log.unlink(missing_ok=True)
    process = start_detached(command, env=env, cwd=cwd, log=log)
    others = tuple(p for p in record.processes if p.node != node.node)
    started = replace(node, pid=process.pid, created=process.created)
    record = replace(record, processes=(*others, started))
    fleet_record.write(record)
    return record


def log_of(node: str) -> Path:
    """What `ray start` of that node printed."""
    return home() / "logs" / f"ray-{node}.log"


def wait_until_started(node: NodeProcess) -> None:
    """Raises FleetError with the log's last lines when it dies or is not up within START_TIMEOUT_S."""
    log = log_of(node.node)
    deadline = time.monotonic() + START_TIMEOUT_S
    while STARTED_MARK not in log.read_bytes():
        if not alive(node.process):
            raise FleetError(
                f"node {node.node} did not start: {log_tail(log)}", f"see {log} and ray-session/ beside it"
            )
        if time.monotonic() > deadline:
            raise FleetError(f"node {node.node} is not up after {START_TIMEOUT_S:.0f} s: {log_tail(log)}", f"see {log}")
        time.sleep(0.05)


def log_tail(log: Path, lines: int = 5) -> str:
    """Of what a node's processes wrote, without what Ray prints around it and dumps of its state."""
    try:
        written = log.read_text(errors="replace").splitlines()
    except OSError as e:
        return f"its log {log} cannot be read: {e.strerror}"
    told = [line.strip()[:LONGEST_WORDS] for line in written if not NO_WORDS.search(line)]
    return " | ".join(told[-lines:]) or "it printed nothing"


def preserve_logs(record: FleetRecord) -> None:
    """Of a fleet that did not start: Ray's own logs, before its temporary folder goes."""
    found = record.ray_dir / "session_latest" / "logs"
    kept = home() / "logs" / "ray-session"
    shutil.rmtree(kept, ignore_errors=True)
    if found.is_dir():
        shutil.copytree(found, kept, ignore_dangling_symlinks=True)


def stop_all(record: FleetRecord) -> None:
    """The record goes last."""
    with suppress(OSError):  # a full disk must not keep a fleet up
        fleet_record.write(replace(record, state="stopping"))
    stop_processes(record)
    if record.ours:
        remove_tokens()
    fleet_record.remove()


def stop_processes(record: FleetRecord) -> None:
    """Attempts first: they may save. Then workers, so that none reports a lost head; then what a killed parent left
    behind.
    """
    stop(_supervisors(), GRACE_S)
    # A node takes leave of its head, in vain where that is gone.
    stop([p.process for p in record.processes if p.role != "head"], 0.0 if record.headless else GRACE_S)
    stop([p.process for p in record.processes if p.role == "head"], GRACE_S)
    for folder in filter(None, (record.temp_dir, record.before, record.joined_dir)):
        stop_leftover_processes(Path(folder))
        remove_temp_dir(Path(folder))
    terminate(p.process for p in record.processes)


def new_token() -> Path:
    """A token file of Ray that no other cluster had."""
    return tokens.ensure(home() / f"{AUTHENTICATION}-{secrets.token_hex(4)}")


def remove_tokens(but: str = "") -> None:
    """Of fleets that ended; `but` is that of the one which lives."""
    for path in home().glob(f"{AUTHENTICATION}*"):
        if str(path) != but:
            path.unlink(missing_ok=True)


def stop_unrecorded_processes() -> int:
    """Without a record: what was started with this home's Ray token, and its folders. Returns how many processes."""
    stop(_supervisors(), GRACE_S)
    found = {process: cwd for process, cwd in _rays_own() if _has_our_token(process)}
    stop(list(found), GRACE_S)
    for folder in {temporary for cwd in found.values() if (temporary := _temporary_of(cwd))}:
        stop_leftover_processes(folder)
        remove_temp_dir(folder)
    remove_tokens()
    fleet_record.remove()
    return len(found)


def stop_leftover_processes(folder: Path) -> None:
    """Kill Ray processes that work in `folder` or below: their parent died before it could stop them.

    None hears anything before: a node that is told to end would have its attempts save and end.
    """
    kill_trees([process for process, cwd in _rays_own() if cwd.is_relative_to(folder)])


def new_temporary() -> str:
    return str(make_short_folder(TEMPORARY))


def remove_temp_dir(folder: Path) -> None:
    """Remove a fleet's folder, unless it is a link or somebody else's by now."""
    with suppress(OSError):
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            shutil.rmtree(folder, ignore_errors=True)


def _temporary_of(cwd: Path) -> Path | None:
    """The fleet's folder that a node's process works in; older versions had all nodes work in that folder itself."""
    return next((folder for folder in (cwd, *cwd.parents) if folder.name.startswith(TEMPORARY)), None)


def _rays_own() -> Iterator[tuple[ProcessId, Path]]:
    """Ray's processes of our own user, with the folder each works in."""
    for process in current_process():
        with suppress(psutil.Error):
            found = identify(process.pid)
            if _is_rays(process.cmdline()):
                yield found, Path(process.cwd())


def _is_rays(words: list[str]) -> bool:
    """What runs decides, not what stands in its arguments: `tail -f` of Ray's log is none of Ray's processes."""
    program, first = [*words, "", ""][:2]
    if Path(program).name in ("raylet", "gcs_server"):
        return "/ray/core/src/ray/" in program
    if Path(program).name.startswith("python"):
        return words[1:3] == ["-m", "ray.scripts.scripts"] or ("/ray/" in first and first.endswith(".py"))
    return program.startswith("ray::")  # the title that Ray gives its Python processes


def _has_our_token(process: ProcessId) -> bool:
    with suppress(psutil.Error):
        named = psutil.Process(process.pid).environ().get("RAY_AUTH_TOKEN_PATH", "")
        return named.startswith(str(home() / AUTHENTICATION))
    return False


def _supervisors() -> list[ProcessId]:
    """Of attempts on this home's nodes. A SIGTERM lets their ranks save."""
    return termination_notice.supervisors_in(home() / "nodes")
