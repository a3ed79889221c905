"""What a run is held against: of each kind the newest baseline with the same software, else the newest. Pure."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from cluster.errors import NotFound

Data = dict[str, Any]


def software(column: Data) -> dict[str, str]:
    """What decides, beside the device's kind, how fast a column is."""
    device = column.get("device", {})
    return {
        **{name: str(value) for name, value in (column.get("versions") or {}).items()},
        "torch": column.get("torch", ""), "driver": device.get("driver_version", ""),
        "device": device.get("device_name", ""), "threads": str(column.get("threads", "")),
    }  # fmt: skip


def software_hash(column: Data) -> str:
    return hashlib.sha256(json.dumps(software(column), sort_keys=True).encode()).hexdigest()[:12]


def choose(baselines: Iterable[Iterable[Data]], run: Iterable[Data]) -> list[Data]:
    """Lines to hold `run` against, from runs named as baselines, oldest first. Raises NotFound where none has a kind of
    the run.
    """
    known = [list(lines) for lines in baselines]
    chosen: dict[str, list[Data]] = {}
    for column in _columns(run):
        candidates = [lines for lines in known if any(c["kind"] == column["kind"] for c in _columns(lines))]
        same = [lines for lines in candidates if _has(lines, column["kind"], software_hash(column))]
        if candidates:
            chosen[column["kind"]] = (same or candidates)[-1]
    if not chosen:
        kinds = ", ".join(sorted({c["kind"] for c in _columns(run)}))
        raise NotFound(f"no baseline of {kinds}", "`polyfleet benchmark baseline RUN`, or --against RUN")
    names = dict.fromkeys(_name(lines) for lines in chosen.values())
    begun = {"line": "begun", "run": ", ".join(names), "request": {}, "columns": [], "time": 0.0}
    return [begun, *(line for kind, lines in chosen.items() for line in _of_kind(lines, kind))]


def _columns(lines: Iterable[Data]) -> list[Data]:
    return [line["facts"] for line in lines if line["line"] == "column"]


def _has(lines: list[Data], kind: str, wanted: str) -> bool:
    return any(c["kind"] == kind and software_hash(c) == wanted for c in _columns(lines))


def _name(lines: list[Data]) -> str:
    return next((str(line["run"]) for line in lines if line["line"] == "begun"), "")


def _of_kind(lines: list[Data], kind: str) -> list[Data]:
    names = {line["column"] for line in lines if line["line"] == "column" and line["facts"]["kind"] == kind}
    return [line for line in lines if line["line"] in ("column", "cell") and line["column"] in names]
