"""From lines to results and reports: references, verdicts held together, limits, and pages that fetch nothing."""

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cluster.errors import UserError
from orchestrator.benchmark import export
from orchestrator.benchmark.history import compare
from orchestrator.benchmark.report import page, sentences, text
from orchestrator.benchmark.results import merge_runs, summarize
from orchestrator.show.benchmark import report
from orchestrator.submission.benchmark_client import read_lines

CASE = {"workload": "matmul", "family": "operation", "mode": "forward", "item": "call", "items": 1}
HOSTILE = '<script>alert(1)</script> \x1b[31m"&'


def cell(case, column, seconds, host="h", precision="fp32", level="O1", status="measured", reason="", **more):
    blocks = [
        {"round": n, "calls": 10, "parts_s": [10 * seconds * (1 + n / 500), 20 * seconds], "cpu_s": 10 * seconds,
         "preempted": n % 2, "single_call_s": seconds, "at": float(n)}
        for n in range(12)
    ] if status == "measured" else []  # fmt: skip
    return {
        "line": "result", "id": f"{case}@{column}/{precision}/{level}", "case": case, "target": column, "host": host,
        "precision": precision, "level": level, "regime": "hot", "status": status, "reason": reason, **CASE,
        "flops": 2e6, "min_bytes": 1e3, "accuracy": {"ok": True, "rms_rel": 1e-6}, "first_call_s": 1.0,
        "prepare_s": 0.1, "peak_memory_bytes": 1 << 20, "blocks": blocks, "control_blocks": blocks, "host_before": None,
        "host_after": None,
        **more,
    }  # fmt: skip


def run(*cells, columns=(("cpu", "h"), ("nvidia:H200", "h"))):
    named = [{"target": name, "pool": "p", "kind": name, "job": "j", "number": 0} for name, _ in columns]
    facts = {"pool": "p", "device": {"device_name": HOSTILE}, "torch": "2.13.0", "price_per_hour": 3.6, "versions": {}}
    return [
        {"line": "started", "run": "bench-1", "request": {"seed": 3}, "targets": named, "time": 0.0},
        *({"line": "target", "target": n, "host": h, "facts": facts | {"kind": n}} for n, h in columns),
        *cells,
        {"line": "ended", "state": "SUCCEEDED", "reason": "", "time": 60.0},
    ]


def test_others_are_compared_with_the_first_column_in_the_same_way_and_that_with_its_first():
    lines = run(
        cell("matmul/a", "nvidia:H200", 1e-4), cell("matmul/a", "cpu", 1e-3),
        cell("matmul/a", "cpu", 5e-4, precision="bf16"), cell("matmul/a", "nvidia:H200", 5e-5, precision="bf16"),
    )  # fmt: skip
    told = {c["id"]: c.get("versus") for c in summarize(lines)["results"]}
    assert told["matmul/a@cpu/fp32/O1"] is None
    assert told["matmul/a@cpu/bf16/O1"]["reference"] == "matmul/a@cpu/fp32/O1"
    assert told["matmul/a@nvidia:H200/bf16/O1"]["reference"] == "matmul/a@cpu/bf16/O1"
    found = told["matmul/a@nvidia:H200/fp32/O1"]
    assert (found["reference"], found["verdict"], found["how"]) == ("matmul/a@cpu/fp32/O1", "FASTER", "paired")
    assert found["ratio"] == pytest.approx(10)


def test_columns_of_two_hosts_are_compared_without_pairing():
    lines = run(cell("matmul/a", "cpu", 1e-3), cell("matmul/a", "nvidia:H200", 1e-4, host="other"))
    [found] = [c["versus"] for c in summarize(lines)["results"] if c.get("versus")]
    assert (found["how"], found["verdict"]) == ("unpaired", "FASTER")


def test_rates_shares_and_prices_are_those_of_the_numbers():
    copy = cell("memory-copy/1", "nvidia:H200", 1e-6, workload="memory-copy", flops=0, min_bytes=4e6)
    told = {c["id"]: c for c in summarize(run(cell("matmul/a", "nvidia:H200", 1e-4), copy))["results"]}
    one = told["matmul/a@nvidia:H200/fp32/O1"]
    assert one["flops_per_s"] == pytest.approx(2e6 / one["call_s"]["median"])
    assert one["of_own_flops"] == 1.0 and one["of_peak_flops"] == pytest.approx(one["flops_per_s"] / 67e12)
    assert one["of_own_bytes"] == pytest.approx(
        one["bytes_per_s"] / told["memory-copy/1@nvidia:H200/fp32/O1"]["bytes_per_s"]
    )
    assert one["price_per_million"] == pytest.approx(3.6 / 3600 * one["call_s"]["median"] * 1e6)
    assert told["matmul/a@nvidia:H200/fp32/O1"]["joules_per_item"] is None


