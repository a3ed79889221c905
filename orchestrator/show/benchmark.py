"""Benchmark runs in a terminal: the heat map of cases by columns, and lists of runs and cases."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from orchestrator.show.setting_text import way_of
from orchestrator.show.table import TableStack, TextTable, facts, grid
from orchestrator.show.terminal_text import escape_control, one_line
from orchestrator.show.units import duration, time_since

if TYPE_CHECKING:
    from rich.console import RenderableType

Data = dict[str, Any]
WORDS = {"unsupported": "unsupported", "failed": "failed", "wrong": "WRONG", "lost": "lost", "skipped": "not measured"}
TIMES = "times are of the fastest parts; 2× means half the time of the first column, or of the first implementation"
SIGNS = {"FASTER": "▲", "SLOWER": "▼", "SAME": "=", "INCONCLUSIVE": "?"}


@dataclass(frozen=True, slots=True)
class Tile:
    """One cell of the map. `heat` from -1 (slower) over 0 to 1 (faster); None: no comparison."""

    text: str
    heat: float | None = None
    dim: bool = False
    bad: bool = False


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Cases by columns; colours say the same as the words."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Tile, ...]], ...]

    def __rich__(self) -> "RenderableType":
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("CASE", no_wrap=True)
        for name in self.columns:
            table.add_column(name, justify="right", overflow="fold")
        for name, tiles in self.rows:
            table.add_row(name, *(Text(tile.text, style=_style(tile)) for tile in tiles))
        return table

    def html(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in ("CASE", *self.columns))
        rows = "".join(
            f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(tile.text)}</td>' for tile in tiles)}</tr>"
            for name, tiles in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _style(tile: Tile) -> str:
    if tile.bad:
        return "bold red"
    if tile.dim:
        return "dim"
    if tile.heat is None or abs(tile.heat) < 0.05:
        return ""
    return "green" if tile.heat > 0 else "yellow" if tile.heat > -0.6 else "red"


def report(results: Data) -> TableStack:
    """The map, what could not be measured and why, and how far the whole can be trusted."""
    ways = list(dict.fromkeys(way_of(cell) for cell in results["cells"]))
    columns = [column["column"] for column in results["columns"]]
    by_place = {(c["case"], way_of(c), c["column"]): c for c in results["cells"]}
    cases = list(dict.fromkeys(cell["case"] for cell in results["cells"]))
    rows = []
    for case in cases:
        for way in ways:
            cells = [by_place.get((case, way, column)) for column in columns]
            if any(cells):
                name = case if len(ways) == 1 else f"{case}  {way}"
                rows.append((one_line(name), tuple(_tile(cell) for cell in cells)))
    heat = HeatMap(tuple(one_line(c) for c in columns), tuple(rows))
    told = [*_trust(results), *_reasons(results), *_notes(results)]
    return TableStack((heat, *(["", *told] if told else [])))


def _tile(cell: Data | None) -> Tile:
    if cell is None:
        return Tile("", dim=True)
    if cell["call_s"] is None:
        return Tile(WORDS.get(cell["status"], str(cell["status"])), dim=True, bad=cell["status"] in ("wrong", "failed"))
    taken = duration(cell["time_s"])
    versus = cell.get("versus")
    if not versus:
        return Tile(taken)
    ratio, verdict = versus["ratio"], versus["verdict"]
    heat = max(-1.0, min(1.0, math.log2(ratio) / 2)) if verdict in ("FASTER", "SLOWER") else 0.0
    return Tile(f"{taken}  {ratio:.2f}× {SIGNS[verdict]}", heat, dim=verdict == "INCONCLUSIVE")


def _trust(results: Data) -> list[str]:
    told = []
    for host in results["hosts"]:
        why = f": {'; '.join(host['reasons'][:2])}" if host["reasons"] else ""
        told.append(f"{', '.join(host['columns'])}: the host was {host['class']}{why}")
    noises = [c["noise"] for c in results["cells"] if c.get("noise") is not None]
    if noises:
        most = f"at most {max(noises):.1%} (median {_middle(noises):.1%})"
        told.append(f"the same configuration measured twice differed by {most}")
    if any(c.get("versus") for c in results["cells"]):
        told.append(f"{TIMES}; ▲ faster ▼ slower = same ? inconclusive")
    return told


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _reasons(results: Data) -> list[str]:
    """Each reason once, with the cells it is of."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for cell in results["cells"]:
        if cell["call_s"] is None:
            found.setdefault((cell["column"], cell["status"], cell["reason"]), []).append(
                f"{cell['case']} {way_of(cell)}"
            )
    told = [
        f"{column}: {WORDS.get(status, status)}: {escape_control(reason)} ({_some(names)})"
        for (column, status, reason), names in found.items()
    ]
    lost = [f"{column}: lost: {escape_control(reason)}" for column, reason in results["lost"].items()]
    return [*lost, *told]


def _notes(results: Data) -> list[str]:
    """What was done for a measured case that its time alone does not show, each once."""
    notes = {f"{cell['case']}: {escape_control(cell['note'])}" for cell in results["cells"] if cell.get("note")}
    return sorted(notes)


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def runs(views: list[Data]) -> TextTable:
    from datetime import UTC, datetime

    def began(view: Data) -> str:
        return time_since(datetime.fromtimestamp(view["begun_s"], UTC).isoformat())

    return grid(
        ("RUN", "STATE", "RESULTS", "COLUMNS", "BEGAN", "REASON"),
        ((v["run"], v["state"], v["cells"], ", ".join(c["column"] for c in v["columns"]), began(v), v["reason"])
         for v in views),
        empty="no benchmark runs",
    )  # fmt: skip


