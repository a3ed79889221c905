"""Export runs for other tools: JSON lines, Parquet, pytest-benchmark's JSON, asv's JSON."""

import hashlib
import io
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from statistics import fmean, median, pstdev, quantiles
from typing import Any

from cluster.errors import UserError
from cluster.version import VERSION
from workers.measurement import statistics

Data = dict[str, Any]


def to_jsonl(lines: Iterable[Data]) -> str:
    """Write one JSON object per line, in the format of docs/benchmark-format.md."""
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def to_pytest_benchmark(lines: Iterable[Data]) -> str:
    """Write the format of `pytest --benchmark-json`, for `pytest-benchmark compare`. One time per call and block."""
    lines = list(lines)
    header = next((line for line in lines if line["line"] == "started"), {})
    results = [line for line in lines if line["line"] == "result" and line["blocks"]]
    timestamp = datetime.fromtimestamp(header.get("time") or 0, UTC).isoformat()
    return json.dumps(
        {
            "machine_info": {line["target"]: line["facts"] for line in lines if line["line"] == "target"},
            "commit_info": {"id": header.get("run", ""), "time": timestamp, "dirty": False, "branch": ""},
            "benchmarks": [_benchmark(result) for result in results],
            "datetime": timestamp,
            "version": f"polyfleet-{VERSION}",
        },
        indent=1,
    )


def _benchmark(result: Data) -> Data:
    times = _call_times(result)
    q1, middle, q3 = quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
    stats = {
        "min": min(times), "max": max(times), "mean": fmean(times), "stddev": pstdev(times), "rounds": len(times),
        "median": middle, "iqr": q3 - q1, "q1": q1, "q3": q3, "iqr_outliers": 0, "stddev_outliers": 0,
        "outliers": "0;0", "ld15iqr": min(times), "hd15iqr": max(times), "ops": 1 / fmean(times),
        "total": sum(times), "data": times, "iterations": result["blocks"][0]["calls"],
    }  # fmt: skip
    names = [name for name in ("precision", "level", "regime", "kernels", "target") if name in result]
    return {
        "group": result["case"], "name": result["id"], "fullname": f"polyfleet::{result['id']}", "param": None,
        "params": {name: result[name] for name in names}, "extra_info": {"accuracy": result.get("accuracy")},
        "options": {}, "stats": stats,
    }  # fmt: skip


def to_asv(lines: Iterable[Data], target_name: str = "") -> str:
    """Write an asv results file (version 2) for one target, by default the first: asv has one environment per file."""
    lines = list(lines)
    header = next((line for line in lines if line["line"] == "started"), {})
    targets = {line["target"]: line["facts"] for line in lines if line["line"] == "target"}
    target = target_name or next(iter(targets), "")
    results = [c for c in lines if c["line"] == "result" and c["target"] == target and c["blocks"]]
    started_ms = int((header.get("time") or 0) * 1000)
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
            "commit_hash": hashlib.sha1(str(header.get("run", "")).encode(), usedforsecurity=False).hexdigest(),
            "env_name": target, "date": started_ms, "params": {"machine": target, **_plain(targets.get(target, {}))},
            "python": "", "requirements": targets.get(target, {}).get("versions", {}), "env_vars": {},
            "result_columns": list(keys),
            "results": {_asv_name(result): _asv_row(result, started_ms) for result in results},
            "durations": {}, "version": 2,
        },
        indent=1,
    )  # fmt: skip


def _asv_name(result: Data) -> str:
    kernels = f"_{result['kernels']}" if result.get("kernels") else ""
    return f"{result['case']}.time_{result['precision']}_{result['level']}_{result['regime']}{kernels}"


def _asv_row(result: Data, started_ms: int) -> list[Any]:
    times = _call_times(result)
    version = hashlib.sha256(result["case"].encode()).hexdigest()
    return [[median(times)], [], version, started_ms, sum(times), [min(times)], [max(times)], [times], [1]]


def _plain(facts: Data) -> Data:
    return {k: str(v) for k, v in facts.items() if not isinstance(v, dict | list)}


def _call_times(result: Data) -> list[float]:
    return [statistics.call_s(block) for block in result["blocks"]]


def to_parquet(lines: Iterable[Data]) -> bytes:
    """Write one row per block, with its case and configuration. Raises UserError without pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise UserError("Parquet needs pyarrow", 'run `pip install "polyfleet[parquet]"`') from None
    names = ("id", "case", "workload", "family", "mode", "precision", "level", "regime", "target", "host", "status")
    rows = [
        {name: str(result[name]) for name in names} | {"kernels": str(result.get("kernels", ""))}
        | {k: v for k, v in block.items() if k != "parts_s"} | {"parts_s": [float(part) for part in block["parts_s"]]}
        for result in lines if result["line"] == "result"
        for block in result["blocks"]
    ]  # fmt: skip
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()
