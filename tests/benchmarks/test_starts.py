"""The benchmark of starts runs and its result has what the documents read. No time is asserted anywhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "starts.py"


def test_both_ways_are_measured(tmp_path):
    words = ["--rounds", "1", "--jobs", "2", "-o", tmp_path / "found.json"]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    told = [row["case"] for row in found["rows"]]
    assert told == ["zygote.start", "zygote.end", "interpreter.start", "interpreter.end", "python", "true"]
    assert {row["case"] for row in found["rates"]} == {
        f"{way}.{n}" for way in ("zygote", "interpreter") for n in (1, 2, 4)
    }
