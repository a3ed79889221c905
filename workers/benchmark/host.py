"""The machine's state around a measurement: other users of its CPUs, temperature and clock frequency.

Linux provides most of it in files. A value that the system does not provide is omitted, never guessed.
"""

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil

MAX_QUIET_PRESSURE, UNUSABLE_PRESSURE = 10.0, 90.0
"""Percent of the last ten seconds in which some task waited for a CPU (PSI, Documentation/accounting/psi.rst). Above 90
on our own machine every comparison was inconclusive."""
MAX_QUIET_STEAL, UNUSABLE_STEAL = 1.0, 25.0
"""Percent of CPU time that the hypervisor gave to other guests (proc(5), steal)."""
DEFAULT_LLC_BYTES = 64 << 20
BUSY_CPUS, MAX_BUSY_PROCESSES = 0.05, 3
"""Other processes are listed if they use at least 0.05 CPUs, at most the busiest three."""


def state() -> dict[str, Any]:
    """Return the current load, pressure, CPU times since boot, frequency and temperature."""
    return {
        "load_1min": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "pressure_cpu": _pressure("cpu"),
        "pressure_memory": _pressure("memory"),
        "cpu_times": _cpu_times(),
        "governor": _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "cpu_mhz": _frequency(),
        "temperature_c": _temperature(),
    }


def classify(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Classify the time between two states: {"class": quiet | shared | unusable, "reasons", "steal_percent", …}.

    Pressure does not identify processes, so it includes contention between our own. A device's state, if available,
    shows whether heat or power limits slowed it, and whether other processes used it.
    """
    steal, busy = _share(before, after, "steal"), _share(before, after, "busy")
    pressure = max((s["pressure_cpu"] for s in (before, after) if s["pressure_cpu"] is not None), default=None)
    reasons, worst = [], "quiet"
    if steal is not None and steal > MAX_QUIET_STEAL:
        reasons.append(f"the hypervisor took {steal:.0f} % of the CPU time")
        worst = "unusable" if steal > UNUSABLE_STEAL else "shared"
    if pressure is not None and pressure > MAX_QUIET_PRESSURE:
        reasons.append(f"tasks waited for a CPU {pressure:.0f} % of the time")
        worst = "unusable" if pressure > UNUSABLE_PRESSURE or worst == "unusable" else "shared"
    load, cpus = before.get("load_1min"), before.get("cpus") or 1
    if pressure is None and load is not None and load > 0.5 * cpus:
        reasons.append(f"load average {load:.1f} on {cpus} CPUs at the start")
        worst = "shared" if worst == "quiet" else worst
    slowed = sorted({cause for s in (before, after) for cause in s.get("device", {}).get("slowed_by", [])})
    others = {pid for s in (before, after) for pid in s.get("device", {}).get("others", [])}
    if slowed or others:
        reasons += [f"the device's clock was slowed by {', '.join(slowed)}"] if slowed else []
        reasons += [f"{len(others)} other processes used the device"] if others else []
        worst = "shared" if worst == "quiet" else worst
    reasons += _busy_others(after) if worst != "quiet" else []
    return {"class": worst, "reasons": reasons, "steal_percent": steal, "busy_percent": busy, "pressure_cpu": pressure}


def _busy_others(after: dict[str, Any]) -> list[str]:
    entries = [f"{p['name']} {p['cpus']:.1f}" for p in after.get("busiest", [])]
    return [f"other processes used CPUs: {', '.join(entries)}"] if entries else []


class BusyProcesses:
    """Track other processes that used CPUs since the last call: {"name", "pid", "cpus"}, busiest first."""

    def __init__(self) -> None:
        self._last_times = _process_times(())
        self._last_s = time.monotonic()

    def busiest(self, ours: Collection[int]) -> list[dict[str, Any]]:
        now, at_s = _process_times(ours), time.monotonic()
        passed_s = max(at_s - self._last_s, 1e-3)
        rates: list[dict[str, Any]] = [
            {
                "name": name,
                "pid": pid,
                "cpus": round((used_s - self._last_times.get(pid, (name, 0.0))[1]) / passed_s, 2),
            }
            for pid, (name, used_s) in now.items()
        ]
        self._last_times, self._last_s = now, at_s
        busy = [rate for rate in rates if rate["cpus"] >= BUSY_CPUS]
        return sorted(busy, key=lambda rate: -rate["cpus"])[:MAX_BUSY_PROCESSES]


def _process_times(ours: Collection[int]) -> dict[int, tuple[str, float]]:
    """Return {pid: (name, CPU seconds)} of all processes except `ours` and this one."""
    usage = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        used = process.info["cpu_times"]
        if used is not None and process.pid != os.getpid() and process.pid not in ours:
            usage[process.pid] = (str(process.info["name"]), used.user + used.system)
    return usage


def identity() -> str:
    """Identify the machine since its boot: equal for all processes, in any container or environment."""
    return _text("/proc/sys/kernel/random/boot_id") or f"{os.uname().nodename}-{int(psutil.boot_time())}"


def last_level_cache_bytes() -> int:
    """Size of the largest cache of CPU 0 (default: 64 MiB)."""
    sizes = [_text(str(path)) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes_bytes = [int(size[:-1]) * units[size[-1]] for size in sizes if size and size[-1] in units]
    return max(sizes_bytes, default=DEFAULT_LLC_BYTES)


def _pressure(what: str) -> float | None:
    """Return PSI's "some avg10" in percent, or None."""
    line = next((text for text in _text(f"/proc/pressure/{what}").splitlines() if text.startswith("some")), "")
    values = dict(part.split("=") for part in line.split()[1:])
    return float(values["avg10"]) if "avg10" in values else None


def _cpu_times() -> dict[str, float]:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    total = sum(getattr(times, field) for field in times._fields if not field.startswith("guest"))
    return {"total": total, "busy": total - idle, "steal": getattr(times, "steal", 0.0)}


def _share(before: dict[str, Any], after: dict[str, Any], what: str) -> float | None:
    total = after["cpu_times"]["total"] - before["cpu_times"]["total"]
    return 100 * (after["cpu_times"][what] - before["cpu_times"][what]) / total if total > 0 else None


def _frequency() -> float | None:
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError, AttributeError):
        return None
    return round(frequency.current, 0) if frequency else None


def _temperature() -> float | None:
    try:
        sensors = psutil.sensors_temperatures()
    except (OSError, AttributeError):
        return None
    return max((reading.current for readings in sensors.values() for reading in readings), default=None)


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
