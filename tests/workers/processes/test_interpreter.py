"""An agent whose pool has another Python: what it tells of it, and what it starts from it."""

import sys

import pytest

from workers.devices.discovery import discover
from workers.devices.discovery.machine_findings import import_failures
from workers.devices.discovery.versions import torch_build, versions
from workers.processes import interpreter


@pytest.fixture
def other(rayless, monkeypatch):
    monkeypatch.setenv("POLYFLEET_INTERPRETER", str(rayless))
    return str(rayless)


def test_without_the_variable_it_is_our_own(monkeypatch):
    monkeypatch.delenv("POLYFLEET_INTERPRETER", raising=False)
    assert (interpreter.interpreter(), interpreter.is_own(), interpreter.findings()) == (sys.executable, True, [])


def test_an_agent_tells_of_the_packages_that_its_ranks_have(other, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delenv("POLYFLEET_INTERPRETER")
        own, build = versions(), torch_build()
    assert (versions(), torch_build()) == (own, build), "links to the same packages; Ray is that of the node"
    assert interpreter.describe().path == other
    assert [finding for finding in discover("cpu")[1] if finding.subject == "interpreter"] == []
    assert interpreter.has("torch") and import_failures(("torch",)) == []


def test_an_interpreter_that_ranks_cannot_run_from_is_a_finding(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_INTERPRETER", str(tmp_path / "python"))
    [found] = interpreter.findings()
    assert found.level == "error" and f"the pool's {tmp_path / 'python'} cannot be run" in found.message
    assert versions()["python"] == "?" and torch_build() is None and not interpreter.has("torch")
    assert [f.message for f in discover("cpu")[1] if "interpreter" in f.message or "cannot be run" in f.message]