def cases(rows: list[Data]) -> TextTable:
    return grid(
        ("CASE", "FAMILY", "GFLOP", "MB", "ITEMS", "ABOUT"),
        ((r["case"], r["family"], f"{r['flops'] / 1e9:.3g}" if r["flops"] else "", f"{r['bytes_fp32'] / 1e6:.3g}",
          f"{r['items']:g} {r['item']}s" if r["item"] != "call" else "", r["about"]) for r in rows),
        empty="no cases",
    )  # fmt: skip


def view(data: Data) -> TableStack:
    columns = grid(
        ("COLUMN", "JOB", "POOL", "KIND"), ((c["column"], c["job"], c["pool"], c["kind"]) for c in data["columns"])
    )
    head = {"run": data["run"], "state": data["state"], "reason": data["reason"], "cells": data["cells"],
            "doing": data["progress"].get("case", "")}  # fmt: skip
    return TableStack((facts(head), "", columns))


def measured(result: Data) -> TableStack:
    """What a benchmark job of its own found: its rows, then what they were taken on."""
    head = ("CASE", "PER CALL", "95 %", "ALONE", "ITEMS/S", "FIRST CALL", "ERROR", "NOTE")
    known = {key: value for key, value in result.items() if key not in ("rows", "noise", "host")}
    noise, host = result["noise"], result["host"]
    known["noise"] = None if noise is None else f"the same configuration measured twice differed by at most {noise:.1%}"
    known["host"] = ": ".join(filter(None, (host["class"], "; ".join(host["reasons"]))))
    return TableStack((grid(head, map(_measured_row, result["rows"])), "", facts(known)))


def _measured_row(row: Data) -> tuple[Any, ...]:
    times: tuple[Any, ...] = (WORDS.get(row["status"], row["status"]), "", "", "")
    if row["median_s"] is not None:
        interval, rate = f"{duration(row['ci_low_s'])} to {duration(row['ci_high_s'])}", row["items_per_s"]
        told = f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"
        times = (duration(row["median_s"]), interval, duration(row["alone_s"]), told)
    error = row["accuracy"].get("rms_rel")
    error_told = "" if error is None else f"{error:.1e}"
    return (row["case"], *times, duration(row["first_call_s"]), error_told, row["reason"])


def compared(data: Data) -> TableStack:
    """Two runs: what changed first, the rest after."""
    order = {"SLOWER": 0, "FASTER": 1, "INCONCLUSIVE": 2, "SAME": 3}
    rows = sorted(data["cells"], key=lambda r: order.get(r["verdict"], -1))
    table = grid(
        ("CASE", "CONFIGURATION", "KIND", "BEFORE", "AFTER", "RATIO", "INTERVAL", "VERDICT", "NOTE"),
        ((r["case"], way_of(r), r["kind"], *_change(r)) for r in rows),
        empty="the runs have no case and configuration in common",
    )
    environment = [f"{d['kind']}: {d['what']} was {d['before'] or 'absent'}, is {d['after'] or 'absent'}"
                   for d in data["environment"]]  # fmt: skip
    missing = [f"only in {data['before']}: {_some(data['only_before'])}"] if data["only_before"] else []
    missing += [f"only in {data['after']}: {_some(data['only_after'])}"] if data["only_after"] else []
    told = [escape_control(line) for line in (*environment, *missing)]
    return TableStack((f"{data['before']} to {data['after']}", "", table, *(["", *told] if told else [])))


def _change(row: Data) -> tuple[Any, ...]:
    if "ratio" not in row:
        return ("", "", "", "", row["status"], row["note"])
    interval = f"[{row['low']:.2f}, {row['high']:.2f}]"
    return (duration(row["before_s"]), duration(row["after_s"]), f"{row['ratio']:.2f}×", interval, row["verdict"],
            row["note"])  # fmt: skip


def series(rows: list[Data]) -> TextTable:
    def told(row: Data) -> str:
        return "; ".join(f"{s['ratio']:.2f}× from {row['points'][s['at']]['run']} on" for s in row["steps"])

    return grid(
        ("CASE", "CONFIGURATION", "KIND", "RUNS", "FIRST", "LAST", "STEPS"),
        ((r["case"], way_of(r), r["kind"], len(r["points"]), duration(r["points"][0]["call_s"]),
          duration(r["points"][-1]["call_s"]), told(r)) for r in rows),
        empty="no run measured that",
    )  # fmt: skip


def validation(data: Data) -> TableStack:
    """Per target the first place where it parts from the first, and the rows around it."""
    first = data["targets"][0]["target"]
    told: list[TextTable | str] = []
    for one in data["compared"]:
        if not one["comparable"]:
            told.append(f"{one['target']}: {one['reason']}")
            continue
        places = [f"{what} {name}" for what, name in one["first"].items() if name]
        verdict = f"differs from {first} first at {', '.join(places)}" if places else f"computes as {first} does"
        rows = [*one["layers"], *one["gradients"], *one["steps"]]
        worst = sorted(rows, key=lambda r: -(r["apart"] if r["apart"] is not None else math.inf) / r["limit"])[:8]
        table = grid(
            ("WHAT", "APART", "LIMIT", "WITHIN", "NOTE"),
            ((r["name"], "" if r["apart"] is None else f"{r['apart']:.1e}", f"{r['limit']:.1e}", r["ok"], r["note"])
             for r in worst),
        )  # fmt: skip
        counted = f"{len(one['layers'])} layers, {len(one['gradients'])} gradients, {len(one['steps'])} losses"
        told += [f"{one['target']}: {escape_control(verdict)} ({data['precision']}; {counted}); farthest:", table]
    return TableStack(tuple(told))
