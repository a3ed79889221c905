"""Lines of benchmark runs: those of format 1 are read by the names of format 2."""

import json
from pathlib import Path

from orchestrator.benchmark.benchmark_format import FORMAT, OLD_LINES, in_current_format

OLD = Path(__file__).parents[2] / "data" / "benchmark-run.jsonl"


def test_a_run_of_format_1_has_no_old_name_left():
    lines = [json.loads(line) for line in OLD.read_text().splitlines()]
    read = [in_current_format(line) for line in lines]
    assert {line["line"] for line in lines} & set(OLD_LINES.values()) and len(read) == len(lines)
    assert not {line["line"] for line in read} & set(OLD_LINES.values())
    started, target, result = read[:3]
    assert (started["targets"][0]["target"], target["target"], result["target"]) == ("cpu", "cpu", "cpu")
    assert result["accuracy"]["non_finite"] == 0 and "single_call_s" in result["blocks"][0]
    assert len(result["control_blocks"]) == len(lines[2]["blocks_again"])


def test_what_a_user_named_stays():
    line = {"line": "cell", "column": "cpu", "sizes": {"column": 3}, "blocks": []}
    assert in_current_format(line) == {"line": "result", "target": "cpu", "sizes": {"column": 3}, "blocks": []}


def test_a_line_of_format_2_stays_as_it_is():
    for line in ({"line": "started", "format": FORMAT, "targets": []}, {"line": "case", "case": "rmsnorm"}):
        assert in_current_format(line) is line
