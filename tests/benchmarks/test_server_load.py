"""The benchmark of the server under load runs, small, and its result has what the page quotes. No time is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "server_load.py"


def test_calls_are_measured_alone_and_beside_the_load(tmp_path: Path):
    output = tmp_path / "new" / "load.json"
    words = [sys.executable, SCRIPT, "--rounds", "1", "--calls", "3", "--streams", "10", "--idle", "20", "-o", output]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert [row["case"] for row in found["rows"]] == ["jobs", "nodes", "new"]
    assert all(row[name]["n"] == 3 and row[name]["p99_s"] > 0 for row in found["rows"] for name in ("alone", "beside"))
    assert found["server_under_load"]["threads"] > 0 and found["settings"]["streams"] == 10
