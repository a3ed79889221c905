"""Choose the baselines of a run: per kind the newest with the same software, else the newest. Pure."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from cluster.errors import NotFound
from orchestrator.benchmark.results import LINE_FORMAT

Data = dict[str, Any]


def software(target: Data) -> dict[str, str]:
    """Facts that, besides the device's kind, decide how fast a target is."""
    device = target.get("device", {})
    return {
        **{name: str(value) for name, value in (target.get("versions") or {}).items()},
        "torch": target.get("torch", ""), "driver": device.get("driver_version", ""),
        "device": device.get("device_name", ""), "threads": str(target.get("threads", "")),
    }  # fmt: skip


def software_hash(target: Data) -> str:
    return hashlib.sha256(json.dumps(software(target), sort_keys=True).encode()).hexdigest()[:12]


def choose(baselines: Iterable[Iterable[Data]], run: Iterable[Data]) -> list[Data]:
    """Select the lines to compare `run` with, from baseline runs, oldest first.

    Raises NotFound if no baseline has a kind of the run.
    """
    recorded = [list(lines) for lines in baselines]
    lines_by_kind: dict[str, list[Data]] = {}
    for target in _targets(run):
        candidates = [lines for lines in recorded if any(c["kind"] == target["kind"] for c in _targets(lines))]
        same = [lines for lines in candidates if _has(lines, target["kind"], software_hash(target))]
        if candidates:
            lines_by_kind[target["kind"]] = (same or candidates)[-1]
    if not lines_by_kind:
        kinds = ", ".join(sorted({c["kind"] for c in _targets(run)}))
        raise NotFound(
            f"no baseline of {kinds}",
            "make a run the baseline with `polyfleet benchmark baseline RUN`, or use --against RUN",
        )
    names = dict.fromkeys(_name(lines) for lines in lines_by_kind.values())
    header = {
        "line": "started",
        "format": LINE_FORMAT,
        "run": ", ".join(names),
        "request": {},
        "targets": [],
        "time": 0.0,
    }
    return [header, *(line for kind, lines in lines_by_kind.items() for line in _of_kind(lines, kind))]


def _targets(lines: Iterable[Data]) -> list[Data]:
    return [line["facts"] for line in lines if line["line"] == "target"]


def _has(lines: list[Data], kind: str, expected_hash: str) -> bool:
    return any(c["kind"] == kind and software_hash(c) == expected_hash for c in _targets(lines))


def _name(lines: list[Data]) -> str:
    return next((str(line["run"]) for line in lines if line["line"] == "started"), "")


def _of_kind(lines: list[Data], kind: str) -> list[Data]:
    targets = {line["target"] for line in lines if line["line"] == "target" and line["facts"]["kind"] == kind}
    return [line for line in lines if line["line"] in ("target", "result") and line["target"] in targets]
