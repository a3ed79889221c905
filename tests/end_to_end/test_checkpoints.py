"""Checkpoints of a real fleet through the command line: found, moved, converted, compared, taken out and deleted."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestrator import Orchestrator, TrainJob

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def saved(shared_fleet: Orchestrator, fleet_file: Path, train_file: Path) -> str:
    """A job with checkpoints of steps 5, 10 and 15 in pool left, for all of these tests: they change none of them."""
    with Orchestrator.up(fleet_file) as fleet:
        spec = {"entry": train_file.name, "working_dir": str(train_file.parent), "arguments": {"steps": 15}}
        job = fleet.submit(TrainJob(**spec, resources={"pool": "left"}))
        job.result()
    return job.id


@pytest.fixture
def told(cli):
    def run(*arguments: str, code: int = 0) -> Any:
        done = cli("checkpoint", *arguments, "-o", "json")
        assert done.returncode == code, done
        return json.loads(done.stdout)

    return run


def test_a_job_s_checkpoints_are_listed_by_job_pool_and_reference(saved: str, told):
    rows = told("list", saved)
    assert [row["step"] for row in rows] == [15, 10, 5]
    assert rows == told("list", f"left:{saved}") == told("list", saved, "--pool", "left")
    assert told("list", f"right:{saved}") == []


def test_a_copy_between_pools_is_the_same_and_a_converted_one_says_what_it_changed(saved: str, told, cli):
    refused = cli("checkpoint", "copy", f"left:{saved}", "right:half", "--to-kind", "tpu:v5e")
    assert refused.returncode == 0, refused  # float32 is what TPUs have
    unknown = cli("checkpoint", "copy", f"left:{saved}", "right:never", "--to-kind", "tpu:v99")
    assert unknown.returncode == 2 and "to_kind: unknown kind 'tpu:v99'\n  did you mean" in unknown.stderr, unknown
    copied = told("copy", f"left:{saved}", "right:same")
    same = told("diff", f"left:{saved}", "right:same")
    assert (same["same"], same["b"]) == (True, copied["target"])
    lossy = told("convert", f"left:{saved}", f"left:{saved}-half", "--dtype", "float32=bfloat16", "--on-lossy", "allow")
    changed = {name for name, one in lossy["converted"].items() if one["change"]["values_changed"]}
    moved = told("copy", lossy["ref"], "right:half16", "--to-kind", "nvidia:V100", "--convert-at", "target")
    assert moved["conversion"]["ref"] == moved["target"]
    rows = told("diff", f"left:{saved}", "right:half16", code=1)["tensors"]
    assert {row["name"] for row in rows if row["max_abs"]} == changed
    assert {row["dtype_b"] for row in rows} == {"float16"}


def test_values_that_would_change_are_refused_with_the_option_that_allows_it(saved: str, cli):
    refused = cli("checkpoint", "convert", f"left:{saved}", "left:never", "--dtype", "float32=float16")
    assert (refused.returncode, "--on-lossy allow" in refused.stderr) == (2, True), refused


def test_what_is_exported_is_imported_again(saved: str, told):
    told("export", f"left:{saved}", "left:out-torch", "--format", "torch", "--entry", "model")
    told("import", "left:out-torch", "left:back")
    again = told("diff", f"left:{saved}", "left:back", code=1)
    assert again["tensors"] == [] and "model/weight" not in again["only_in_a"]


def test_pruning_keeps_the_newest_and_what_is_pinned(saved: str, told, home: Path):
    shutil.copytree(home / "storage" / "left" / saved, home / "storage" / "left" / "pruned")
    oldest = told("list", "left:pruned")[-1]
    told("pin", oldest["ref"])
    assert len(told("prune", "left:pruned", "--keep", "1", "--dry-run")["deleted"]) == 1
    told("prune", "left:pruned", "--keep", "1")
    assert [row["step"] for row in told("list", "left:pruned")] == [15, 5]
