"""The report as one HTML file: no script, no network, pictures inside."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator.benchmark.report import figures, sentences
from orchestrator.show.benchmark import SIGNS, WORDS
from orchestrator.show.setting_text import way_of
from orchestrator.show.terminal_text import escape_control
from orchestrator.show.units import duration, size

Data = dict[str, Any]
FOLDER = Path(__file__).parent
VERDICTS = {"FASTER": "faster", "SLOWER": "slower", "SAME": "same", "INCONCLUSIVE": "inconclusive"}


def html(results: Data, lines: list[Data], since: Data | None = None) -> str:
    """`since` is a comparison with a run before (history.compare)."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    environment.filters |= {"duration": duration, "size": size, "way": way_of}
    return environment.get_template("page.html").render(
        results=results,
        began=_moment(results["began_s"]),
        took=duration((results["ended_s"] or 0) - (results["began_s"] or 0)) if results["ended_s"] else "",
        trust=sentences.host_trust(results),
        strip=sentences.verdict_strip(results),
        heat=heat(results),
        figures=figures.make_figures(results, lines),
        environment=sentences.environment(results),
        columns=[column["column"] for column in results["columns"]],
        cells=[cell | {"command": sentences.command(cell, results)} for cell in results["cells"]],
        problems=[c for c in results["cells"] if c["call_s"] is None],
        since=since,
        signs=SIGNS,
    )


def _printable(value: Any) -> Any:
    """Control characters of users' texts made visible; our own SVG is left as it is."""
    return escape_control(value) if type(value) is str else value


def heat(results: Data) -> list[Data]:
    """Rows of the map: {"case", "tiles": [{"text", "title", "class", "strength"}]}."""
    columns = [column["column"] for column in results["columns"]]
    ways = list(dict.fromkeys(way_of(cell) for cell in results["cells"]))
    by_place = {(c["case"], way_of(c), c["column"]): c for c in results["cells"]}
    rows = []
    for case in dict.fromkeys(cell["case"] for cell in results["cells"]):
        for way in ways:
            cells = [by_place.get((case, way, column)) for column in columns]
            if any(cells):
                name = case if len(ways) == 1 else f"{case} · {way}"
                rows.append({"case": name, "tiles": [_tile(cell) for cell in cells]})
    return rows


def _tile(cell: Data | None) -> Data:
    if cell is None:
        return {"text": "", "title": "", "class": "none", "strength": 0, "time": ""}
    if cell["call_s"] is None:
        return {"text": WORDS.get(cell["status"], cell["status"]), "title": cell["reason"], "class": cell["status"],
                "strength": 0, "time": ""}  # fmt: skip
    call, time = cell["call_s"], duration(cell["time_s"])
    title = f"median {duration(call['median'])} [{duration(call['low'])}, {duration(call['high'])}]"
    title += f", {cell['rounds']} rounds"
    versus = cell.get("versus")
    if not versus:
        return {"text": "", "title": title, "class": "reference", "strength": 0, "time": time}
    strength = min(abs(versus["ratio"] if versus["ratio"] > 1 else 1 / versus["ratio"]) - 1, 3.0) / 3
    title += f"; {versus['ratio']:.3f}× [{versus['low']:.3f}, {versus['high']:.3f}], {versus['verdict'].lower()}"
    title += f", noise {versus['noise']:.1%}, p = {versus['p']:.2g}"
    return {
        "text": f"{versus['ratio']:.2f}× {SIGNS[versus['verdict']]}", "title": title,
        "class": VERDICTS[versus["verdict"]], "strength": round(15 + 55 * strength), "time": time,
    }  # fmt: skip


def _moment(seconds: float | None) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC") if seconds else ""
