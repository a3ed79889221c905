"""Policies that a distribution beside ours brings: found by its entry points, told by name, and by `doctor`."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.fleet import policies
from orchestrator.core.plan.policies import plugins
from orchestrator.runtime.health import health
from orchestrator.simulation import replay
from orchestrator.spec import installed_policies

TABLE = """
[polyfleet.policies]
longest_first = their_policies:longest_first
broken = their_policies:absent
finish_time = their_policies:longest_first
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    info = tmp_path / "their_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(TABLE)
    (tmp_path / "their_policies.py").write_text("def longest_first(seen):\n    return seen.work.remaining_s\n")
    return tmp_path


@pytest.fixture
def installed(theirs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(theirs))
    monkeypatch.setattr(plugins, "INSTALLED", {})
    monkeypatch.setattr(installed_policies, "INSTALLED", plugins.INSTALLED)
    monkeypatch.setattr(replay, "INSTALLED", plugins.INSTALLED)
    installed_policies.load.cache_clear()
    yield theirs
    installed_policies.load.cache_clear()


def test_they_may_be_named_in_fleet_files_and_never_replace_one_of_ours(installed: Path):
    assert policies.names() == (*policies.BUILTIN, "broken", "longest_first")
    assert policies.SchedulerSpec(policy="longest_first").policy == "longest_first"
    installed_policies.load()
    assert sorted(plugins.INSTALLED) == ["broken", "longest_first"]
    replay.check_policy("longest_first")


def test_one_that_cannot_be_loaded_or_is_gone_says_so_when_it_is_asked(installed: Path):
    installed_policies.register_expected("gone")
    for name, told in (("broken", "it cannot be loaded: AttributeError"), ("gone", "it is not installed where")):
        with pytest.raises(installed_policies.NotUsableError, match=told):
            plugins.INSTALLED[name](None)  # type: ignore[arg-type]


def test_doctor_names_a_policy_that_fails():
    controller = health.ControllerHealth(0.0, "", policy_fault="policy 'theirs' raised KeyError: 'x'")
    [(node, finding)] = health._controller(
        health.HealthSnapshot(controller, health.StoreHealth("here", "", 0.0, 0, 1 << 40))
    )
    assert (node, finding.level, finding.subject) == ("", "error", "policy")
    assert (
        finding.message
        == "policy 'theirs' raised KeyError: 'x'; until it is fixed, jobs are served in the order of submission"
    )


def simulated(theirs: Path, policy: str) -> "subprocess.CompletedProcess[str]":
    examples = Path(__file__).parents[3] / "examples" / "simulate"
    words = ["simulate", "--trace", examples / "trace.csv", "--throughputs", examples / "throughputs.csv"]
    words += ["--fleet", "v100=8,t4=8", "--policy", policy, "-o", "json"]
    path = f"{theirs}:{Path(__file__).parents[3]}"
    command = [sys.executable, "-m", "orchestrator.cli", *words]
    return subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True)


def test_a_trace_is_simulated_under_one_and_not_under_one_that_fails(theirs: Path):
    done = simulated(theirs, "longest_first")
    assert done.returncode == 0, done.stderr
    failed = simulated(theirs, "broken")
    assert failed.returncode != 0 and "policy 'broken' raised NotUsableError: it cannot be loaded" in failed.stderr
    assert (failed.stdout, "Traceback" in failed.stderr) == ("", False)
