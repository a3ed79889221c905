"""The memory benchmark runs and its result has what the documents read. No error of an estimate is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "memory_estimate.py"


def test_one_model_is_measured_in_inference_and_in_training(tmp_path: Path):
    output = tmp_path / "new" / "memory.json"
    words = [sys.executable, SCRIPT, "--only", "mlp", "-o", output]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    rows = json.loads(output.read_text())["rows"]
    assert [(row["execution"], row["model"], row["mode"]) for row in rows] == [
        ("eager", "mlp", "inference"),
        ("eager", "mlp", "training"),
    ]
    for row in rows:
        assert row["estimated"]["total"] > 0
        assert row["resident"]["peak"] >= row["resident"]["kept"] > 0
        assert row["returned_at_once"].keys() == row["resident"].keys()
