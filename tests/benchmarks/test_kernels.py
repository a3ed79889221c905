"""The benchmark of kernels runs and its result has what the documents read. No time is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from workers import kernels as registry

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "kernels.py"


def test_the_quick_form_measures_every_arm_of_every_case(tmp_path: Path):
    names = [name for name in ("cpu", "torch") if not registry.unavailable_reason(name)]
    output = tmp_path / "new" / "kernels.json"
    words = [sys.executable, SCRIPT, "--small", "--without-compile", "--rounds", "6", "--sample-ms", "0.2"]
    words += ["--threads", "1", "2", "--kernels", *names, "-o", output]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    found = json.loads(output.read_text())
    assert found["kernels"].keys() == set(names)
    assert {(row["threads"], row["dtype"]) for row in found["rows"]} == {
        (count, dtype) for count in (1, 2) for dtype in ("fp32", "bf16")
    }
    assert {row["operation"] for row in found["rows"]} == {"rmsnorm", "swiglu", "matmul_vec", "causal"}
    assert {(row["way"], row["cache"]) for row in found["rows"]} == {
        ("forward", "hot"),
        ("forward", "cold"),
        ("backward", "hot"),
    }
    for row in found["rows"]:
        assert row["seconds"].keys() == row["samples_s"].keys() == {"eager", "copy", *names}
        assert all(len(samples) == 6 and min(samples) > 0 for samples in row["samples_s"].values())
        assert row["ratios"].keys() == {f"{peer}/{name}" for peer in ("eager", "copy") for name in names}
    assert len(found["calls"]) == 8
    for row in found["calls"]:
        assert row["operator_beyond_s"].keys() == row["operator_over_eager"].keys() == set(names)
        assert row["seconds"].keys() == {"eager", *(f"{n} {how}" for n in names for how in ("method", "operator"))}
