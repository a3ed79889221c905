"""A tier that is run in parts: which files each part contains, and what the tables say of all parts together."""

import json

import flaky_campaign
import pytest
import tiers

A, B = "tests/test_draws.py", "tests/test_tiers.py"
"""Two files of the gate."""


def run(*tests, failed=(), exit_code=0, seed=1):
    failures = [{"test": test, "when": "call", "why": "assert 1 | 2"} for test in failed]
    more = {"seed": seed, "outcome": "3 passed", "commit": "c0ffee", "machine": "a CPU, 2 cores"}
    return {"tests": list(tests), "failed": failures, "exit_code": exit_code or int(bool(failures)), **more}


def test_a_part_contains_the_files_of_its_tier_in_its_folders():
    gate, full = flaky_campaign.files_of("gate", []), flaky_campaign.files_of("full", [])
    assert A in gate and "tests/test_pages.py" in full and not set(gate) & set(full)
    part = flaky_campaign.files_of("gate", ["tests/machines", A])
    assert part == sorted([A, *(file for file in gate if file.startswith("tests/machines/"))])
    assert all(tiers.tier_of(flaky_campaign.ROOT / file) == "gate" for file in part)
    assert flaky_campaign.files_of("gate", ["tests/test_pages.py", f"{A}::test_x", "tests/mach"]) == []


def test_a_file_counts_in_the_runs_that_contained_it_and_ran_to_their_end():
    runs = [run(), run("tests"), run(A), run(A, failed=[f"{A}::test_x"]), run(A, exit_code=2), run("tests/cluster")]
    assert [flaky_campaign.runs_of(file, runs) for file in (A, B)] == [4, 2]
    assert list(flaky_campaign.coverage_table(runs, [A, B]))[2:] == [
        f"| 2 | 1 | {B} |",
        f"| 4 | 1 | {A} |",
        "commits: c0ffee; machines: a CPU, 2 cores",
    ]


def test_a_failure_is_shown_with_the_runs_that_contained_its_file():
    runs = [run(A, failed=[f"{A}::test_x"]), run(A), run(B)]
    assert list(flaky_campaign.failure_table(runs))[2:] == [f"| {A}::test_x | 1 | 2 | assert 1 / 2 |"]
    assert list(flaky_campaign.failure_table([run(A)] * 3))[2:] == ["| every test passed | 0 | 3 | |"]


def test_a_failure_is_recorded_without_the_path_of_this_clone():
    line = f"FAILED {A}::test_x (call): {flaky_campaign.ROOT}/.venv/bin/python exited with code 1\n"
    why = "./.venv/bin/python exited with code 1"
    assert flaky_campaign.parse_failures(line) == [{"test": f"{A}::test_x", "when": "call", "why": why}]


def test_a_run_that_failed_without_a_failed_test_is_a_failure():
    [row] = list(flaky_campaign.failure_table([run(A), run(A, exit_code=3, seed=7)]))[2:]
    assert row == "| (no test; exit code 3, seed 7) | 1 | 1 | 3 passed |"


def test_runs_are_added_to_those_of_the_same_tier_only(tmp_path):
    file = tmp_path / "runs.json"
    file.write_text(json.dumps({"tier": "gate", "machine": {}, "runs": [run(A)]}))
    assert flaky_campaign.load_results(file, "gate")["runs"] == [run(A)]
    with pytest.raises(SystemExit, match="has runs of tier gate"):
        flaky_campaign.load_results(file, "full")
    assert flaky_campaign.load_results(tmp_path / "absent.json", "full")["runs"] == []
