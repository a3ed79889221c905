"""An agent as an actor of a real Ray cluster is killed, and the next one finds what runs. A node gets our code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full


def test_a_killed_actor_comes_back_and_adopts_its_attempt(tmp_path):
    """In a Ray cluster of its own; the driver is a script, because Ray reads its environment once per process."""
    script = Path(__file__).with_name("agent_in_ray.py")
    environ = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environ |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "POLYFLEET_NODE_DIR": str(tmp_path / "node"),
    }
    environ |= {"POLYFLEET_STORAGE": str(tmp_path / "storage"), "POLYFLEET_BACKEND": "cpu", "POLYFLEET_NODE": "n0"}
    environ |= {"HOME": str(tmp_path), "POLYFLEET_HOME": str(tmp_path / "home"), "RAY_CANARY_TOKEN": "canary"}
    (tmp_path / "home").mkdir(mode=0o700)
    ran = subprocess.run([sys.executable, script], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["agents"][0] != told["agents"][1]
    assert told["supervisors"][0] == told["supervisors"][1]
    assert told["niceness"] == 0 or os.geteuid(), "Ray runs its workers at 15, and only root may change that"
    assert told["state"] == "succeeded"
    assert told["fenced"] == "fenced"
    assert told["beside_hanging_starts"] == [1, 0, 0, 0, None, 40], "more starts hang than there are threads for calls"
    late = "Polyfleet was sent to the node but was not unpacked within 0 s"
    assert told["deliveries"] == [1, late, late, True], "sent once: each wait is for the same delivery"
    assert "went on" in told["log"]
    assert "canary" not in told["log"]
    assert "RAY_" not in told["log"]