def test_a_cell_measured_again_counts_as_it_was_last():
    lines = run(cell("matmul/a", "cpu", 9.0), cell("matmul/a", "cpu", 1e-3))
    [only] = summarize(lines)["results"]
    assert only["call_s"]["median"] < 1


def test_what_was_not_measured_keeps_its_reason():
    lines = run(
        cell("matmul/a", "cpu", 1e-3), cell("matmul/a", "nvidia:H200", 0, status="unsupported", reason="no fp16")
    )
    found = summarize(lines)
    assert [c["reason"] for c in found["results"] if c["call_s"] is None] == ["no fp16"]
    drawn = report(found).html()
    assert "unsupported: no fp16 (matmul/a fp32 O1)" in drawn


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def html():
    lines = run(
        *(cell(f"matmul/{n}", c, s * n, level=level, min_bytes=1e3 * n) for n in (1, 2, 3) for level in ("O1", "O2")
          for c, s in (("cpu", 1e-3), ("nvidia:H200", 1e-4 if level == "O1" else 5e-5))),
        cell("memory-copy/1", "cpu", 1e-6, workload="memory-copy", flops=0, min_bytes=4e6),
        cell(f"user/{HOSTILE}/forward", "cpu", 0, status="failed", reason=HOSTILE),
    )  # fmt: skip
    return page.html(summarize(lines), lines)


def test_the_page_fetches_nothing_runs_nothing_and_escapes_everything(html):
    read = Page()
    read.feed(html)
    assert not {"script", "link", "iframe", "img", "object"} & set(read.tags)
    refers = [value for name, value in read.attributes if name in ("src", "href", "xlink:href", "action")]
    assert all(value.startswith("#") for value in refers)
    assert not re.search(r"url\((?!#)", html) and "@import" not in html
    assert "<script>alert" not in html and "&lt;script&gt;alert(1)" in html
    assert "default-src 'none'" in html and "\x1b" not in html


def test_the_page_has_every_part_and_its_figures_take_the_page_s_colours(html):
    for title in ("Cases", "Ratios", "Roofline", "Size curves", "Speed against error", "Cost", "Memory",
                  "Break-even of compiling", "Drift", "Not measured", "Environment", "Every result"):  # fmt: skip
        assert f"<h2>{title}</h2>" in html, title
    assert not re.search(r"#010[23][0-9a-f]{2}", html)
    assert "var(--ink)" in html and "prefers-color-scheme: dark" in html
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))


def test_each_cell_has_the_command_that_measures_it_again():
    found = summarize(run(cell("matmul/a", "cpu", 1e-3), cell("matmul/a", "nvidia:H200", 1e-4, precision="bf16")))
    told = sentences.command(found["results"][1], found)
    assert told == ("polyfleet benchmark run matmul/a --kinds cpu,nvidia:H200 --precision bf16 --level O1 --seed 3")


def test_csv_markdown_and_json_lines_say_the_same():
    lines = run(cell("matmul/a", "cpu", 1e-3), cell("matmul/a", "nvidia:H200", 1e-4))
    found = summarize(lines)
    rows = list(csv.DictReader(io.StringIO(text.to_csv(found))))
    assert [row["versus_verdict"] for row in rows] == ["", "FASTER"]
    assert "10.00× ▲" in text.markdown(found)
    again = [json.loads(line) for line in export.to_jsonl(lines).splitlines()]
    assert summarize(again) == found


