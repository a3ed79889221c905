"""What `polyfleet top` shows, from what the server tells of nodes and jobs: one snapshot, and the rate between two."""

from collections import deque
from typing import Any, TypedDict

from orchestrator.core.states import State
from orchestrator.show.units import timestamp

Data = dict[str, Any]
ON_DEVICES, WAITING = ("STARTING", "RUNNING", "SAVING"), ("RECOVERING", "PENDING")
MOST = 200
"""Jobs of either sort that are asked for."""
FIELDS = ("id", "state", "kind", "pool", "nodes", "submitted_at", "started_at", "resumed_step", "metrics", "reason",
          "attempts", "progress", "known_until")  # fmt: skip
RATE_OVER_S = 30.0


class DeviceNow(TypedDict):
    """One device; None for what nobody tells. Of a CPU `busy_percent` is the node's load by its cores, and memory the
    node's.
    """

    kind: str
    index: int
    name: str
    job: str | None
    busy_percent: float | None
    used_memory_bytes: int | None
    total_memory_bytes: int | None
    power_w: float | None
    temperature_c: float | None


class NodeNow(TypedDict):
    node: str
    pool: str
    state: str
    load_1min: float | None
    cpu_count: int | None
    used_memory_bytes: int | None
    total_memory_bytes: int | None
    devices: list[DeviceNow]


class JobNow(TypedDict):
    """`steps_per_s` is over the last half minute where it was watched for so long, else over its attempt. `left_s` is
    None where only a guess is known.
    """

    id: str
    state: str
    kind: str
    nodes: list[str]
    ran_s: float | None
    step: int | None
    steps_per_s: float | None
    left_s: float | None
    reason: str


class Now(TypedDict):
    at: str
    nodes: list[NodeNow]
    jobs: list[JobNow]


class Rates:
    """Steps per second of jobs over what was seen of them lately."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def add(self, jobs: list[Data], now_s: float) -> None:
        """Jobs that are not among them are forgotten. A step that goes back is a new attempt's."""
        kept: dict[str, deque[tuple[float, int]]] = {}
        for job in jobs:
            if (step := step_of(job)) is not None:
                seen = kept[job["id"]] = self._seen.get(job["id"], deque())
                if seen and step < seen[-1][1]:
                    seen.clear()
                seen.append((now_s, step))
                while now_s - seen[0][0] > RATE_OVER_S:
                    seen.popleft()
        self._seen = kept

    def of(self, job: Data, now_s: float) -> float | None:
        seen = self._seen.get(job["id"])
        if seen and len(seen) > 1 and seen[-1][0] > seen[0][0]:
            return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])
        return _average(job, now_s)


def _average(job: Data, now_s: float) -> float | None:
    """Over the attempt that runs, its start included."""
    step, started = step_of(job), timestamp(job["attempts"][-1]["started_at"]) if job["attempts"] else None
    if step is None or started is None or now_s <= started.timestamp():
        return None
    return max(0.0, (step - (job["resumed_step"] or 0)) / (now_s - started.timestamp()))


def step_of(job: Data) -> int | None:
    step = job["metrics"].get("step")
    return step if type(step) is int else None


def snapshot(nodes: list[Data], jobs: list[Data], rates: Rates, at: str) -> Now:
    """`nodes` and `jobs` as the server tells them, `at` the time of that; it is added to `rates`."""
    then = timestamp(at)
    now_s = then.timestamp() if then else 0.0
    rates.add(jobs, now_s)
    return {
        "at": at,
        "nodes": [_node(node) for node in nodes],
        "jobs": [_job(job, rates, now_s) for job in sorted(jobs, key=_order)],
    }


def _order(job: Data) -> tuple[int, str]:
    """Those that run come first; among equals, who has waited longest."""
    return (*ON_DEVICES, *WAITING).index(job["state"]), job["submitted_at"] or ""


def _node(node: Data) -> NodeNow:
    use = {(told["backend"], told["index"]): told for told in node.get("use") or ()}
    total, free = node.get("memory_total_bytes"), node.get("memory_free_bytes")
    return {
        "node": node["node"],
        "pool": node.get("pool", ""),
        "state": node["state"],
        "load_1min": node.get("load_1min"),
        "cpu_count": node.get("cpu_count"),
        "used_memory_bytes": None if total is None or free is None else total - free,
        "total_memory_bytes": total,
        "devices": [_device(d, node, use.get((d["backend"], d["index"])) or {}) for d in node["devices"]],
    }


def _device(device: Data, node: Data, use: Data) -> DeviceNow:
    shared = device["backend"] == "cpu" or device["emulated"]
    total, free = device["total_memory_bytes"], device["free_memory_bytes"]
    if shared:
        total, free = node["memory_total_bytes"], node["memory_free_bytes"]
        use = {"busy_percent": min(100.0, 100.0 * node["load_1min"] / max(node["cpu_count"], 1))}
    used = use.get("used_memory_bytes")
    return {
        "kind": device["kind"],
        "index": device["index"],
        "name": device["name"],
        "job": device.get("leased_by"),
        "busy_percent": use.get("busy_percent"),
        "used_memory_bytes": used if used is not None else (total - free if total and free is not None else None),
        "total_memory_bytes": total,
        "power_w": use.get("power_w"),
        "temperature_c": use.get("temperature_c"),
    }


def _left_s(progress: Data | None) -> float | None:
    return progress["left_s"] if progress and progress["left_from"] != "attained" else None


def _job(job: Data, rates: Rates, now_s: float) -> JobNow:
    started, known = timestamp(job["started_at"]), timestamp(job.get("known_until"))
    until_s = known.timestamp() if known else now_s
    runs = job["state"] in (State.RUNNING, State.SAVING)
    return {
        "id": job["id"],
        "state": job["state"],
        "kind": job["kind"],
        "nodes": job["nodes"],
        "ran_s": max(0.0, until_s - started.timestamp()) if started else None,
        "step": step_of(job),
        "steps_per_s": rates.of(job, now_s) if runs else None,
        "left_s": _left_s(job.get("progress")),
        "reason": "" if runs and not known else str(job["reason"] or ""),
    }
