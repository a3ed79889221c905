"""Benchmark runs in a terminal: heat map of cases by targets, comparisons, lists of runs and cases."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from orchestrator.show.table import TableStack, TextTable, facts, grid
from orchestrator.terminal_text import escape_control, one_line
from orchestrator.units import duration, time_since

if TYPE_CHECKING:
    from rich.console import RenderableType

Data = dict[str, Any]
STATUS_TEXTS = {
    "unsupported": "unsupported",
    "failed": "failed",
    "wrong": "WRONG",
    "lost": "lost",
    "skipped": "not measured",
}
TIMES = "times are of the fastest parts; 2× means half the time of the first target, or of the first kernels"
SIGNS = {"FASTER": "▲", "SLOWER": "▼", "SAME": "=", "INCONCLUSIVE": "?"}


def settings_text(result: dict[str, Any]) -> str:
    """Format settings as `fp32 O1 cold by triton`."""
    cold = " cold" if result["regime"] == "cold" else ""
    kernels = f" by {result['kernels']}" if result.get("kernels") else ""
    return f"{result['precision']} {result['level']}{cold}{kernels}"


@dataclass(frozen=True, slots=True)
class Tile:
    """One field of the heat map. `heat` is from -1 (slower) over 0 to 1 (faster); None without a comparison."""

    text: str
    heat: float | None = None
    dim: bool = False
    bad: bool = False


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Table of cases by targets. Colours repeat what the text says."""

    targets: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Tile, ...]], ...]

    def __rich__(self) -> "RenderableType":
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("CASE", no_wrap=True)
        for name in self.targets:
            table.add_column(name, justify="right", overflow="fold")
        for name, tiles in self.rows:
            table.add_row(name, *(Text(tile.text, style=_style(tile)) for tile in tiles))
        return table

    def html(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in ("CASE", *self.targets))
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


def report(summary: Data) -> TableStack:
    """Heat map of a run, followed by the quality of its hosts, failed results with reasons, and notes."""
    all_settings = list(dict.fromkeys(settings_text(result) for result in summary["results"]))
    targets = [target["target"] for target in summary["targets"]]
    by_position = {(c["case"], settings_text(c), c["target"]): c for c in summary["results"]}
    cases = list(dict.fromkeys(result["case"] for result in summary["results"]))
    rows = []
    for case in cases:
        for settings in all_settings:
            row_results = [by_position.get((case, settings, target)) for target in targets]
            if any(row_results):
                name = case if len(all_settings) == 1 else f"{case}  {settings}"
                rows.append((one_line(name), tuple(_tile(result) for result in row_results)))
    heat = HeatMap(tuple(one_line(c) for c in targets), tuple(rows))
    lines = [*_trust(summary), *_reasons(summary), *_notes(summary)]
    return TableStack((heat, *(["", *lines] if lines else [])))


def _tile(result: Data | None) -> Tile:
    if result is None:
        return Tile("", dim=True)
    if result["call_s"] is None:
        return Tile(
            STATUS_TEXTS.get(result["status"], str(result["status"])),
            dim=True,
            bad=result["status"] in ("wrong", "failed"),
        )
    call_time = duration(result["time_s"])
    versus = result.get("versus")
    if not versus:
        return Tile(call_time)
    ratio, verdict = versus["ratio"], versus["verdict"]
    heat = max(-1.0, min(1.0, math.log2(ratio) / 2)) if verdict in ("FASTER", "SLOWER") else 0.0
    return Tile(f"{call_time}  {ratio:.2f}× {SIGNS[verdict]}", heat, dim=verdict == "INCONCLUSIVE")


def _trust(summary: Data) -> list[str]:
    lines = []
    for host in summary["hosts"]:
        reasons = f": {'; '.join(host['reasons'][:2])}" if host["reasons"] else ""
        lines.append(f"{', '.join(host['targets'])}: the host was {host['class']}{reasons}")
    noises = [c["noise"] for c in summary["results"] if c.get("noise") is not None]
    if noises:
        differences = f"at most {max(noises):.1%} (median {_middle(noises):.1%})"
        lines.append(f"noise of this host (one configuration measured twice): {differences}")
    if any(c.get("versus") for c in summary["results"]):
        lines.append(f"{TIMES}; ▲ faster ▼ slower = same ? inconclusive")
    return lines


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _reasons(summary: Data) -> list[str]:
    """List each reason once, with the cases and settings that it applies to."""
    names_by_reason: dict[tuple[str, str, str], list[str]] = {}
    for result in summary["results"]:
        if result["call_s"] is None:
            names_by_reason.setdefault((result["target"], result["status"], result["reason"]), []).append(
                f"{result['case']} {settings_text(result)}"
            )
    failures = [
        f"{target}: {STATUS_TEXTS.get(status, status)}: {escape_control(reason)} ({_some(names)})"
        for (target, status, reason), names in names_by_reason.items()
    ]
    lost = [f"{target}: lost: {escape_control(reason)}" for target, reason in summary["lost"].items()]
    return [*lost, *failures]


