"""Pythons that somebody else made: what they tell, who may run a node, and what ranks lack."""

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.environments import environments, interpreters
from cluster.environments.environment_spec import EnvironmentSpec
from cluster.environments.interpreters import REQUIRED_MODULES, inspect_interpreter, node_interpreter
from cluster.environments.recipes import NODE_PACKAGES
from cluster.errors import UserError


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


def test_ours_runs_nodes_and_ranks():
    found = inspect_interpreter(sys.executable, ["torch", "no-such-package"], ["torch_xla", "json"])
    assert (found.python, found.unusable_reason, found.runs_ray) == (platform.python_version(), "", True)
    assert found.versions.keys() == {"ray", "torch"} and {*REQUIRED_MODULES, "json"} <= found.modules
    assert node_interpreter(Path(sys.executable)) == Path(sys.executable)


def test_a_python_without_ray_runs_ranks_and_its_nodes_run_from_ours(rayless):
    found = inspect_interpreter(rayless)
    assert (found.unusable_reason, found.runs_ray) == ("", False)
    assert node_interpreter(rayless) == Path(sys.executable)
    assert environments.create(EnvironmentSpec(interpreter=str(rayless))) == rayless


def test_ray_runs_only_under_our_python_to_the_patch_and_our_own_version_of_it():
    found = inspect_interpreter(sys.executable)
    assert not replace(found, python="3.12.99").runs_ray
    assert not replace(found, versions={"ray": "2.0.0"}).runs_ray


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("echo hello", "is not a Python interpreter; name the `python` of an environment with torch"),
        ("exit 3", "is not a Python interpreter; "),
        ("""echo '{"python": 1}'""", "is not a Python interpreter; "),
        (
            """echo '{"python": "3.9.2", "versions": {}, "modules": [], "torch": null}'""",
            "is Python 3.9.2; Polyfleet needs 3.11",
        ),
        (
            """echo '{"python": "3.12.1", "versions": {}, "modules": ["torch", "numpy", "psutil", "pydantic"],"""
            """ "torch": ""}'""",
            "has no pydantic_settings, xxhash; install them: {python} -m pip install pydantic_settings xxhash",
        ),
        (
            """echo '{"python": "3.12.1", "versions": {}, "modules": [], "torch": null}'""",
            "has no torch, numpy, psutil, pydantic, pydantic_settings, xxhash; name the `python` of",
        ),
    ],
)
def test_what_ranks_cannot_run_from_is_refused_with_what_it_lacks(tmp_path, says, told):
    python = script(tmp_path / "python", says)
    with pytest.raises(UserError) as refused:
        environments.create(EnvironmentSpec(interpreter=str(python)))
    assert str(refused.value).startswith(f"{python} {told.replace('{python}', str(python))}")


def test_one_that_cannot_be_started_or_never_answers_is_told(tmp_path, monkeypatch):
    assert inspect_interpreter(tmp_path / "absent").unusable_reason.startswith("cannot be run: ")
    monkeypatch.setattr(interpreters, "TIMEOUT_S", 0.1)
    assert "timed out" in inspect_interpreter(script(tmp_path / "python", "exec sleep 60")).unusable_reason


RANKS = "import workers.tasks.rank_main, workers.tasks.train, workers.tasks.prepare, workers.tasks.benchmark"
OF_OURS = ("workers", "cluster")


def test_a_rank_imports_no_other_package_than_those_that_are_asked_for():
    """What our own files import while a rank starts; what packages import beside themselves is their own."""
    code = f"""
import builtins, sys
found, before = set(), builtins.__import__
def noted(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and (globals or {{}}).get("__name__", "").partition(".")[0] in {OF_OURS}:
        found.add(name.partition(".")[0])
    return before(name, globals, locals, fromlist, level)
builtins.__import__ = noted
{RANKS}
print(*sorted(found - set(sys.stdlib_module_names) - {set(OF_OURS)}))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in said and set(said) <= set(REQUIRED_MODULES)
    assert {*REQUIRED_MODULES} - {"torch"} <= {line.partition(">")[0].replace("-", "_") for line in NODE_PACKAGES}
