"""The inventory benchmark runs and its result has what the documents read. No time is asserted anywhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "inventory.py"


def test_every_case_is_measured_inside_and_as_a_process(tmp_path):
    output = tmp_path / "inventory.json"
    words = [sys.executable, SCRIPT, "--rounds", "1", "-o", output]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert len(found["rows"]) == 4
    assert all(row["inside"]["n"] == row["process"]["n"] == 1 for row in found["rows"])
    assert [r["theirs"] for r in found["ratios"]] == ["torch", "torch"]
    assert "cpu" in found["devices"][-1]
