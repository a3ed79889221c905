"""Data of `polyfleet top`: a snapshot of the server's nodes and jobs, and rates between two snapshots."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from cluster.catalogue.device_metrics import LIVE_METRICS
from orchestrator.core.states import State
from orchestrator.units import timestamp

if TYPE_CHECKING:
    from orchestrator.views.jobs import JobState

Data = Mapping[str, Any]
ON_DEVICES: tuple["JobState", ...] = ("STARTING", "RUNNING", "SAVING")
WAITING: tuple["JobState", ...] = ("RECOVERING", "PENDING")
MAX_JOBS = 200
"""Maximum number of jobs requested of each group, those on devices and those that wait."""
FIELDS = ("id", "state", "kind", "pool", "nodes", "submitted_at", "started_at", "resumed_step", "metrics", "reason",
          "attempts", "progress", "known_until")  # fmt: skip
RATE_WINDOW_S = 30.0


DeviceNow = dict[str, Any]
"""One device: `kind`, `index`, `name`, `job`, `total_memory_bytes`, and LIVE_METRICS by name; None for unknown values.
For a CPU, `busy_percent` is the node's load divided by its cores, and memory is the node's.
"""


class NodeNow(TypedDict):
    node: str
    pool: str
    state: str
    reason: str
    load_1min: float | None
    cpu_count: int | None
    used_memory_bytes: int | None
    total_memory_bytes: int | None
    devices: list[DeviceNow]


class JobNow(TypedDict):
    """One job. `steps_per_s` is the average of the last 30 s if it was watched that long, else of its attempt. `left_s`
    is None if it would only be a guess.
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


class TopSnapshot(TypedDict):
    at: str
    nodes: list[NodeNow]
    jobs: list[JobNow]


class StepRates:
    """Steps per second of jobs over the last RATE_WINDOW_S."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[tuple[float, int]]] = {}

    def add(self, jobs: Sequence[Data], now_s: float) -> None:
        """Add a sample of each job, and drop jobs that are not in `jobs`. A lower step is that of a new attempt."""
        current: dict[str, deque[tuple[float, int]]] = {}
        for job in jobs:
            if (step := step_of(job)) is not None:
                samples = current[job["id"]] = self._samples.get(job["id"], deque())
                if samples and step < samples[-1][1]:
                    samples.clear()
                samples.append((now_s, step))
                while now_s - samples[0][0] > RATE_WINDOW_S:
                    samples.popleft()
        self._samples = current

    def rate(self, job: Data, now_s: float) -> float | None:
        samples = self._samples.get(job["id"])
        if samples and len(samples) > 1 and samples[-1][0] > samples[0][0]:
            return (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])
        return _average(job, now_s)


def _average(job: Data, now_s: float) -> float | None:
    """Average rate over the running attempt, including its start."""
    step, started = step_of(job), timestamp(job["attempts"][-1]["started_at"]) if job["attempts"] else None
    if step is None or started is None or now_s <= started.timestamp():
        return None
    return max(0.0, (step - (job["resumed_step"] or 0)) / (now_s - started.timestamp()))


def step_of(job: Data) -> int | None:
    step = job["metrics"].get("step")
    return step if type(step) is int else None


def snapshot(nodes: Sequence[Data], jobs: Sequence[Data], rates: StepRates, at: str) -> TopSnapshot:
    """Build a snapshot from the server's `nodes` and `jobs` at time `at`, and add it to `rates`."""
    moment = timestamp(at)
    now_s = moment.timestamp() if moment else 0.0
    rates.add(jobs, now_s)
    return {
        "at": at,
        "nodes": [_node(node) for node in nodes],
        "jobs": [_job(job, rates, now_s) for job in sorted(jobs, key=_order)],
    }


def _order(job: Data) -> tuple[int, str]:
    """Sort key: running jobs first; among equals, the job that was submitted first."""
    return (*ON_DEVICES, *WAITING).index(job["state"]), job["submitted_at"] or ""


def _node(node: Data) -> NodeNow:
    use = {(entry["backend"], entry["index"]): entry for entry in node["use"]}
    total, free = node["memory_total_bytes"], node["memory_free_bytes"]
    return {
        "node": node["node"],
        "pool": node["pool"],
        "state": node["state"],
        "reason": node["reason"],
        "load_1min": node["load_1min"],
        "cpu_count": node["cpu_count"],
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
    metrics = {metric.name: use.get(metric.name) for metric in LIVE_METRICS}
    if metrics["used_memory_bytes"] is None and total and free is not None:
        metrics["used_memory_bytes"] = total - free
    return {
        "kind": device["kind"],
        "index": device["index"],
        "name": device["name"],
        "job": device.get("allocated_to"),
        "total_memory_bytes": total,
    } | metrics


def _left_s(progress: Data | None) -> float | None:
    return progress["left_s"] if progress and progress["left_from"] != "attained" else None


def _job(job: Data, rates: StepRates, now_s: float) -> JobNow:
    started, last_contact = timestamp(job["started_at"]), timestamp(job.get("known_until"))
    until_s = last_contact.timestamp() if last_contact else now_s
    is_running = job["state"] in (State.RUNNING, State.SAVING)
    return {
        "id": job["id"],
        "state": job["state"],
        "kind": job["kind"],
        "nodes": job["nodes"],
        "ran_s": max(0.0, until_s - started.timestamp()) if started else None,
        "step": step_of(job),
        "steps_per_s": rates.rate(job, now_s) if is_running else None,
        "left_s": _left_s(job.get("progress")),
        "reason": "" if is_running and not last_contact else str(job["reason"] or ""),
    }
