"""The overhead benchmark runs and its result has what the documents read. No time is asserted anywhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "overhead.py"
ROW = {"case", "what", "n", "median_s", "low_s", "high_s", "min_s", "samples_s"}
CASES = {
    "cli.help", "cli.jobs", "cli.submit", "job.warm.done", "job.cold.done", "job.back_to_back", "job.python",
    "actor.warm", "actor.cold", "fleet.up", "fleet.down", "inventory.rest", "inventory.agent", "limit.fsync",
    "limit.python", "limit.exec", "limit.call", "job.warm.stage.command_ran",
}  # fmt: skip


def test_the_quick_form_measures_every_case_and_leaves_nothing_running(tmp_path: Path):
    output = tmp_path / "new" / "overhead.json"
    words = [sys.executable, SCRIPT, "--quick", "--without-ray-jobs", "-o", output]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    found = json.loads(output.read_text())
    rows = {row["case"]: row for row in found["rows"]}
    assert rows.keys() >= CASES
    assert not any(case.startswith("ray_") for case in rows)
    assert all(row.keys() >= ROW and len(row["samples_s"]) == row["n"] > 0 for row in rows.values())
    assert {"ours", "theirs", "ratio", "low", "high", "verdict"} <= found["ratios"][0].keys()
    assert {"Polyfleet server", "Polyfleet node head", "Polyfleet node cpu-0"} == {r["group"] for r in found["memory"]}
    assert {"cpu", "cores", "file_system", "python", "ray"} <= found["machine"].keys()
    assert found["load_average"].keys() == {"before", "after"}
    assert found["processes_left"] == 0
    assert rows["job.warm.done"]["what"] in done.stdout
