"""Charts of a replayed trace, one SVG file each: devices held, job completion times, queued jobs."""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.simulation.fleets import HOUR_S, Fleet
from orchestrator.simulation.replay import Replayed
from orchestrator.simulation.traces import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT = "#222222", "#777777"
HELD, WAITING = "#4477aa", "#cc3311"
BINS = 400
"""Number of bins on the time axis; each shows the mean of its time."""
STYLE: dict[str, Any] = {
    "text.parse_math": False,
    "svg.fonttype": "none", "svg.hashsalt": "polyfleet", "font.family": "sans-serif", "font.size": 10,
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": FAINT, "ytick.color": FAINT, "axes.edgecolor": "#cccccc",
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e5e5e5", "grid.linewidth": 0.6, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip


def pictures(trace: Trace, fleet: Fleet, replayed: Replayed) -> dict[str, str]:
    """Draw all charts: a map from file name to SVG text."""
    kinds = len(fleet.kinds)
    return {
        "utilisation.svg": _draw(
            lambda panels: _utilisation(panels, fleet, replayed), panels=kinds, height=1.5 * kinds
        ),
        "jct.svg": _draw(lambda panels: _completion_times(panels[0], trace, replayed)),
        "queue.svg": _draw(lambda panels: _queue(panels[0], replayed)),
    }


def _draw(draw: "Callable[[list[Axes]], None]", panels: int = 1, height: float = 3.2) -> str:
    """Draw panels below each other, without a window system. The same data gives the same text."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = STYLE
    with mpl.rc_context(style):
        drawing = Figure(figsize=(9, 0.8 + height), layout="constrained", facecolor="white")
        draw(list(drawing.subplots(panels, sharex=True, squeeze=False)[:, 0]))
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _utilisation(panels: "list[Axes]", fleet: Fleet, replayed: Replayed) -> None:
    for index, axes in enumerate(panels):
        hours, used = _over_time(replayed.at_s, replayed.used[:, index])
        share = 100.0 * used / fleet.devices[index]
        axes.stairs(share, hours, fill=True, color=HELD)
        title = f"{fleet.kinds[index]}: {fleet.devices[index]} devices, {np.average(share):.0f} % held on average"
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylim(0, 100)
        axes.set_ylabel("%")
    _hours(panels[-1])


def _completion_times(axes: "Axes", trace: Trace, replayed: Replayed) -> None:
    share = 100.0 * np.arange(1, trace.jobs + 1) / trace.jobs
    took_h, isolated_h = np.sort(replayed.end_s - trace.arrival_s) / HOUR_S, np.sort(trace.isolated_s) / HOUR_S
    axes.plot(took_h, share, label=f"on this fleet, mean {took_h.mean():.3g} h", color=HELD, lw=1.8)
    label = f"alone on its fastest kind, mean {isolated_h.mean():.3g} h: no scheduler is better"
    axes.plot(isolated_h, share, label=label, color=INK, lw=1.0, ls="--")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title("Job completion times", loc="left")
    axes.set_xlabel("hours from submission to end")
    axes.set_ylabel("% of jobs that took no longer")
    axes.legend(fontsize=8, loc="upper left")


def _queue(axes: "Axes", replayed: Replayed) -> None:
    lines = (("running or waiting", replayed.present, HELD), ("waiting", replayed.waiting, WAITING))
    for name, counts, colour in lines:
        hours, jobs = _over_time(replayed.at_s, counts)
        axes.stairs(jobs, hours, label=f"{name}, {np.average(jobs):.3g} on average", color=colour, lw=1.3)
    axes.set_ylim(bottom=0)
    axes.set_title("Jobs that were submitted and have not ended", loc="left")
    axes.set_ylabel("jobs")
    _hours(axes)
    axes.legend(fontsize=8, loc="upper left")


def _hours(axes: "Axes") -> None:
    axes.set_xlabel("hours since the first submission")
    axes.set_xlim(left=0)


def _over_time(at_s: NDArray[np.float64], level: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (edges of equal time bins in hours, mean level in each bin).

    A level lasts until the next event.
    """
    area = np.concatenate(([0.0], np.cumsum(np.diff(at_s) * level[:-1])))
    edges_s = np.linspace(at_s[0], at_s[-1], BINS + 1)
    return edges_s / HOUR_S, np.diff(np.interp(edges_s, at_s, area)) / max((at_s[-1] - at_s[0]) / BINS, 1e-9)
