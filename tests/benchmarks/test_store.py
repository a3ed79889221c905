"""The benchmark of the job store runs, small, and its result has what the page quotes. No time is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "store.py"
SIZES = {"rounds": 1, "seconds": 1, "clients": 4, "history": 100, "listed": 2000, "open": 50, "calls": 3}


def test_submits_pages_and_starts_are_measured(tmp_path: Path):
    output = tmp_path / "new" / "store.json"
    words = [sys.executable, SCRIPT, "-o", output, *(f"--{name}={size}" for name, size in SIZES.items())]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    submits = ["submit", "submit", "limit", "submit", "limit"]
    assert [row["what"].split()[0].strip(",:") for row in rows] == [*submits, *["page"] * 4, "start", "reading"]
    assert all(row["p99_s"] >= row["median_s"] > 0 for row in rows)
    assert all(row["per_s"] > 0 for row in rows[:5]) and rows[-2]["rss_bytes"] > 0
