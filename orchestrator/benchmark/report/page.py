"""The report as one HTML file, with inline figures, without scripts or network access."""

from pathlib import Path
from typing import Any

from orchestrator.benchmark.report import figures, sentences
from orchestrator.show.benchmark import SIGNS, STATUS_TEXTS, settings_text
from orchestrator.terminal_text import escape_control
from orchestrator.units import duration, elapsed, size, timestamp

Data = dict[str, Any]
FOLDER = Path(__file__).parent
VERDICTS = {"FASTER": "faster", "SLOWER": "slower", "SAME": "same", "INCONCLUSIVE": "inconclusive"}


def html(summary: Data, lines: list[Data], since: Data | None = None) -> str:
    """Render a run's summary. `since` is a comparison with an earlier run (history.compare)."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    environment.filters |= {"duration": duration, "size": size, "way": settings_text}
    return environment.get_template("page.html").render(
        results=summary,
        began=_moment(summary["started_at"]),
        took=elapsed(summary["started_at"], summary["ended_at"]) if summary["ended_at"] else "",
        trust=sentences.host_trust(summary),
        strip=sentences.verdict_strip(summary),
        heat=heat(summary),
        figures=figures.make_figures(summary, lines),
        environment=sentences.environment(summary),
        columns=[target["target"] for target in summary["targets"]],
        cells=[result | {"command": sentences.command(result, summary)} for result in summary["results"]],
        problems=[failed for failed in summary["results"] if failed["call_s"] is None],
        since=since,
        signs=SIGNS,
    )


def _printable(value: Any) -> Any:
    """Make control characters in users' texts visible; our own SVG (not a plain str) stays."""
    return escape_control(value) if type(value) is str else value


def heat(summary: Data) -> list[Data]:
    """Rows of the table of cases: {"case", "tiles": [{"text", "title", "class", "strength", "time"}]}."""
    targets = [target["target"] for target in summary["targets"]]
    all_settings = list(dict.fromkeys(settings_text(result) for result in summary["results"]))
    by_position = {(entry["case"], settings_text(entry), entry["target"]): entry for entry in summary["results"]}
    rows = []
    for case in dict.fromkeys(result["case"] for result in summary["results"]):
        for settings in all_settings:
            row_results = [by_position.get((case, settings, target)) for target in targets]
            if any(row_results):
                name = case if len(all_settings) == 1 else f"{case} · {settings}"
                rows.append({"case": name, "tiles": [_tile(result) for result in row_results]})
    return rows


def _tile(result: Data | None) -> Data:
    if result is None:
        return {"text": "", "title": "", "class": "none", "strength": 0, "time": ""}
    if result["call_s"] is None:
        return {
            "text": STATUS_TEXTS.get(result["status"], result["status"]),
            "title": result["reason"],
            "class": result["status"],
            "strength": 0,
            "time": "",
        }
    call, time = result["call_s"], duration(result["time_s"])
    title = f"median {duration(call['median'])} [{duration(call['low'])}, {duration(call['high'])}]"
    title += f", {result['rounds']} rounds"
    versus = result.get("versus")
    if not versus:
        return {"text": "", "title": title, "class": "reference", "strength": 0, "time": time}
    strength = min(abs(versus["ratio"] if versus["ratio"] > 1 else 1 / versus["ratio"]) - 1, 3.0) / 3
    title += f"; {versus['ratio']:.3f}× [{versus['low']:.3f}, {versus['high']:.3f}], {versus['verdict'].lower()}"
    title += f", noise {versus['noise']:.1%}, p = {versus['p']:.2g}"
    return {
        "text": f"{versus['ratio']:.2f}× {SIGNS[versus['verdict']]}", "title": title,
        "class": VERDICTS[versus["verdict"]], "strength": round(15 + 55 * strength), "time": time,
    }  # fmt: skip


def _moment(iso: str | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M UTC}" if (moment := timestamp(iso)) else ""