def test_runs_of_machines_that_no_fleet_joins_stand_in_one_report():
    here, there = run(cell("matmul/a", "cpu", 1e-3)), run(cell("matmul/a", "cpu", 2e-3, host="other"))
    card = run(cell("matmul/a", "nvidia:H200", 1e-5, host="third"), columns=(("nvidia:H200", "third"),))
    there[0]["run"] = "bench-2"
    found = summarize(merge_runs([here, there, card]))
    assert [c["target"] for c in found["targets"]][:3] == ["cpu", "nvidia:H200", "cpu@bench-2"]
    versus = {c["target"]: c["versus"] for c in found["results"] if c.get("versus")}
    assert versus["cpu@bench-2"]["ratio"] == pytest.approx(0.5) and versus["cpu@bench-2"]["how"] == "unpaired"
    assert [v["verdict"] for v in versus.values()] == ["SLOWER", "FASTER"]
    assert page.html(found, merge_runs([here, there, card]))
    assert merge_runs([here]) == here


def test_two_devices_of_one_kind_and_software_are_called_twins():
    lines = run(
        cell("matmul/a", "left", 1e-3), cell("matmul/a", "right", 2e-3), columns=(("left", "h"), ("right", "h"))
    )
    for line in lines:
        if line["line"] == "target":
            line["facts"]["kind"] = "nvidia:H200"
    found = summarize(lines)
    assert found["results"][1]["versus"]["same_device_kind"] is True
    assert "compares devices, not backends" in sentences.verdict_strip(found)[1]["sentence"]


RECORDED = Path(__file__).parents[2] / "data" / "benchmark-run.jsonl"
SHOWN = re.compile(r"(?P<time>[0-9.]+) (?P<unit>µs|ms|s)(?:  ?(?P<ratio>[0-9.]+)× .)?")
SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}


def shown(tile):
    """(seconds, half of their last digit, the ratio or None) of a tile."""
    match = SHOWN.fullmatch(tile)
    assert match, tile
    unit = SECONDS[match["unit"]]
    last = 10 ** -len(match["time"].partition(".")[2]) * unit / 2
    return float(match["time"]) * unit, last, match["ratio"] and float(match["ratio"])


@pytest.mark.parametrize(
    "first", ['{"line": "begun", "run": "x"}', '{"line": "started", "format": 3}', '{"line": "case"}', ""]
)
def test_a_file_of_another_format_is_refused_and_not_shown_as_an_empty_run(first, tmp_path):
    (tmp_path / "run.jsonl").write_text(first)
    with pytest.raises(UserError, match="does not begin with a line `started` of format 2") as error:
        read_lines(tmp_path / "run.jsonl")
    assert "benchmark run --save" in error.value.remedy


def tables():
    """What a run shows on each surface, by case: the tiles of its ways, the reference first."""
    told = summarize(read_lines(RECORDED))
    in_text = [tiles for _, tiles in report(told).parts[0].rows]
    in_page = [[f"{tile['time']} {tile['text']}".strip() for tile in row["tiles"]] for row in page.heat(told)]
    rows = [line for line in text.markdown(told).splitlines() if line.startswith(("| rms", "| mlp"))]
    marked = [row.split("|")[2].strip() for row in rows]
    in_csv = [
        f"{float(row['time_s'])} s" + (f" {float(row['versus_ratio'])}× =" if row["versus_ratio"] else "")
        for row in csv.DictReader(io.StringIO(text.to_csv(told)))
    ]
    flat = ([tile.text for tiles in in_text for tile in tiles], [t for row in in_page for t in row], marked, in_csv)
    return {surface: [tiles[:4], tiles[4:]] for surface, tiles in zip(("text", "page", "md", "csv"), flat, strict=True)}


@pytest.mark.parametrize("surface", ["text", "page", "md", "csv"])
def test_the_ratio_that_is_shown_is_that_of_the_two_times_beside_it(surface):
    for reference, *others in tables()[surface]:
        reference_s, reference_off, ratio = shown(reference)
        assert ratio is None
        for other in others:
            time_s, off, ratio = shown(other)
            low, high = (reference_s - reference_off) / (time_s + off), (reference_s + reference_off) / (time_s - off)
            assert low - 0.005 <= ratio <= high + 0.005, (reference, other)


def test_the_ratio_to_an_earlier_run_is_that_of_the_two_times_beside_it():
    lines = read_lines(RECORDED)
    slower = [dict(line) for line in lines]
    for line in slower:
        for block in line.get("blocks", []):
            block["parts_s"] = [part * 1.3 + 1e-5 * number for number, part in enumerate(block["parts_s"])]
    rows = [row for row in compare(read_lines(RECORDED), slower)["results"] if "ratio" in row]
    assert len(rows) == 8
    assert all(row["before_s"] / row["after_s"] == pytest.approx(row["ratio"]) for row in rows)
