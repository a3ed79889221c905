"""From the lines of a run to what it says: times with intervals, ratios with verdicts, rates with their limits. Pure.

The lines keep every sample; all else is computed here, so a report of an old run learns what a newer Polyfleet knows.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict
from statistics import median
from typing import Any

from cluster.catalogue.precision import BYTES, SHORT_OF, long_name
from cluster.errors import NotFound
from orchestrator.benchmark import comparison, peaks
from workers.benchmark import catalogue, statistics
from workers.benchmark.host import classify

SCHEMA = 1
MEASURED = "measured"
Data = dict[str, Any]


def summarize(lines: Iterable[Data]) -> Data:
    """{"run", "request", "columns", "cells", "hosts", "state", …}; a cell measured twice counts as it was last.

    A cell's `time_s` is what its ratio is of: the reference's `time_s` over it is the ratio.
    """
    lines = list(lines)
    begun = next((line for line in lines if line["line"] == "begun"), {})
    ended = next((line for line in reversed(lines) if line["line"] == "ended"), None)
    columns = {line["column"]: {"host": line["host"], **line["facts"]} for line in lines if line["line"] == "column"}
    raw = {line["id"]: line for line in lines if line["line"] == "cell"}
    order = {name: place for place, name in enumerate(_column_order(begun, columns))}
    known = sorted(raw.values(), key=lambda c: order.get(c["column"], len(order)))
    cells = {cell["id"]: _summary(cell, columns.get(cell["column"], {})) for cell in known}
    _compare(known, cells, columns)
    for cell in cells.values():
        cell["time_s"] = _time_s(cell, cells)
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


def merge_runs(runs: Iterable[Iterable[Data]]) -> list[Data]:
    """Lines of several runs as one: the columns of the first, then those of the others, told apart by their run where
    two have one name. Machines that no fleet joins stand in one report so."""
    first, *others = [list(lines) for lines in runs]
    found, taken = list(first), {line["column"] for line in first if line["line"] == "column"}
    for lines in others:
        run = next((line["run"] for line in lines if line["line"] == "begun"), "another")
        names = {line["column"]: line["column"] for line in lines if line["line"] == "column"}
        names = {name: f"{name}@{run}" if name in taken else name for name in names}
        taken |= set(names.values())
        found += [_renamed(line, names) for line in lines if line["line"] in ("column", "cell", "lost")]
    return found


def _renamed(line: Data, names: dict[str, str]) -> Data:
    name = names.get(line["column"], line["column"])
    own = {"id": f"{line['case']}@{name}/{line['id'].rpartition('@')[2].partition('/')[2]}"} if "id" in line else {}
    return line | {"column": name} | own


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
    call = statistics.spread([statistics.call_s(b) for b in blocks])
    return about | {
        "call_s": call,
        "alone_s": statistics.spread([b["alone_s"] for b in blocks]),
        "undisturbed_s": median(statistics.fastest_part_s(b) for b in blocks),
        "cpu_s": median(b["cpu_s"] / b["calls"] / len(b["parts_s"]) for b in blocks),
        "rounds": len(blocks),
        "preempted": sum(b["preempted"] > 0 for b in blocks) / len(blocks),
        "noise": statistics.noise(cell["blocks"], cell["blocks_again"]),
        "compile_s": max(cell.get("first_call_s", call["median"]) - call["median"], 0.0),
        **_rates(cell, call["median"]),
        **_prices(cell, column, call["median"]),
        "joules_per_item": joules_per_item(cell),
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
        return catalogue.find(cell["case"]).bytes(BYTES[long_name(cell["precision"])])
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


def joules_per_item(cell: Data) -> float | None:
    """By the device's own counter; None where it has none."""
    told = cell.get("energy") or {}
    joules = told.get("joules_per_call") if isinstance(told, dict) else None
    return joules / (cell.get("items") or 1) if joules is not None else None


def _compare(known: list[Data], cells: dict[str, Data], columns: dict[str, Data]) -> None:
    """Each measured cell with its reference; all verdicts are given together, so that none is a fluke of many."""
    measured = [cell for cell in known if cells[cell["id"]]["call_s"]]
    pairs = [(cell, other) for cell in measured if (other := comparison.find_reference(cell, measured)) is not None]
    found = [(cell, other, comparison.compare_results(other, cell)) for cell, other in pairs]
    held = statistics.holm([ratio.p for _, _, ratio in found])
    for (cell, other, ratio), holds in zip(found, held, strict=True):
        noise = max(_host_noise(cell, cells), _host_noise(other, cells))
        cells[cell["id"]]["versus"] = {
            "reference": other["id"],
            "column": other["column"],
            "twins": _twins(cell["column"], other["column"], columns),
            "how": "paired" if cell["host"] == other["host"] else "apart",
            **asdict(ratio),
            "noise": noise,
            "verdict": str(statistics.verdict(ratio, noise, holds, _usable(cell) and _usable(other))),
        }


def _time_s(cell: Data, cells: dict[str, Data]) -> float | None:
    """Of a call, by the quickest parts. Where a cell is compared, rounds in which all was slow drop out: the ratio is
    that of rounds side by side, and the time is the reference's divided by it."""
    if not cell["call_s"]:
        return None
    versus = cell.get("versus")
    if versus is None:
        return float(cell["undisturbed_s"])
    reference_s = _time_s(cells[versus["reference"]], cells)
    return None if reference_s is None else float(reference_s / versus["ratio"])


def _usable(cell: Data) -> bool:
    before, after = cell.get("host_before"), cell.get("host_after")
    return not (before and after) or classify(before, after)["class"] != "unusable"


def _twins(one: str, other: str, columns: dict[str, Data]) -> bool:
    """Two devices of one kind with one software: to find the slow card, no comparison of back ends."""
    sides = [columns.get(name, {}) for name in (one, other)]
    return one != other and all(sides[0].get(what) == sides[1].get(what) for what in ("kind", "torch", "versions"))


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
        vendor = peaks.vendor_peak(column.get("kind", ""))
        products = {precision: _most(mine, "flops_per_s", "matmul", precision) for precision in SHORT_OF.values()}
        copies = _most(mine, "bytes_per_s", "memory-copy")
        for cell in mine:
            cell["of_peak_flops"] = _share(cell["flops_per_s"], vendor.flops.get(cell["precision"]))
            cell["of_peak_bytes"] = _share(cell["bytes_per_s"], vendor.bytes_per_s)
            cell["of_own_flops"] = _share(cell["flops_per_s"], products.get(cell["precision"]))
            cell["of_own_bytes"] = _share(cell["bytes_per_s"], copies)
        column["own_bytes_per_s"] = copies
        column["own_flops_per_s"] = {precision: rate for precision, rate in products.items() if rate}
        column["peak"] = asdict(vendor)


def _most(cells: list[Data], rate: str, workload: str, precision: str = "") -> float | None:
    found = [c[rate] for c in cells if c["workload"] == workload and precision in ("", c["precision"])]
    return max(found, default=None)


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
