"""Without a fleet the inventory and the doctor tell of this machine: real processes, a home that is empty."""

import json

import pytest


@pytest.fixture
def alone(polyfleet, tmp_path):
    """The command where no fleet is up; further variables by name."""
    return lambda *words, **env: polyfleet(*words, env={"POLYFLEET_HOME": str(tmp_path / "none"), **env})


def test_the_inventory_of_a_machine_without_a_fleet_has_its_cpu_and_starts_nothing(alone, tmp_path):
    (node,) = json.loads(alone("inventory", "-o", "json").stdout)
    assert "cpu" in {device["backend"] for device in node["devices"]}
    assert node["state"] == "ready"
    assert not (tmp_path / "none").exists()
    assert "cpu" in alone("inventory", "--local").stdout


def test_the_doctor_of_this_machine_ends_with_1_only_for_what_must_be_acted_on(alone):
    done = alone("doctor", "--local", "-o", "json")
    found = json.loads(done.stdout)
    assert done.returncode == int(any(finding["level"] in ("error", "warning") for finding in found))
    assert all(finding["remedy"] for finding in found)


def test_a_vendors_library_that_does_not_load_is_a_finding_with_its_message(alone, tmp_path):
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "torch_tpu.py").write_text("raise ImportError('libtpu.so: wrong ELF class')\n")
    done = alone("doctor", "-o", "json", PYTHONPATH=str(tmp_path / "libs"))
    assert done.returncode == 1
    (finding,) = [f for f in json.loads(done.stdout) if f["subject"] == "torch_tpu"]
    assert (finding["level"], "wrong ELF class" in finding["message"]) == ("error", True)
