"""The planner's benchmarks run, and their results have what the documents read. No time is asserted anywhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
KEY = (
    "full_ms_p50", "full_ms_p99", "incremental_ms_p50", "gap_to_lp_percent", "eight_counts_ms_p50", "jobs_16384_ms_p50",
    "jobs_100000_ms_p95", "ten_times_the_devices",
)  # fmt: skip


def test_the_quick_form_decides_every_instance_near_the_best():
    words = [sys.executable, ROOT / "benchmarks/planner.py", "--quick", "-o", "json"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert tuple(found)[: len(KEY)] == KEY
    assert len(found["instances"]) == 6
    for row in found["instances"].values():
        assert row["running"] > 0 and row["highs_lp_ms"] > 0
        assert -0.01 <= row["gap_to_lp_percent"] <= 2


def test_traces_made_by_the_recipe_are_compared_by_how_much_long_times_count(tmp_path):
    sizes = [f"job,{size},{size},{size / 2},{size / 8}" for size in (1, 2, 4, 8)]
    header = "job_type,scale_factor,v100_steps_per_s,p100_steps_per_s,k80_steps_per_s"
    (tmp_path / "throughputs_isolated.csv").write_text("\n".join((header, *sizes)))
    words = [sys.executable, ROOT / "benchmarks/tails.py", tmp_path, "--quick", "--tails", "0,0.2"]
    done = subprocess.run([*words, "-o", tmp_path / "out.json"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["set"], row["tail"]) for row in rows] == [
        (name, tail) for name in ("first", "second", "unseen") for tail in (0, 0.2)
    ]
    assert all(len(row["p99_h"]) == 2 and row["against_the_first"]["p99_h"] > 0 for row in rows)


def test_batches_made_by_the_recipe_end_near_the_bound_of_the_makespan(tmp_path):
    sizes = [f"job,{size},{size},{size / 2},{size / 8}" for size in (1, 2, 4, 8)]
    header = "job_type,scale_factor,v100_steps_per_s,p100_steps_per_s,k80_steps_per_s"
    (tmp_path / "throughputs_isolated.csv").write_text("\n".join((header, *sizes)))
    words = [sys.executable, ROOT / "benchmarks/makespans.py", tmp_path, "--quick", "-o", tmp_path / "out.json"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["batch"], row["jobs"]) for row in rows] == [("seed 401", 40), ("seed 402", 40)]
    assert all(0 <= row["restarts_of_0_s"]["above_bound_percent"] < 100 for row in rows)


def test_traces_are_replayed_under_each_policy(tmp_path):
    rates = (ROOT / "examples/simulate/throughputs.csv").read_text().replace("t4_", "p100_").splitlines()
    rates = [f"{rates[0]},k80_steps_per_s", *(f"{row}," for row in rates[1:])]
    (tmp_path / "throughputs_isolated.csv").write_text("\n".join(rates))
    (tmp_path / "static_12_s0_n300.csv").write_text((ROOT / "examples/simulate/trace.csv").read_text())
    words = [sys.executable, ROOT / "benchmarks/traces.py", tmp_path, "--only", "static", "-o", tmp_path / "out.json"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["policy"], row["restart_s"], row["jobs"]) for row in rows] == [
        ("finish_time", 0, 60), ("finish_time", 60, 60), ("makespan", 0, 60), ("makespan", 60, 60),
    ]  # fmt: skip


def test_whole_plans_are_made_by_order_and_on_arrays():
    words = [sys.executable, ROOT / "benchmarks/plans.py", "--quick", "-o", "json"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert tuple(found)[:3] == ("order_ms_p50", "fill_ms_p50", "full_ms_p50")
    assert all(row[way]["p50"] > 0 for row in found["fleets"].values() for way in ("order", "fill", "full"))