def _notes(summary: Data) -> list[str]:
    """Notes on how cases were measured, each once."""
    notes = {
        f"{result['case']}: {escape_control(result['note'])}" for result in summary["results"] if result.get("note")
    }
    return sorted(notes)


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def runs(views: list[Data]) -> TextTable:
    return grid(
        ("RUN", "STATE", "RESULTS", "TARGETS", "STARTED", "REASON"),
        ((v["run"], v["state"], v["results"], ", ".join(c["target"] for c in v["targets"]),
          time_since(v["started_at"]), v["reason"]) for v in views),
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
    targets = grid(
        ("TARGET", "JOB", "POOL", "KIND"), ((c["target"], c["job"], c["pool"], c["kind"]) for c in data["targets"])
    )
    head = {"run": data["run"], "state": data["state"], "reason": data["reason"], "results": data["results"],
            "measuring": data["progress"].get("case", "")}  # fmt: skip
    return TableStack((facts(head), "", targets))


def measured(result: Data) -> TableStack:
    """Result of a single benchmark job: its rows, then facts about device, host and noise."""
    head = ("CASE", "PER CALL", "95 %", "ALONE", "ITEMS/S", "FIRST CALL", "ERROR", "NOTE")
    details = {key: value for key, value in result.items() if key not in ("rows", "noise", "host")}
    noise, host = result["noise"], result["host"]
    details["noise"] = (
        None if noise is None else f"of this host (one configuration measured twice): at most {noise:.1%}"
    )
    details["host"] = ": ".join(filter(None, (host["class"], "; ".join(host["reasons"]))))
    return TableStack((grid(head, map(_measured_row, result["rows"])), "", facts(details)))


def _measured_row(row: Data) -> tuple[Any, ...]:
    times: tuple[Any, ...] = (STATUS_TEXTS.get(row["status"], row["status"]), "", "", "")
    if row["median_s"] is not None:
        interval, rate = f"{duration(row['ci_low_s'])} to {duration(row['ci_high_s'])}", row["items_per_s"]
        rate_text = f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"
        times = (duration(row["median_s"]), interval, duration(row["single_call_s"]), rate_text)
    error = row["accuracy"].get("rms_rel")
    error_text = "" if error is None else f"{error:.1e}"
    return (row["case"], *times, duration(row["first_call_s"]), error_text, row["reason"])


def compared(data: Data) -> TableStack:
    """Comparison of two runs: changed results first."""
    order = {"SLOWER": 0, "FASTER": 1, "INCONCLUSIVE": 2, "SAME": 3}
    rows = sorted(data["results"], key=lambda r: order.get(r["verdict"], -1))
    table = grid(
        ("CASE", "CONFIGURATION", "KIND", "BEFORE", "AFTER", "RATIO", "INTERVAL", "VERDICT", "NOTE"),
        ((r["case"], settings_text(r), r["kind"], *_change(r)) for r in rows),
        empty="the runs have no case and configuration in common",
    )
    environment = [f"{d['kind']}: {d['what']} was {d['before'] or 'absent'}, is {d['after'] or 'absent'}"
                   for d in data["environment"]]  # fmt: skip
    missing = [f"only in {data['before']}: {_some(data['only_before'])}"] if data["only_before"] else []
    missing += [f"only in {data['after']}: {_some(data['only_after'])}"] if data["only_after"] else []
    lines = [escape_control(line) for line in (*environment, *missing)]
    return TableStack((f"{data['before']} to {data['after']}", "", table, *(["", *lines] if lines else [])))


def _change(row: Data) -> tuple[Any, ...]:
    if "ratio" not in row:
        return ("", "", "", "", row["status"], row["note"])
    interval = f"[{row['low']:.2f}, {row['high']:.2f}]"
    return (duration(row["before_s"]), duration(row["after_s"]), f"{row['ratio']:.2f}×", interval, row["verdict"],
            row["note"])  # fmt: skip


def series(rows: list[Data]) -> TextTable:
    def steps_text(row: Data) -> str:
        return "; ".join(f"{s['ratio']:.2f}× from {row['points'][s['at']]['run']} on" for s in row["steps"])

    return grid(
        ("CASE", "CONFIGURATION", "KIND", "RUNS", "FIRST", "LAST", "STEPS"),
        ((r["case"], settings_text(r), r["kind"], len(r["points"]), duration(r["points"][0]["call_s"]),
          duration(r["points"][-1]["call_s"]), steps_text(r)) for r in rows),
        empty="no run measured this case",
    )  # fmt: skip


def validation(data: Data) -> TableStack:
    """Numeric validation: per target where it first differs from the first target, and the largest differences."""
    first = data["targets"][0]["target"]
    parts: list[TextTable | str] = []
    for one in data["compared"]:
        if not one["comparable"]:
            parts.append(f"{one['target']}: {one['reason']}")
            continue
        first_differences = [f"{what} {name}" for what, name in one["first"].items() if name]
        verdict = (
            f"differs from {first} first at {', '.join(first_differences)}"
            if first_differences
            else f"agrees with {first}"
        )
        rows = [*one["layers"], *one["gradients"], *one["steps"]]
        worst = sorted(
            rows, key=lambda r: -(r["difference"] if r["difference"] is not None else math.inf) / r["limit"]
        )[:8]
        table = grid(
            ("WHAT", "DIFFERENCE", "LIMIT", "WITHIN", "NOTE"),
            ((r["name"], "" if r["difference"] is None else f"{r['difference']:.1e}",
              f"{r['limit']:.1e}", r["ok"], r["note"]) for r in worst),
        )  # fmt: skip
        counts = f"{len(one['layers'])} layers, {len(one['gradients'])} gradients, {len(one['steps'])} losses"
        parts += [
            f"{one['target']}: {escape_control(verdict)} ({data['precision']}; {counts}); largest differences:",
            table,
        ]
    return TableStack(tuple(parts))
