"""The figures of a report. Each takes results and gives (title, what it shows, svg), or None where there is nothing."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from orchestrator.benchmark.report.svg import BAD, FAINT, GOOD, INK, LINE, MIDDLE, figure, series, svg
from orchestrator.show.setting_text import way_of
from workers.benchmark.statistics import fastest_part_s

Data = dict[str, Any]
Drawn = tuple[str, str, str]
MOST_ROWS = 60
COLOURS = {"FASTER": GOOD, "SLOWER": BAD, "SAME": INK, "INCONCLUSIVE": MIDDLE}


def measured(results: Data) -> list[Data]:
    return [cell for cell in results["cells"] if cell["call_s"]]


def label(cell: Data) -> str:
    return f"{cell['case']} {way_of(cell)}"


def targets_of(cells: Iterable[Data]) -> list[str]:
    return list(dict.fromkeys(cell["column"] for cell in cells))


def forest(results: Data) -> Drawn | None:
    """Ratios with their intervals, the line at 1, and the band that this host's noise makes."""
    every = [cell for cell in measured(results) if cell.get("versus")]
    if not every:
        return None
    farthest = sorted(every, key=lambda c: -abs(math.log(c["versus"]["ratio"])))[:MOST_ROWS]
    cells = [cell for cell in every if cell in farthest]
    with figure(9, 1.2 + 0.26 * len(cells)) as (made, axes):
        noises = [c["versus"]["noise"] for c in cells]
        noise = sorted(noises)[len(noises) // 2]
        axes.axvspan(1 / (1 + noise), 1 + noise, color=LINE, alpha=0.6, lw=0)
        axes.axvline(1, color=FAINT, lw=1)
        for row, cell in enumerate(reversed(cells)):
            v = cell["versus"]
            colour = COLOURS[v["verdict"]]
            axes.plot([v["low"], v["high"]], [row, row], color=colour, lw=2, solid_capstyle="butt")
            axes.plot(v["ratio"], row, "o", color=colour, ms=5)
        axes.set_yticks(range(len(cells)), [f"{label(c)}  {c['column']}" for c in reversed(cells)], fontsize=8)
        axes.set_ylim(-0.8, len(cells) - 0.2)
        logarithmic(axes, "x", lambda value: f"{value:g}×")
        axes.set_xlabel("reference's time over this one's: right of 1 is faster")
        told = (
            "Each ratio with its 95 % interval. The band is how far the same differed from itself in this run (median)."
        )
        told += f" The {len(cells)} of {len(every)} that are farthest from 1." if len(cells) < len(every) else ""
        return "Ratios", told, svg(made, "forest", "ratios with intervals")


def roofline(results: Data) -> Drawn | None:
    """Operations per byte against operations per second, under what the device reached itself and what is promised."""
    cells = [c for c in measured(results) if c.get("flops_per_s") and c.get("min_bytes") and c.get("flops")]
    columns = [c for c in results["columns"] if any(cell["column"] == c["column"] for cell in cells)]
    columns = [c for c in columns if _own_roof(c) or _vendor_roof(c)]
    if not columns:
        return None
    with figure(9, 3.4 * len(columns), nrows=len(columns), squeeze=False) as (made, grid):
        for axes, column in zip(grid[:, 0], columns, strict=True):
            mine = [cell for cell in cells if cell["column"] == column["column"]]
            intensities = [cell["flops"] / cell["min_bytes"] for cell in mine]
            reach = (min(intensities) / 2, max(intensities) * 2)
            for roofs, style, name in (
                (_own_roof(column), "-", "reached here"),
                (_vendor_roof(column), "--", "the vendor's peak"),
            ):
                if roofs:
                    flops, moved = roofs
                    ridge = min(max(flops / moved, reach[0]), reach[1])
                    xs = [reach[0], ridge, reach[1]]
                    axes.plot(xs, [min(flops, x * moved) for x in xs], style, color=FAINT, lw=1.2, label=name)
            for number, precision in enumerate(dict.fromkeys(c["precision"] for c in mine)):
                chosen = [c for c in mine if c["precision"] == precision]
                axes.plot([c["flops"] / c["min_bytes"] for c in chosen], [c["flops_per_s"] for c in chosen], "o",
                          color=series(number), ms=5, label=precision)  # fmt: skip
            logarithmic(axes, "xy", si)
            axes.set_title(column["column"], loc="left", fontsize=10)
            axes.set_ylabel("operations/s")
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        grid[-1, 0].set_xlabel("operations per byte that must move")
        return (
            "Roofline",
            "How near each case comes to what this device did in its own products and copies.",
            svg(made, "roofline", "rooflines"),
        )


def _own_roof(column: Data) -> tuple[float, float] | None:
    flops, moved = max(column["own_flops_per_s"].values(), default=None), column["own_bytes_per_s"]
    return (flops, moved) if flops and moved else None


def _vendor_roof(column: Data) -> tuple[float, float] | None:
    peak = column["peak"]
    return (max(peak["flops"].values()), peak["bytes_per_s"]) if peak["flops"] and peak["bytes_per_s"] else None


def sizes(results: Data) -> Drawn | None:
    """Throughput over size, for workloads measured at several: where it falls off."""
    cells = [c for c in measured(results) if c["family"] == "operation"]
    several = [w for w in dict.fromkeys(c["workload"] for c in cells)
               if len({c["case"] for c in cells if c["workload"] == w}) > 1]  # fmt: skip
    if not several:
        return None
    with figure(9, 2.8 * len(several), nrows=len(several), squeeze=False) as (made, grid):
        for axes, workload in zip(grid[:, 0], several, strict=True):
            of_it = [c for c in cells if c["workload"] == workload]
            for number, (column, precision) in enumerate(dict.fromkeys((c["column"], c["precision"]) for c in of_it)):
                mine = sorted((c for c in of_it if (c["column"], c["precision"]) == (column, precision)), key=_size)
                rate = [_rate(c, c["call_s"]["median"]) for c in mine]
                axes.plot(
                    [_size(c) for c in mine], rate, "o-", color=series(number), ms=4, label=f"{column} {precision}"
                )
                axes.fill_between([_size(c) for c in mine], [_rate(c, c["call_s"]["p95"]) for c in mine],
                                  [_rate(c, c["call_s"]["p5"]) for c in mine], color=series(number), alpha=0.2,
                                  lw=0)  # fmt: skip
            logarithmic(axes, "xy", si)
            axes.set_title(workload, loc="left", fontsize=10)
            axes.set_ylabel("operations/s" if of_it[0].get("flops") else "bytes/s")
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        grid[-1, 0].set_xlabel("bytes that must move")
        return (
            "Size curves",
            "The ribbon is from the 5th to the 95th percentile of the rounds.",
            svg(made, "sizes", "throughput over size"),
        )


def _size(cell: Data) -> float:
    return float(cell.get("min_bytes") or 1)


def _rate(cell: Data, seconds: float) -> float:
    return float((cell.get("flops") or cell.get("min_bytes") or 1) / seconds)


def speed_error(results: Data) -> Drawn | None:
    """Time against error: what a lower precision, or another device, costs in digits."""
    cells = [c for c in measured(results) if (c.get("accuracy") or {}).get("rms_rel")]
    if not cells:
        return None
    fastest = {
        case: min(c["call_s"]["median"] for c in cells if c["case"] == case) for case in {c["case"] for c in cells}
    }
    with figure(9, 3.8) as (made, axes):
        for number, way in enumerate(dict.fromkeys((c["column"], c["precision"]) for c in cells)):
            mine = [c for c in cells if (c["column"], c["precision"]) == way]
            axes.plot([c["call_s"]["median"] / fastest[c["case"]] for c in mine],
                      [c["accuracy"]["rms_rel"] for c in mine], "o", ms=5, color=series(number),
                      label=" ".join(way))  # fmt: skip
        logarithmic(axes, "x", lambda value: f"{value:g}×")
        axes.set_yscale("log")
        axes.set_xlabel("time, relative to the fastest of the case")
        axes.set_ylabel("RMS error, relative")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        told = "Down and left is better. Errors are of the result against float64 on the CPU."
        return "Speed against error", told, svg(made, "error", "speed against error")


def bars(results: Data, key: str, title: str, told: str, unit: Callable[[float], str]) -> Drawn | None:
    """One bar per cell that has the figure; others are left out, never estimated."""
    cells = [c for c in measured(results) if c.get(key) is not None][:MOST_ROWS]
    if not cells:
        return None
    with figure(9, 0.9 + 0.22 * len(cells)) as (made, axes):
        columns = targets_of(cells)
        shown = list(reversed(cells))
        axes.barh(range(len(shown)), [c[key] for c in shown], color=[series(columns.index(c["column"])) for c in shown])
        axes.set_yticks(range(len(shown)), [f"{label(c)}  {c['column']}" for c in shown], fontsize=8)
        logarithmic(axes, "x", unit)
        axes.set_ylim(-0.8, len(shown) - 0.2)
        return title, told, svg(made, key, title)


def break_even(results: Data) -> Drawn | None:
    """After how many calls a level that compiles has paid for its first call."""
    cells = measured(results)
    rows = []
    for cell in cells:
        base = next((c for c in cells if c["case"] == cell["case"] and c["column"] == cell["column"]
                     and c["precision"] == cell["precision"] and c["level"] < cell["level"]), None)  # fmt: skip
        if base is None:
            continue
        gain_s = base["call_s"]["median"] - cell["call_s"]["median"]
        cost_s = cell["compile_s"] + cell["prepare_s"] - base["compile_s"] - base["prepare_s"]
        if gain_s > 0 and cost_s > 0:
            rows.append((f"{label(cell)} over {base['level']}  {cell['column']}", cost_s / gain_s))
    if not rows:
        return None
    with figure(9, 0.9 + 0.24 * len(rows)) as (made, axes):
        rows.reverse()
        axes.barh(range(len(rows)), [calls for _, calls in rows], color=series(0))
        axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
        logarithmic(axes, "x", si)
        axes.set_xlabel("calls until the first one is paid for")
        axes.set_ylim(-0.8, len(rows) - 0.2)
        told = "Compiling and preparing, over what each call then saves. Levels that save nothing are not shown."
        return "Break-even of compiling", told, svg(made, "breakeven", "break-even")


def sample_strips(lines: Iterable[Data]) -> Drawn | None:
    """Every block of the run over time, relative to its cell's middle: drift and disturbances are seen."""
    cells = [line for line in lines if line["line"] == "cell" and line.get("blocks")]
    if not cells:
        return None
    first = min(block["at"] for cell in cells for block in cell["blocks"])
    with figure(9, 2.6) as (made, axes):
        for number, column in enumerate(targets_of(cells)):
            points = [
                (block["at"] - first, fastest_part_s(block) / middle)
                for cell in cells
                if cell["column"] == column
                for middle in [_middle([fastest_part_s(b) for b in cell["blocks"]])]
                for block in cell["blocks"]
            ]
            dots(axes, points, color=series(number), alpha=0.7, label=column)
        axes.axhline(1, color=FAINT, lw=0.8)
        logarithmic(axes, "y", lambda value: f"{value:g}×")
        axes.set_xlabel("seconds since the first block")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        return "Drift", "Every block, relative to the median of its cell.", svg(made, "strips", "blocks over time")


def dots(axes: Any, points: list[tuple[float, float]], **options: Any) -> None:
    """Many points as one path of strokes without length, a fifth of the bytes of a marker each."""
    strokes = [place for x, y in points for place in ((x, y), (x, y), (math.nan, math.nan))]
    axes.plot(*zip(*strokes, strict=True), "-", lw=2.2, solid_capstyle="round", **options)


def logarithmic(axes: Any, which: str, words: Callable[[float], str]) -> None:
    """Logarithmic axes with few ticks, written as people write numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    for name in which:
        getattr(axes, f"set_{name}scale")("log")
        axis = axes.xaxis if name == "x" else axes.yaxis
        low, high = axis.get_view_interval()
        decades = math.log10(high / low) if low > 0 else 1
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: words(value))


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def si(value: float) -> str:
    """1.5e9 as 1.5 G."""
    if value < 1:
        return f"{value:g}"
    power = min(max(math.floor(math.log10(value) / 3), 0), 5)
    return f"{value / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P'][power]}".strip()


def make_figures(results: Data, lines: Iterable[Data]) -> list[Drawn]:
    lines = list(lines)
    found = [
        forest(results),
        roofline(results),
        sizes(results),
        speed_error(results),
        bars(results, "price_per_million", "Cost", "Price of a million items, from the pools' prices per hour.",
             lambda v: f"{v:g}"),
        bars(results, "joules_per_item", "Energy", "Joules per item, by the device's own counter.",
             lambda v: f"{v:g} J"),
        bars(results, "peak_memory_bytes", "Memory", "The highest the device held during one call.",
             lambda v: f"{si(v)}B"),
        break_even(results),
        sample_strips(lines),
    ]  # fmt: skip
    return [one for one in found if one is not None]
