"""The benchmark of logs runs and its result has what the documents read. No time is asserted anywhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "logs.py"


def test_every_case_is_measured(tmp_path):
    words = ["--log-mb", "3", "--read-mb", "1", "--rounds", "1", "--folder", tmp_path, "-o", tmp_path / "found.json"]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["case"] for row in found["rows"]][:2] == ["tail.agent", "tail.http"]
    assert {row["case"] for row in found["rates"]} >= {"read.http", "follow.http", "read.cli", "write.0", "write.100"}
    assert all(row["n"] == 1 and row["bytes"] > 1e6 for row in found["rates"])
    assert found["log_bytes"] > 3e6
