"""Figures of a report. Each function returns (title, caption, svg), or None if the run has no data for it."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from orchestrator.benchmark.report.svg import BAD, FAINT, GOOD, INK, LINE, MIDDLE, figure, series, svg
from orchestrator.show.benchmark import settings_text
from workers.measurement.statistics import fastest_part_s

Data = dict[str, Any]
RenderedFigure = tuple[str, str, str]
MAX_ROWS = 60
COLOURS = {"FASTER": GOOD, "SLOWER": BAD, "SAME": INK, "INCONCLUSIVE": MIDDLE}


def measured(summary: Data) -> list[Data]:
    return [result for result in summary["results"] if result["call_s"]]


def label(result: Data) -> str:
    return f"{result['case']} {settings_text(result)}"


def targets_of(results: Iterable[Data]) -> list[str]:
    return list(dict.fromkeys(result["target"] for result in results))


def forest(summary: Data) -> RenderedFigure | None:
    """Plot ratios with their intervals, a line at 1, and a band for the hosts' noise."""
    all_results = [result for result in measured(summary) if result.get("versus")]
    if not all_results:
        return None
    farthest = sorted(all_results, key=lambda c: -abs(math.log(c["versus"]["ratio"])))[:MAX_ROWS]
    results = [result for result in all_results if result in farthest]
    with figure(9, 1.2 + 0.26 * len(results)) as (chart, axes):
        noises = [c["versus"]["noise"] for c in results]
        noise = sorted(noises)[len(noises) // 2]
        axes.axvspan(1 / (1 + noise), 1 + noise, color=LINE, alpha=0.6, lw=0)
        axes.axvline(1, color=FAINT, lw=1)
        for row, result in enumerate(reversed(results)):
            versus = result["versus"]
            colour = COLOURS[versus["verdict"]]
            axes.plot([versus["low"], versus["high"]], [row, row], color=colour, lw=2, solid_capstyle="butt")
            axes.plot(versus["ratio"], row, "o", color=colour, ms=5)
        axes.set_yticks(range(len(results)), [f"{label(c)}  {c['target']}" for c in reversed(results)], fontsize=8)
        axes.set_ylim(-0.8, len(results) - 0.2)
        logarithmic(axes, "x", lambda value: f"{value:g}×")
        axes.set_xlabel("reference's time over this result's: right of 1 is faster")
        caption = "Each ratio with its 95 % interval. The band is the median noise of this run's A/A controls."
        caption += (
            f" It contains the {len(results)} of {len(all_results)} results farthest from 1."
            if len(results) < len(all_results)
            else ""
        )
        return "Ratios", caption, svg(chart, "forest", "ratios with intervals")


def roofline(summary: Data) -> RenderedFigure | None:
    """Plot operations per second over operations per byte, with the limits measured here and the vendor's peak."""
    results = [c for c in measured(summary) if c.get("flops_per_s") and c.get("min_bytes") and c.get("flops")]
    targets = [c for c in summary["targets"] if any(result["target"] == c["target"] for result in results)]
    targets = [c for c in targets if _own_roof(c) or _vendor_roof(c)]
    if not targets:
        return None
    with figure(9, 3.4 * len(targets), nrows=len(targets), squeeze=False) as (chart, grid):
        for axes, target in zip(grid[:, 0], targets, strict=True):
            of_target = [result for result in results if result["target"] == target["target"]]
            intensities = [result["flops"] / result["min_bytes"] for result in of_target]
            limits = (min(intensities) / 2, max(intensities) * 2)
            for roofs, style, name in (
                (_own_roof(target), "-", "measured here"),
                (_vendor_roof(target), "--", "the vendor's peak"),
            ):
                if roofs:
                    flops, moved = roofs
                    ridge = min(max(flops / moved, limits[0]), limits[1])
                    xs = [limits[0], ridge, limits[1]]
                    axes.plot(xs, [min(flops, x * moved) for x in xs], style, color=FAINT, lw=1.2, label=name)
            for number, precision in enumerate(dict.fromkeys(c["precision"] for c in of_target)):
                of_precision = [c for c in of_target if c["precision"] == precision]
                axes.plot(
                    [c["flops"] / c["min_bytes"] for c in of_precision],
                    [c["flops_per_s"] for c in of_precision],
                    "o",
                    color=series(number),
                    ms=5,
                    label=precision,
                )
            logarithmic(axes, "xy", si)
            axes.set_title(target["target"], loc="left", fontsize=10)
            axes.set_ylabel("operations/s")
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        grid[-1, 0].set_xlabel("operations per byte that must move")
        return (
            "Roofline",
            "Each case against the rates that this device reached in this run's matrix products and copies.",
            svg(chart, "roofline", "rooflines"),
        )


def _own_roof(target: Data) -> tuple[float, float] | None:
    flops, moved = max(target["own_flops_per_s"].values(), default=None), target["own_bytes_per_s"]
    return (flops, moved) if flops and moved else None


def _vendor_roof(target: Data) -> tuple[float, float] | None:
    peak = target["peak"]
    return (max(peak["flops"].values()), peak["bytes_per_s"]) if peak["flops"] and peak["bytes_per_s"] else None


def sizes(summary: Data) -> RenderedFigure | None:
    """Plot throughput over size, for workloads measured at several sizes."""
    results = [c for c in measured(summary) if c["family"] == "operation"]
    workloads = [w for w in dict.fromkeys(c["workload"] for c in results)
               if len({c["case"] for c in results if c["workload"] == w}) > 1]  # fmt: skip
    if not workloads:
        return None
    with figure(9, 2.8 * len(workloads), nrows=len(workloads), squeeze=False) as (chart, grid):
        for axes, workload in zip(grid[:, 0], workloads, strict=True):
            of_workload = [c for c in results if c["workload"] == workload]
            for number, (target, precision) in enumerate(
                dict.fromkeys((c["target"], c["precision"]) for c in of_workload)
            ):
                of_series = sorted(
                    (c for c in of_workload if (c["target"], c["precision"]) == (target, precision)), key=_size
                )
                rate = [_rate(c, c["call_s"]["median"]) for c in of_series]
                axes.plot(
                    [_size(c) for c in of_series], rate, "o-", color=series(number), ms=4, label=f"{target} {precision}"
                )
                axes.fill_between([_size(c) for c in of_series], [_rate(c, c["call_s"]["p95"]) for c in of_series],
                                  [_rate(c, c["call_s"]["p5"]) for c in of_series], color=series(number), alpha=0.2,
                                  lw=0)  # fmt: skip
            logarithmic(axes, "xy", si)
            axes.set_title(workload, loc="left", fontsize=10)
            axes.set_ylabel("operations/s" if of_workload[0].get("flops") else "bytes/s")
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        grid[-1, 0].set_xlabel("bytes that must move")
        return (
            "Size curves",
            "The ribbon is from the 5th to the 95th percentile of the rounds.",
            svg(chart, "sizes", "throughput over size"),
        )


def _size(result: Data) -> float:
    return float(result.get("min_bytes") or 1)


def _rate(result: Data, seconds: float) -> float:
    return float((result.get("flops") or result.get("min_bytes") or 1) / seconds)


def speed_error(summary: Data) -> RenderedFigure | None:
    """Plot time against error, to show the accuracy that a lower precision or another device costs."""
    results = [c for c in measured(summary) if (c.get("accuracy") or {}).get("rms_rel")]
    if not results:
        return None
    fastest = {
        case: min(c["call_s"]["median"] for c in results if c["case"] == case) for case in {c["case"] for c in results}
    }
    with figure(9, 3.8) as (chart, axes):
        for number, series_key in enumerate(dict.fromkeys((c["target"], c["precision"]) for c in results)):
            of_series = [c for c in results if (c["target"], c["precision"]) == series_key]
            axes.plot([c["call_s"]["median"] / fastest[c["case"]] for c in of_series],
                      [c["accuracy"]["rms_rel"] for c in of_series], "o", ms=5, color=series(number),
                      label=" ".join(series_key))  # fmt: skip
        logarithmic(axes, "x", lambda value: f"{value:g}×")
        axes.set_yscale("log")
        axes.set_xlabel("time, relative to the fastest of the case")
        axes.set_ylabel("RMS error, relative")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        caption = "Lower left is better. Errors are relative to float64 on the CPU."
        return "Speed against error", caption, svg(chart, "error", "speed against error")


def bars(summary: Data, key: str, title: str, caption: str, unit: Callable[[float], str]) -> RenderedFigure | None:
    """Plot one bar per result that has the value `key`; results without it are left out."""
    results = [c for c in measured(summary) if c.get(key) is not None][:MAX_ROWS]
    if not results:
        return None
    with figure(9, 0.9 + 0.22 * len(results)) as (chart, axes):
        targets = targets_of(results)
        bottom_up = list(reversed(results))
        axes.barh(
            range(len(bottom_up)),
            [c[key] for c in bottom_up],
            color=[series(targets.index(c["target"])) for c in bottom_up],
        )
        axes.set_yticks(range(len(bottom_up)), [f"{label(c)}  {c['target']}" for c in bottom_up], fontsize=8)
        logarithmic(axes, "x", unit)
        axes.set_ylim(-0.8, len(bottom_up) - 0.2)
        return title, caption, svg(chart, key, title)


def break_even(summary: Data) -> RenderedFigure | None:
    """Plot the number of calls after which a compiling level has recovered its preparation and first call."""
    results = measured(summary)
    rows = []
    for result in results:
        base = next((c for c in results if c["case"] == result["case"] and c["target"] == result["target"]
                     and c["precision"] == result["precision"] and c["level"] < result["level"]), None)  # fmt: skip
        if base is None:
            continue
        gain_s = base["call_s"]["median"] - result["call_s"]["median"]
        cost_s = result["compile_s"] + result["prepare_s"] - base["compile_s"] - base["prepare_s"]
        if gain_s > 0 and cost_s > 0:
            rows.append((f"{label(result)} over {base['level']}  {result['target']}", cost_s / gain_s))
    if not rows:
        return None
    with figure(9, 0.9 + 0.24 * len(rows)) as (chart, axes):
        rows.reverse()
        axes.barh(range(len(rows)), [calls for _, calls in rows], color=series(0))
        axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
        logarithmic(axes, "x", si)
        axes.set_xlabel("calls until compiling has paid off")
        axes.set_ylim(-0.8, len(rows) - 0.2)
        caption = "Time of compiling and preparing over the time saved per call. Levels that save nothing are left out."
        return "Break-even of compiling", caption, svg(chart, "breakeven", "break-even")


def sample_strips(lines: Iterable[Data]) -> RenderedFigure | None:
    """Plot every block over time, relative to its result's median, to show drift and disturbances."""
    results = [line for line in lines if line["line"] == "result" and line.get("blocks")]
    if not results:
        return None
    start_s = min(block["at"] for result in results for block in result["blocks"])
    with figure(9, 2.6) as (chart, axes):
        for number, target in enumerate(targets_of(results)):
            points = [
                (block["at"] - start_s, fastest_part_s(block) / middle)
                for result in results
                if result["target"] == target
                for middle in [_middle([fastest_part_s(b) for b in result["blocks"]])]
                for block in result["blocks"]
            ]
            dots(axes, points, color=series(number), alpha=0.7, label=target)
        axes.axhline(1, color=FAINT, lw=0.8)
        logarithmic(axes, "y", lambda value: f"{value:g}×")
        axes.set_xlabel("seconds since the first block")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        return "Drift", "Every block, relative to its result's median.", svg(chart, "strips", "blocks over time")


def dots(axes: Any, points: list[tuple[float, float]], **options: Any) -> None:
    """Draw points as one path of zero-length strokes, which takes a fifth of the bytes of markers."""
    strokes = [point for x, y in points for point in ((x, y), (x, y), (math.nan, math.nan))]
    axes.plot(*zip(*strokes, strict=True), "-", lw=2.2, solid_capstyle="round", **options)


def logarithmic(axes: Any, axis_names: str, format_value: Callable[[float], str]) -> None:
    """Make axes logarithmic, with few ticks whose labels `format_value` makes."""
    from matplotlib.ticker import LogLocator, NullLocator

    for name in axis_names:
        getattr(axes, f"set_{name}scale")("log")
        axis = axes.xaxis if name == "x" else axes.yaxis
        low, high = axis.get_view_interval()
        decades = math.log10(high / low) if low > 0 else 1
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: format_value(value))


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def si(value: float) -> str:
    """Format with an SI prefix: 1.5e9 -> 1.5 G."""
    if value < 1:
        return f"{value:g}"
    power = min(max(math.floor(math.log10(value) / 3), 0), 5)
    return f"{value / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P'][power]}".strip()


def make_figures(summary: Data, lines: Iterable[Data]) -> list[RenderedFigure]:
    lines = list(lines)
    drawn = [
        forest(summary),
        roofline(summary),
        sizes(summary),
        speed_error(summary),
        bars(summary, "price_per_million", "Cost", "Price of a million items, from the pools' prices per hour.",
             lambda v: f"{v:g}"),
        bars(summary, "joules_per_item", "Energy", "Joules per item, by the device's own counter.",
             lambda v: f"{v:g} J"),
        bars(summary, "peak_memory_bytes", "Memory", "Peak memory of the device during one call.",
             lambda v: f"{si(v)}B"),
        break_even(summary),
        sample_strips(lines),
    ]  # fmt: skip
    return [figure_or_none for figure_or_none in drawn if figure_or_none is not None]
