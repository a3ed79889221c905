"""Memory and idle load of every process of the fleet, the server and the Ray head beside it."""

import time
from typing import Any

import psutil

from cluster.host.processes import ProcessId, with_descendants

# How a process is told by its command line or title; the first that fits.
ROLES = (
    ("ray.scripts.scripts start", "`ray start`, waiting"),
    ("ray::Agent", "our agent (Ray actor)"),
    ("orchestrator.server", "our server"),
    ("raylet/raylet", "raylet"),
    ("gcs_server", "Ray's state server (GCS)"),
    ("DashboardAgent", "Ray's node agent"),
    ("RuntimeEnvAgent", "Ray's runtime-env agent"),
    ("dashboard", "Ray's dashboard"),
    ("ray::", "Ray worker, idle"),
    ("monitor", "Ray's monitors"),
    ("client.server", "Ray's client server"),
)
IDLE_S = 5.0


def measure(groups: dict[str, list[ProcessId]], idle_s: float = IDLE_S) -> list[dict[str, Any]]:
    """One row per group and role. `cpu_share` is of one core while nothing was asked of them for `idle_s`."""
    members = [(group, process) for group, roots in groups.items() for process in with_descendants(roots)]
    before = {process.pid: _cpu_s(process) for _, process in members}
    time.sleep(idle_s)
    found = [_one(group, process, before[process.pid], idle_s) for group, process in members]
    rows = [row for row in found if row]
    return [summed(same) for same in _split(rows, "group", "role")]


def totals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per group, without a role."""
    return [{k: v for k, v in summed(same).items() if k != "role"} for same in _split(rows, "group")]


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    pss = [row["pss_bytes"] for row in rows]
    sums = {name: sum(row[name] for row in rows) for name in ("n", "rss_bytes", "cpu_share")}
    return rows[0] | sums | {"pss_bytes": None if None in pss else sum(pss)}


def _split(rows: list[dict[str, Any]], *keys: str) -> list[list[dict[str, Any]]]:
    """Rows that agree in `keys` together, in the order they come."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(found.values())


def _one(group: str, process: psutil.Process, cpu_before_s: float, idle_s: float) -> dict[str, Any] | None:
    try:
        words = " ".join([process.name(), *process.cmdline()])
        memory = process.memory_full_info()
        share = max((_cpu_s(process) - cpu_before_s) / idle_s, 0.0)
    except psutil.Error:
        return None  # a worker that Ray let go meanwhile
    role = next((role for part, role in ROLES if part in words), "other")
    pss = getattr(memory, "pss", None)
    return {"group": group, "role": role, "n": 1, "rss_bytes": memory.rss, "pss_bytes": pss, "cpu_share": share}


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
        return float(times.user + times.system)
    except psutil.Error:
        return 0.0
