"""Starting and stopping the Ray nodes of an embedded fleet: written down first, waited for, stopped by process id."""

import json
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from cluster import code, fleet_record
from cluster.errors import FleetError
from cluster.fleet_record import FleetRecord, NodeProcess
from cluster.paths import home, private_dir
from cluster.processes import ProcessId, alive, free_port, reap, start_detached, stop
from cluster.ray_hook import SOCKETS
from cluster.ray_node import head_command, node_environment, resource_counts, worker_command
from cluster.spec import FleetSpec, PoolSpec

START_TIMEOUT_S = 120.0
STARTED_MARK = b"Ray runtime started"
GRACE_S = 5.0
AUTHENTICATION = "ray-token"
"""What the name of a token file of Ray begins with."""


def start_head(record: FleetRecord) -> FleetRecord:
    """The cluster's state lies in RocksDB under the fleet's temporary folder: a killed state server can come back."""
    port = int(record.address.rpartition(":")[2])
    command = head_command(Path(sys.executable), port, Path(record.temp_dir))
    state = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": f"{record.temp_dir}/gcs"}
    return _launch(record, NodeProcess("head", "head", "", 0, 0.0), command, state)


def start_worker(
    record: FleetRecord, spec: FleetSpec, place: tuple[str, int], interpreter: Path, found: Mapping[str, int]
) -> FleetRecord:
    """Node number `place[1]` of pool `place[0]`, from the pool's own interpreter, with explicit labels and counts."""
    name, node = place[0], f"{place[0]}-{place[1]}"
    pool = spec.pools[name]
    labels = {
        "polyfleet.io/pool": name,
        "polyfleet.io/node": node,
        "polyfleet.io/backend": pool.backend,
        "polyfleet.io/environment": pool.environment_name,
    } | pool.labels
    counts = resource_counts(pool.backend, found.get(pool.backend, pool.devices), cpu_count(), pool.emulated)
    command = worker_command(interpreter, record.address, labels, counts)
    return _launch(record, NodeProcess("worker", node, name, 0, 0.0), command, _variables(name, spec.pools, node))


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
        "POLYFLEET_POOL": name,
        "POLYFLEET_NODE": node,
        "POLYFLEET_BACKEND": pool.backend,
        "POLYFLEET_ENVIRONMENT": pool.environment_name,
        "POLYFLEET_DEVICES": str(pool.devices),
        "POLYFLEET_NODE_DIR": str(private_dir(home() / "nodes" / node)),
        "POLYFLEET_STORAGE": str(private_dir(storage_of(name, pool))),
        "POLYFLEET_NEIGHBOURS": json.dumps(neighbours),
        "POLYFLEET_POOL_VARIABLES": ",".join(pool.env),
    } | pool.env


def storage_of(name: str, pool: PoolSpec) -> Path:
    """The pool's checkpoint folder on this machine."""
    return Path(pool.storage) if pool.storage else home() / "storage" / name


def _launch(record: FleetRecord, node: NodeProcess, command: list[str], variables: Mapping[str, str]) -> FleetRecord:
    ports = {"autoscaler": free_port(), "dashboard": free_port()}
    sockets = {SOCKETS: f"{record.temp_dir}/{node.node}"}
    env = node_environment(Path(record.token_path), code.export(), ports, sockets | dict(variables))
    log = log_of(node.node)
    log.unlink(missing_ok=True)
    process = start_detached(command, env=env, cwd=Path(record.temp_dir), log=log)
    others = tuple(p for p in record.processes if p.node != node.node)
    started = replace(node, pid=process.pid, created=process.created)
    record = replace(record, processes=(*others, started))
    fleet_record.write(record)
    return record


def log_of(node: str) -> Path:
    """What `ray start` of that node printed."""
    return home() / "logs" / f"ray-{node}.log"


def await_started(node: NodeProcess) -> None:
    """Raises FleetError with the log's last lines when it dies or is not up within START_TIMEOUT_S."""
    log = log_of(node.node)
    deadline = time.monotonic() + START_TIMEOUT_S
    while STARTED_MARK not in log.read_bytes():
        if not alive(node.process):
            raise FleetError(f"node {node.node} did not start: {_tail(log)}", f"see {log} and ray-session/ beside it")
        if time.monotonic() > deadline:
            raise FleetError(f"node {node.node} is not up after {START_TIMEOUT_S:.0f} s: {_tail(log)}", f"see {log}")
        time.sleep(0.05)


def _tail(log: Path, lines: int = 5) -> str:
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-lines:]) or "it printed nothing"


def keep_logs(record: FleetRecord) -> None:
    """Of a fleet that did not start: Ray's own logs, before its temporary folder goes."""
    found = Path(record.temp_dir) / "session_latest" / "logs"
    kept = home() / "logs" / "ray-session"
    shutil.rmtree(kept, ignore_errors=True)
    if found.is_dir():
        shutil.copytree(found, kept, ignore_dangling_symlinks=True)


def stop_all(record: FleetRecord) -> None:
    """Attempts first: they may save. Then workers, so that none reports a lost head; then what a killed parent left
    behind; the record goes last.
    """
    with suppress(OSError):  # a full disk must not keep a fleet up
        fleet_record.write(replace(record, state="stopping"))
    stop(_supervisors(), GRACE_S)
    stop([p.process for p in record.processes if p.role != "head"], GRACE_S)
    stop([p.process for p in record.processes if p.role == "head"], GRACE_S)
    if record.embedded:
        _kill_strays(record.temp_dir)
        shutil.rmtree(record.temp_dir, ignore_errors=True)
        forget_tokens()
    reap()
    fleet_record.forget()


def forget_tokens() -> None:
    """Of fleets that ended: call it where no embedded fleet of this home lives."""
    for path in home().glob(f"{AUTHENTICATION}*"):
        path.unlink(missing_ok=True)


def stop_unrecorded() -> int:
    """Without a record: what was started with this home's Ray token, and its folders. Returns how many processes."""
    stop(_supervisors(), GRACE_S)
    found = [process for process in psutil.process_iter(["environ", "cwd", "create_time"]) if _has_our_token(process)]
    stop([ProcessId(process.pid, process.info["create_time"]) for process in found], GRACE_S)
    for folder in {Path(process.info["cwd"] or "") for process in found}:
        if folder.name.startswith("pf-"):
            shutil.rmtree(folder, ignore_errors=True)
    forget_tokens()
    fleet_record.forget()
    return len(found)


def _has_our_token(process: psutil.Process) -> bool:
    named: str = (process.info["environ"] or {}).get("RAY_AUTH_TOKEN_PATH", "")
    return named.startswith(str(home() / AUTHENTICATION))


def _supervisors() -> list[ProcessId]:
    """Of attempts on this home's nodes. A SIGTERM lets their ranks save; they take the ranks along when they go."""
    nodes = str(home() / "nodes")
    found = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        words = process.info["cmdline"] or ()
        if "workers.attempt.supervisor" in words and any(word.startswith(nodes) for word in words):
            found.append(ProcessId(process.pid, process.info["create_time"]))
    return found


def _kill_strays(temp_dir: str) -> None:
    """Ray processes whose parent died before it could stop them still name the fleet's folder, or work in it."""
    for process in psutil.process_iter(["cmdline", "cwd"]):
        named = temp_dir in " ".join(process.info["cmdline"] or ()) or process.info["cwd"] == temp_dir
        if named and process.pid != psutil.Process().pid:
            for member in (*_children(process), process):
                try:
                    member.kill()
                except psutil.NoSuchProcess:
                    continue


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
