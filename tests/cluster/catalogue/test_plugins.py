"""Vendors of installed distributions: their rows are read beside ours, and never instead of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
READ = """
from cluster import catalogue
from cluster.fleet.fleet_spec import parse_fleet
from orchestrator.spec.resource_syntax import accelerators
from orchestrator.spec.job_spec import parse_job

row = catalogue.vendor("PLAYTHING")
assert (row.backend, row.ray_resource, row.environment) == ("toy", "toys", ""), row
assert list(catalogue.vendors())[:7] == list(catalogue.builtin_vendors())
assert catalogue.resolve_name("T1-Mini") == ("toy:T1-8GB",)
assert catalogue.resolve_name("t1") == ("toy:T1",)
assert catalogue.architecture("toy", "t1").native >= {"bfloat16", "float64", "float32", "int8"}
assert catalogue.resolve_kind("plaything:t1-16gb") == "toy:T1-16GB"
assert catalogue.tier("toy:T1-8GB") == "other-gpu"
assert catalogue.sources()["toy-docs"].url == "https://toys.example/docs"
assert catalogue.resolve_name("H100") == ("nvidia:H100",)
wanted = accelerators(["toy", "plaything:T1-Maxi:2", "T1"])
assert [w.kinds for w in wanted] == [("toy",), ("toy:T1-16GB",), ("toy:T1",)]
assert parse_fleet({"pools": {"play": {"backend": "plaything"}}}).pools["play"].backend == "toy"
parse_job({"command": "true", "resources": {"accelerators": "toy:2"}})
try:
    parse_job({"command": "true", "env": {"TOY_VISIBLE_DEVICES": "1"}, "resources": {"accelerators": "toy"}})
except Exception as e:
    assert "TOY_VISIBLE_DEVICES is set by Polyfleet itself" in str(e), e
else:
    raise AssertionError("the variable that masks devices was taken")
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=folder)


def test_a_distributions_vendor_stands_beside_ours_in_fleets_jobs_and_words(toy_vendor, tmp_path):
    done = run(READ, toy_vendor(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        (
            *("vendors.csv", "\ntoy,", "\nnvidia,"),
            "distribution toy-vendor: vendors.csv, line 2, field 'backend': 'nvidia' belongs to NVIDIA GPU",
        ),
        (
            *("vendors.csv", ",plaything,", ",cuda,"),
            "distribution toy-vendor: vendors.csv, line 2, field 'aliases': 'cuda' belongs to NVIDIA GPU",
        ),
        (
            *("vendors.csv", ",other-gpu,", ",best,"),
            "distribution toy-vendor: vendors.csv, line 2, field 'default_tier': unknown 'best'",
        ),
        (
            *("vendors.csv", ",toys,", ",,"),
            "distribution toy-vendor: vendors.csv, line 2, field 'ray_resource': '' is empty",
        ),
        (
            *("vendors.csv", "ray_resource", "ray_resourc"),
            "vendors.csv, line 1, field 'ray_resourc': there is no such column; did you mean 'ray_resource'?",
        ),
        (
            *("models.csv", "\ntoy:T1-8GB", "\nnvidia:H100-80GB"),
            "distribution toy-vendor: models.csv, line 2, field 'kind': unknown 'nvidia'",
        ),
        (
            *("models.csv", ",t1,16,", ",t2,16,"),
            "distribution toy-vendor: models.csv, line 3, field 'architecture': unknown 't2'; did you mean 't1'?",
        ),
        (
            *("models.csv", ",t1,8,", ",t1,lots,"),
            "distribution toy-vendor: models.csv, line 2, field 'memory_gb': 'lots' is not a number",
        ),
        (
            *("models.csv", ",t1,8,1,", ",t1,8,"),
            "distribution toy-vendor: models.csv, line 2, field 'bf16_tflops': the line has 7 fields, the header has 8",
        ),
        (
            *("architectures.csv", ",yes,", ",some,"),
            "distribution toy-vendor: architectures.csv, line 2, field 'matrix_units': 'some' is neither yes nor no",
        ),
        (
            *("architectures.csv", "bfloat16;", "bf16;"),
            "distribution toy-vendor: architectures.csv, line 2, field 'native': unknown 'bf16'",
        ),
    ],
)
def test_a_row_from_outside_that_is_wrong_is_named_with_its_distribution_file_line_and_field(
    toy_vendor, tmp_path, file, before, after, said
):
    path = toy_vendor(tmp_path) / "toy_vendor" / file
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))
    done = run("from cluster import catalogue; catalogue.vendors(); catalogue.models()", tmp_path)
    assert f"UserError: {said}" in done.stderr or (said in done.stderr and "UserError" in done.stderr), done.stderr


def test_a_distribution_without_its_file_is_named(toy_vendor, tmp_path):
    (toy_vendor(tmp_path) / "toy_vendor" / "vendors.csv").unlink()
    done = run("from cluster import catalogue; catalogue.vendors()", tmp_path)
    assert "distribution toy-vendor: toy_vendor has no vendors.csv" in done.stderr


def test_our_own_words_are_read_without_looking_for_other_distributions(tmp_path):
    """The search reads the metadata of every installed distribution; most commands need none of it."""
    code = """
from cluster import catalogue
from orchestrator.spec.resource_syntax import accelerators
accelerators(["nvidia:H100:8", "A100-80GB", "v5e:4", "cuda", "trn1"])
assert catalogue.backend_name("rocm") == "amd"
assert catalogue.plugins.entries.cache_info().misses == 0
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
