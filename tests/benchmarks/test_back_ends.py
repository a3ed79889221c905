"""The benchmarks of switching and of levels run in their quick form, and write what their pages quote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]


def run(script, tmp_path, *words):
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks" / script), "-o", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, json.loads(out.read_text())


def test_switching_is_measured_beside_torchs_own_with_its_proof(tmp_path):
    text, found = run("library_switching.py", tmp_path, "--rounds", "6")
    assert "| mkldnn |" in text
    for told in found["switching_us"].values():
        assert set(told) >= {"ours", "empty"}
    assert found["effect"]["mkldnn"]["proof"]["off"] == "aten::_slow_conv2d_forward"


def test_levels_are_measured_beside_plain_compile(tmp_path):
    text, found = run("optimization_levels.py", tmp_path, "--models", "mlp", "--small")
    assert "| mlp | O1 |" in text
    levels = found["models"]["mlp"]
    assert set(levels) == {"torch.compile", "O1", "O2", "O3"}
    assert levels["O3"]["metrics"]["max_rel_error"] <= found["tolerance"]


def test_verdicts_are_tried_on_the_same_and_on_planted_slow_downs(tmp_path):
    _, found = run("honesty.py", tmp_path, "--comparisons", "1", "--rounds", "3")
    assert set(found["verdicts"]) == {"quiet", "one process on and off", "two processes all the time"}
    for planted in found["verdicts"].values():
        assert list(planted) == ["same", "5 %", "10 %", "20 %"]
        assert sum(planted["same"]["verdicts"].values()) == 1
    assert len(found["agreement"]) == 3 and found["overhead"]["empty_block_s"] > 0
