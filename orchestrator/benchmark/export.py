"""Runs for other tools: JSON lines, Parquet, pytest-benchmark's JSON, asv's JSON."""

import hashlib
import io
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from statistics import fmean, median, pstdev, quantiles
from typing import Any

from cluster.errors import UserError
from cluster.version import VERSION
from workers.benchmark import statistics

Data = dict[str, Any]


def to_jsonl(lines: Iterable[Data]) -> str:
    """One JSON object per line, as they were measured: docs/benchmark-format.md."""
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def to_pytest_benchmark(lines: Iterable[Data]) -> str:
    """As `pytest --benchmark-json` writes it: `pytest-benchmark compare` reads it. Times of a call, by block."""
    lines = list(lines)
    begun = next((line for line in lines if line["line"] == "begun"), {})
    measured = [line for line in lines if line["line"] == "cell" and line["blocks"]]
    moment = datetime.fromtimestamp(begun.get("time") or 0, UTC).isoformat()
    return json.dumps(
        {
            "machine_info": {line["column"]: line["facts"] for line in lines if line["line"] == "column"},
            "commit_info": {"id": begun.get("run", ""), "time": moment, "dirty": False, "branch": ""},
            "benchmarks": [_benchmark(cell) for cell in measured],
            "datetime": moment,
            "version": f"polyfleet-{VERSION}",
        },
        indent=1,
    )


def _benchmark(cell: Data) -> Data:
    times = _call_times(cell)
    q1, middle, q3 = quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
    stats = {
        "min": min(times), "max": max(times), "mean": fmean(times), "stddev": pstdev(times), "rounds": len(times),
        "median": middle, "iqr": q3 - q1, "q1": q1, "q3": q3, "iqr_outliers": 0, "stddev_outliers": 0,
        "outliers": "0;0", "ld15iqr": min(times), "hd15iqr": max(times), "ops": 1 / fmean(times),
        "total": sum(times), "data": times, "iterations": cell["blocks"][0]["calls"],
    }  # fmt: skip
    names = [name for name in ("precision", "level", "regime", "kernels", "column") if name in cell]
    return {
        "group": cell["case"], "name": cell["id"], "fullname": f"polyfleet::{cell['id']}", "param": None,
        "params": {name: cell[name] for name in names}, "extra_info": {"accuracy": cell.get("accuracy")},
        "options": {}, "stats": stats,
    }  # fmt: skip


def to_asv(lines: Iterable[Data], column: str = "") -> str:
    """A results file of asv (version 2) for one column, the first unless named. asv keeps one environment per file."""
    lines = list(lines)
    begun = next((line for line in lines if line["line"] == "begun"), {})
    columns = {line["column"]: line["facts"] for line in lines if line["line"] == "column"}
    chosen = column or next(iter(columns), "")
    cells = [c for c in lines if c["line"] == "cell" and c["column"] == chosen and c["blocks"]]
    began_ms = int((begun.get("time") or 0) * 1000)
    keys = (
        "result",
        "params",
        "version",
        "started_at",
        "duration",
        "stats_ci_99_a",
        "stats_ci_99_b",
        "samples",
        "number",
    )
    return json.dumps(
        {
            "commit_hash": hashlib.sha1(str(begun.get("run", "")).encode(), usedforsecurity=False).hexdigest(),
            "env_name": chosen, "date": began_ms, "params": {"machine": chosen, **_plain(columns.get(chosen, {}))},
            "python": "", "requirements": columns.get(chosen, {}).get("versions", {}), "env_vars": {},
            "result_columns": list(keys),
            "results": {_asv_name(cell): _asv_row(cell, began_ms) for cell in cells},
            "durations": {}, "version": 2,
        },
        indent=1,
    )  # fmt: skip


def _asv_name(cell: Data) -> str:
    kernels = f"_{cell['kernels']}" if cell.get("kernels") else ""
    return f"{cell['case']}.time_{cell['precision']}_{cell['level']}_{cell['regime']}{kernels}"


def _asv_row(cell: Data, began_ms: int) -> list[Any]:
    times = _call_times(cell)
    version = hashlib.sha256(cell["case"].encode()).hexdigest()
    return [[median(times)], [], version, began_ms, sum(times), [min(times)], [max(times)], [times], [1]]


def _plain(facts: Data) -> Data:
    return {k: str(v) for k, v in facts.items() if not isinstance(v, dict | list)}


def _call_times(cell: Data) -> list[float]:
    return [statistics.call_s(block) for block in cell["blocks"]]


def to_parquet(lines: Iterable[Data]) -> bytes:
    """One row per block, with its cell: every sample for a data frame. Raises UserError without pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise UserError("Parquet needs pyarrow", 'pip install "polyfleet[parquet]"') from None
    names = ("id", "case", "workload", "family", "mode", "precision", "level", "regime", "column", "host", "status")
    rows = [
        {name: str(cell[name]) for name in names} | {"kernels": str(cell.get("kernels", ""))}
        | {k: v for k, v in block.items() if k != "parts_s"} | {"parts_s": [float(part) for part in block["parts_s"]]}
        for cell in lines if cell["line"] == "cell"
        for block in cell["blocks"]
    ]  # fmt: skip
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()
