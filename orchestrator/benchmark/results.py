"""From the lines of a run to what it says: times with intervals, ratios with verdicts, rates with their limits. Pure.

The lines keep every sample; all else is computed here, so a report of an old run learns what a newer Polyfleet knows.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from statistics import median
from typing import Any

from cluster.errors import NotFound
from orchestrator.benchmark import peaks, statistics
from orchestrator.benchmark.conductor import undisturbed_s
from orchestrator.benchmark.statistics import Ratio, Verdict
from workers.benchmark import catalogue
from workers.benchmark.host import classify

SCHEMA = 1
MEASURED = "measured"
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
Data = dict[str, Any]


def results(lines: Iterable[Data]) -> Data:
    """{"run", "request", "columns", "cells", "hosts", "state", …}; a cell measured twice counts as it was last."""
    lines = list(lines)
    begun = next((line for line in lines if line["line"] == "begun"), {})
    ended = next((line for line in reversed(lines) if line["line"] == "ended"), None)
    columns = {line["column"]: {"host": line["host"], **line["facts"]} for line in lines if line["line"] == "column"}
    raw = {line["id"]: line for line in lines if line["line"] == "cell"}
    order = {name: place for place, name in enumerate(_column_order(begun, columns))}
    known = sorted(raw.values(), key=lambda c: order.get(c["column"], len(order)))
    cells = {cell["id"]: _summary(cell, columns.get(cell["column"], {})) for cell in known}
    _compare(known, cells)
    _limits(cells, columns)
    return {
        "schema": SCHEMA,
        "run": begun.get("run", ""),
        "request": begun.get("request", {}),
        "columns": [{"column": name, **columns[name]} for name in sorted(columns, key=lambda n: order.get(n, 0))],
        "lost": {line["column"]: line["reason"] for line in lines if line["line"] == "lost"},
        "cells": [cells[cell["id"]] for cell in raw.values()],
        "hosts": _hosts(raw.values()),
        "state": ended["state"] if ended else "RUNNING",
        "reason": ended["reason"] if ended else "",
        "began_s": begun.get("time"),
        "ended_s": ended.get("time") if ended else None,
    }


def _column_order(begun: Data, columns: Data) -> list[str]:
    """As asked for: the first is what others are compared with."""
    asked = [column["column"] for column in begun.get("columns", [])]
    return [*asked, *(name for name in columns if name not in asked)]


def _summary(cell: Data, column: Data) -> Data:
    """One cell without its samples."""
    about = {k: v for k, v in cell.items() if k not in ("line", "blocks", "blocks_again", "seq", "time")}
    about |= {"kind": column.get("kind", ""), "pool": column.get("pool", "")}
    if cell["status"] != MEASURED or not cell["blocks"]:
        return about | {"status": cell["status"] if cell["status"] != MEASURED else "skipped", "call_s": None}
    blocks = cell["blocks"]
    call = statistics.interval([median(b["parts_s"]) / b["calls"] for b in blocks])
    noise = _noise(cell)
    return about | {
        "call_s": asdict(call),
        "alone_s": asdict(statistics.interval([b["alone_s"] for b in blocks])),
        "undisturbed_s": median(undisturbed_s(b) for b in blocks),
        "cpu_s": median(b["cpu_s"] / b["calls"] / len(b["parts_s"]) for b in blocks),
        "rounds": len(blocks),
        "preempted": sum(b["preempted"] > 0 for b in blocks) / len(blocks),
        "noise": noise,
        "compile_s": max(cell.get("first_call_s", call.median) - call.median, 0.0),
        **_rates(cell, call.median),
        **_prices(cell, column, call.median),
        "joules_per_item": _joules(cell),
    }  # fmt: skip


def _rates(cell: Data, call_s: float) -> Data:
    items, flops = cell.get("items") or 1, cell.get("flops") or 0
    moved = cell.get("min_bytes") or _moved(cell)
    return {
        "items_per_s": items / call_s,
        "flops_per_s": flops / call_s if flops else None,
        "bytes_per_s": moved / call_s if moved else None,
    }


def _moved(cell: Data) -> float:
    """By the formula, for lines that do not say."""
    try:
        return catalogue.find(cell["case"]).bytes(ITEMSIZE[cell["precision"]])
    except NotFound:
        return 0.0


def _prices(cell: Data, column: Data, call_s: float) -> Data:
    """Of a million items, from the price of the pool; None where nobody declared one."""
    per_hour = column.get("price_per_hour")
    if not per_hour:
        return {"price_per_million": None, "price_source": ""}
    items = cell.get("items") or 1
    return {
        "price_per_million": per_hour / 3600 * call_s / items * 1e6,
        "price_source": column.get("price_source", ""),
    }


def _joules(cell: Data) -> float | None:
    told = cell.get("energy") or {}
    joules = told.get("joules_per_call") if isinstance(told, dict) else None
    return joules / (cell.get("items") or 1) if joules is not None else None


def _noise(cell: Data) -> float | None:
    """How far this host told the same from the same in these rounds; None for an arm that had no twin."""
    first, again = _by_round(cell["blocks"]), _by_round(cell["blocks_again"])
    common = sorted(first.keys() & again.keys())
    if len(common) < 3:
        return None
    return statistics.noise_of(statistics.paired([first[n] for n in common], [again[n] for n in common]))


def _by_round(blocks: Iterable[Data]) -> dict[int, float]:
    return {b["round"]: undisturbed_s(b) for b in blocks}


def _compare(known: list[Data], cells: dict[str, Data]) -> None:
    """Each measured cell with its reference; all verdicts are given together, so that none is a fluke of many."""
    measured = [cell for cell in known if cells[cell["id"]]["call_s"]]
    found = [(cell, other, ratio) for cell in measured for other, ratio in _ratios(cell, measured)]
    held = statistics.holm([ratio.p for _, _, ratio in found])
    for (cell, other, ratio), holds in zip(found, held, strict=True):
        noise = max(_host_noise(cell, cells), _host_noise(other, cells))
        cells[cell["id"]]["versus"] = {
            "reference": other["id"],
            "how": "paired" if cell["host"] == other["host"] else "apart",
            **asdict(ratio),
            "noise": noise,
            "verdict": str(statistics.verdict(ratio, noise, holds)),
        }


def _ratios(cell: Data, measured: list[Data]) -> Iterator[tuple[Data, Ratio]]:
    other = reference_of(cell, measured)
    if other is not None:
        yield other, compare_rounds(other, cell)


def reference_of(cell: Data, measured: list[Data]) -> Data | None:
    """The same case in the first column that has it, at the same precision and level, else at its first ones; within
    that column its own first way. None for that itself."""
    same = [c for c in measured if c["case"] == cell["case"]]
    first = [c for c in same if c["column"] == same[0]["column"]]
    alike = [c for c in first if _way(c) == _way(cell) and c["column"] != cell["column"]]
    chosen = (alike or first)[0]
    return None if chosen["id"] == cell["id"] else chosen


def _way(cell: Data) -> tuple[str, str, str]:
    return cell["precision"], cell["level"], cell["regime"]


def compare_rounds(reference: Data, cell: Data) -> Ratio:
    """Rounds of one host stand side by side; those of two hosts share nothing but their number."""
    a, b = _by_round(reference["blocks"]), _by_round(cell["blocks"])
    common = sorted(a.keys() & b.keys())
    if reference["host"] == cell["host"] and len(common) >= 3:
        return statistics.paired([a[n] for n in common], [b[n] for n in common])
    return statistics.apart(list(a.values()), list(b.values()))


def _host_noise(cell: Data, cells: dict[str, Data]) -> float:
    """Of the twin that was measured in the same rounds on the same host."""
    told = [
        other["noise"]
        for other in cells.values()
        if other["case"] == cell["case"] and other["host"] == cell["host"] and other.get("noise") is not None
    ]
    return float(max(told, default=statistics.LEAST_EFFECT))


def _limits(cells: dict[str, Data], columns: Data) -> None:
    """Shares of the vendor's peak, and of what this device reached itself in this run's products and copies."""
    for name, column in columns.items():
        mine = [c for c in cells.values() if c["column"] == name and c["call_s"]]
        vendor = peaks.of(column.get("kind", ""))
        for cell in mine:
            products = [c["flops_per_s"] for c in mine if c["workload"] == "matmul" and _same_math(c, cell)]
            copies = [c["bytes_per_s"] for c in mine if c["workload"] == "memory-copy"]
            own_flops, own_bytes = max(products, default=None), max(copies, default=None)
            cell["of_peak_flops"] = _share(cell["flops_per_s"], vendor.flops.get(cell["precision"]))
            cell["of_peak_bytes"] = _share(cell["bytes_per_s"], vendor.bytes_per_s)
            cell["of_own_flops"] = _share(cell["flops_per_s"], own_flops)
            cell["of_own_bytes"] = _share(cell["bytes_per_s"], own_bytes)
        column["own_bytes_per_s"] = max(
            (c["bytes_per_s"] for c in mine if c["workload"] == "memory-copy"), default=None
        )
        column["own_flops_per_s"] = {
            precision: max(rates)
            for precision in ITEMSIZE
            if (rates := [c["flops_per_s"] for c in mine if c["workload"] == "matmul" and c["precision"] == precision])
        }
        column["peak"] = asdict(vendor)


def _same_math(one: Data, other: Data) -> bool:
    return bool(one["precision"] == other["precision"])


def _share(rate: float | None, limit: float | None) -> float | None:
    return rate / limit if rate and limit else None


def _hosts(cells: Iterable[Data]) -> list[Data]:
    """Per host the worst of its cases: what it was like then, and why."""
    found: dict[str, Data] = {}
    for cell in cells:
        before, after = cell.get("host_before"), cell.get("host_after")
        if not before or not after:
            continue
        known = found.setdefault(cell["host"], {"host": cell["host"], "columns": []})
        told = classify(before, after)
        if "class" not in known or _badness(told) > _badness(known):
            known |= told
        known["columns"] += [cell["column"]] if cell["column"] not in known["columns"] else []
    return list(found.values())


def _badness(state: Data) -> tuple[int, float]:
    return ("quiet", "shared", "unusable").index(state["class"]), state["pressure_cpu"] or 0.0


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values if value > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


def verdict_counts(cells: Iterable[Data]) -> dict[str, int]:
    told = [cell["versus"]["verdict"] for cell in cells if cell.get("versus")]
    return {str(v): told.count(str(v)) for v in Verdict}
