"""A vendor inside the package is a row and two files: proved on a copy of the package that has one more."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
TOY = ROOT / "tests" / "data" / "toy-vendor" / "toy_vendor"
PACKAGES = ("cluster", "workers", "orchestrator")
USES = """
import torch, workers
from cluster import catalogue
from cluster.fleet.fleet_spec import parse_fleet
from orchestrator.client.inventory import backend_rows
from orchestrator.spec.resource_syntax import accelerators
from workers.checkpoint.conversion.target_dtypes import unsupported_dtypes

assert list(catalogue.builtin_vendors())[-1] == "toy"
assert parse_fleet({"pools": {"play": {"backend": "plaything"}}}).pools["play"].backend == "toy"
assert accelerators("toy:2")[0].kinds == ("toy",)
assert accelerators("toy:T1")[0].kinds == ("toy:T1",)
assert [d.kind for d in workers.HardwareDetector().detect().devices] == ["toy:T1", "toy:T1", "cpu"]
assert workers.get_backend().BACKEND_NAME == "toy" == workers.BackendType.TOY
config = workers.PolyfleetConfig(priority=["toy"], backends=["toy"], toy={"precision": "bf16"})
assert workers.get_backend("toy", config=config).precision == "bfloat16"
assert workers.validate(torch.nn.Linear(2, 2), "toy", torch.ones(1, 2)).ok
assert catalogue.ray_resource("toy", emulated=False) == "toys"
assert "toy" in [row["backend"] for row in backend_rows([])]
assert unsupported_dtypes("toy:T1") == {}
"""


def test_a_vendor_is_a_row_and_two_files(tmp_path):
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    header, row = (TOY / "vendors.csv").read_text().replace("toy-docs", "torch").splitlines()
    vendors = tmp_path / "cluster" / "catalogue" / "vendors.csv"
    columns = vendors.read_text().splitlines()[0].split(",")
    cells = dict(zip(header.split(","), row.split(","), strict=True))
    vendors.write_text(vendors.read_text() + ",".join(cells.get(name, "") for name in columns) + "\n")
    backend = (TOY / "backend.py").read_text() + "\n\nBackend = ToyBackend\n"
    (tmp_path / "workers" / "devices" / "backends" / "vendors" / "toy.py").write_text(backend)
    (tmp_path / "workers" / "devices" / "discovery" / "vendors" / "toy.py").write_text(
        "from cluster.types import Device\n\n"
        "def present(machine):\n    return 'TOY_DEVICES' in machine.environ\n\n"
        "def find(machine):\n    return [Device('toy', 'toy:T1', i, 'Toy') for i in range(2)], []\n"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path), "POLYFLEET_HOME": str(tmp_path / "home"), "TOY_DEVICES": "2"}
    done = subprocess.run([sys.executable, "-c", USES], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
