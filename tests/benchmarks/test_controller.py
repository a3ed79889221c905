import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]


def test_the_controller_is_measured_with_simulated_agents(tmp_path):
    few = ("--nodes", "5", "--attempts", "20", "--seconds", "2")
    command = [sys.executable, "benchmarks/controller.py", *few, "-o", tmp_path / "told.json"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    steady = json.loads((tmp_path / "told.json").read_text())["steady"]
    assert steady["cores"] > 0 and steady["running"] > 0
    assert steady["answers_per_s"] > 0 and steady["events_per_s"] > 0 and steady["reports_lost"] == 0
