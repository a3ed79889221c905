"""The demo as a user runs it: real pools, real training, a real kill; its summary has to be true."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
KEYS = {
    "pools",
    "skipped_pools",
    "devices",
    "jobs",
    "losses",
    "resume_step",
    "loss_difference",
    "accuracy",
    "checkpoint_copy",
    "recovered",
    "benchmark",
    "seconds",
}


def test_the_demo_ends_well_and_its_summary_is_true(tmp_path: Path):
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--report", str(tmp_path), "--case-seconds", "0.2"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "Warning" not in ran.stderr, ran.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) == KEYS
    assert summary["accuracy"] >= 0.97 and summary["resume_step"] == 150
    assert summary["loss_difference"] < 1e-3
    assert all(job["state"] == "SUCCEEDED" for job in summary["jobs"])
    recovered = summary["recovered"]
    assert recovered["resumed_step"] >= 50 and len(recovered["kinds"]) == 2
    measured = {cell["pool"] for cell in summary["benchmark"]["results"]}
    assert measured == set(summary["pools"])
    if "xla" in summary["pools"]:
        assert recovered["kinds"] == ["tpu:emulated", "cpu"]
    else:
        assert "xla" in [skipped["pool"] for skipped in summary["skipped_pools"]]
