"""Display of `polyfleet top`: devices with their use and jobs, and jobs with their progress."""

from collections import Counter

from cluster.catalogue.device_metrics import LIVE_METRICS, DeviceMetric
from orchestrator.client.inventory import state_text
from orchestrator.client.top import MAX_JOBS, DeviceNow, JobNow, NodeNow, TopSnapshot
from orchestrator.show.table import TableStack, TextTable, grid
from orchestrator.units import duration, size, timestamp

BAR = 10
MAX_ROWS = 30


def top(now: TopSnapshot) -> TableStack:
    hidden = len(now["jobs"]) - MAX_ROWS
    more = [f"and {hidden} more; run `polyfleet jobs` to see all"] if hidden > 0 else []
    return TableStack((_summary(now), "", devices(now["nodes"]), "", jobs(now["jobs"][:MAX_ROWS]), *more))


def _summary(now: TopSnapshot) -> str:
    all_devices = [device for node in now["nodes"] for device in node["devices"]]
    used = sum(device["job"] is not None for device in all_devices)
    states = Counter(job["state"] for job in now["jobs"])
    moment = timestamp(now["at"])
    jobs = ", ".join(f"{count}{'+' * (count >= MAX_JOBS)} {state}" for state, count in states.items())
    clock = [f"{moment:%H:%M:%S} UTC"] if moment else []
    devices = f"{len(now['nodes'])} nodes, {used} of {len(all_devices)} devices in use"
    return "   ".join([*clock, devices, f"jobs: {jobs or 'none running or waiting'}"])


def devices(nodes: list[NodeNow]) -> TextTable:
    """One line per device, and one per node without devices.

    A node's own values are in its first line. A column without any value is left out.
    """
    rows = [row for node in nodes for row in _rows(node)]
    headings = (metric.heading for metric in LIVE_METRICS)
    columns = ("POOL", "NODE", "LOAD", "RAM", "DEVICE", "KIND", *headings, "JOB", "STATE")
    filled = [position for position in range(len(columns)) if any(row[position] for row in rows)]
    lines = ([row[position] for position in filled] for row in rows)
    return grid(
        [columns[position] for position in filled], lines, empty="no nodes; run `polyfleet up` to start a fleet"
    )


def _rows(node: NodeNow) -> list[tuple[str, ...]]:
    load = f"{node['load_1min']:.1f}/{node['cpu_count']}" if node["load_1min"] is not None else ""
    first = (node["pool"], node["node"], load, _of(node["used_memory_bytes"], node["total_memory_bytes"]))
    state = "" if node["state"] == "ready" else state_text(node)
    no_device = ("", "no devices" if node["state"] == "ready" else "", *("" for _ in LIVE_METRICS), "")
    lines = [_device(device) for device in node["devices"]] or [no_device]
    return [(*(first if number == 0 else ("",) * 4), *line, state) for number, line in enumerate(lines)]


def _device(device: DeviceNow) -> tuple[str, ...]:
    metrics = (_metric(metric, device) for metric in LIVE_METRICS)
    return (str(device["index"]), device["kind"], *metrics, device["job"] or "")


def _metric(metric: DeviceMetric, device: DeviceNow) -> str:
    value = device[metric.name]
    if metric.unit == "%":
        return bar(value)
    if metric.unit == "B":
        return _of(value, device["total_memory_bytes"])
    return f"{value:.0f} {metric.unit}" if value is not None else ""


def bar(percent: float | None) -> str:
    """Bar such as `████······  40 %`; "" if unknown."""
    if percent is None:
        return ""
    full = round(max(0.0, min(percent, 100.0)) / 100 * BAR)
    return f"{'█' * full}{'·' * (BAR - full)} {percent:3.0f} %"


def _of(used: int | None, total: int | None) -> str:
    if used is None:
        return size(total)
    return f"{size(used)} / {size(total)}" if total else size(used)


def jobs(rows: list[JobNow]) -> TextTable:
    columns = ("JOB", "STATE", "KIND", "NODES", "RAN", "STEP", "RATE", "LEFT", "WHY")
    lines = (
        (
            job["id"],
            job["state"],
            job["kind"],
            ", ".join(job["nodes"]),
            duration(job["ran_s"]),
            job["step"],
            f"{job['steps_per_s']:.3g} steps/s" if job["steps_per_s"] is not None else "",
            duration(job["left_s"]),
            job["reason"],
        )
        for job in rows
    )
    return grid(columns, lines, empty="no job is running or waiting")
