"""matplotlib's figures as inline SVG whose colours are the page's CSS variables, for light and dark mode."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Placeholder colours, replaced by the page's variables. No figure uses them otherwise.
INK, FAINT, LINE, PAPER = "#010203", "#010204", "#010205", "#010206"
GOOD, BAD, MIDDLE = "#010207", "#010208", "#010209"
SERIES = tuple(f"#0103{number:02x}" for number in range(8))
VARIABLES = {
    INK: "--ink", FAINT: "--faint", LINE: "--line", PAPER: "--paper", GOOD: "--good", BAD: "--bad", MIDDLE: "--middle",
    **{colour: f"--series-{number}" for number, colour in enumerate(SERIES)},
}  # fmt: skip
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "path.simplify": False,  # keeps zero-length strokes, which draw points
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": LINE, "axes.facecolor": "none",
    "figure.facecolor": "none", "savefig.facecolor": "none", "xtick.color": FAINT, "ytick.color": FAINT,
    "grid.color": LINE, "grid.linewidth": 0.6, "axes.grid": True, "axes.axisbelow": True, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "legend.labelcolor": INK,
}  # fmt: skip


@contextmanager
def figure(width: float, height: float, **options: Any) -> Iterator[tuple["Figure", Any]]:
    """Yield (figure, axes), sizes in inches, without a window system."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = STYLE
    with mpl.rc_context(style):
        chart = Figure(figsize=(width, height), layout="constrained")
        yield chart, chart.subplots(**options)


def svg(chart: "Figure", name: str, label: str) -> str:
    """Convert to one `<svg>` element. `name` prefixes its ids to keep them unique, `label` is for screen readers."""
    import matplotlib as mpl

    out = io.StringIO()
    style: Any = STYLE | {"svg.hashsalt": name}
    with mpl.rc_context(style):
        chart.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\b(id|xlink:href|clip-path)="(#|url\(#)?', lambda m: m.group(0) + f"{name}-", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = re.sub(r"font: ([^;\"]*?)(?:'[^;\"]*|sans-serif)", r"font: \1 system-ui, sans-serif", text)
    head = f'<svg role="img" aria-label="{_attribute(label)}" class="figure"'
    return re.sub(
        r"<svg\b([^>]*?) width=\"[^\"]*\"", rf"{head}\1", re.sub(r' height="[^"]*"', "", text, count=1), count=1
    )


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def series(number: int) -> str:
    return SERIES[number % len(SERIES)]
