"""What a host prepares: which of its Pythons nodes run from, and the storages of its pools."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from cluster.environments.interpreters import REQUIRED_MODULES, Interpreter
from cluster.hosts.environment_setup import can_run_nodes

ROOT = Path(__file__).parents[3]


def prepared(**pools):
    """Without a recipe for nodes: what is there has to serve."""
    request = {"pools": pools, "ray": version("ray"), "node": {}}
    words = [sys.executable, "-P", "-m", "cluster.hosts.environment_setup"]
    done = subprocess.run(
        words, input=json.dumps(request), env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_nodes_run_from_the_python_that_has_ray_and_each_pool_keeps_its_own(rayless, tmp_path):
    pools = {"image": rayless, "main": sys.executable}
    asked = {name: {"interpreter": str(python), "storage": str(tmp_path / name)} for name, python in pools.items()}
    told = prepared(**asked)["done"]
    assert told["node"] == sys.executable
    assert {name: one["interpreter"] for name, one in told["pools"].items()} == {k: str(v) for k, v in pools.items()}
    storages = {one["storage"] for one in told["pools"].values()}
    assert len(storages) == 2 and "" not in storages
    same = {name: one | {"storage": str(tmp_path / "main")} for name, one in asked.items()}
    assert len({one["storage"] for one in prepared(**same)["done"]["pools"].values()}) == 1


def test_a_storage_that_cannot_be_one_is_told_with_its_field():
    told = prepared(far={"interpreter": sys.executable, "storage": "/"})["error"]
    assert told["user"] and told["message"].startswith("pools.far.storage: / contains more than checkpoints")


def test_nodes_run_only_from_the_head_s_ray_and_minor_python():
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    fit = Interpreter("/p", f"{here}.0", {"ray": "2.60.0"}, frozenset(REQUIRED_MODULES))
    assert can_run_nodes(fit, "2.60.0") and not can_run_nodes(fit, "2.60.1")
    assert not can_run_nodes(Interpreter("/p", "3.10.1", fit.versions, fit.modules), "2.60.0")
    assert not can_run_nodes(Interpreter("/p", fit.python, fit.versions, frozenset()), "2.60.0")
