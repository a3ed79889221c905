"""What a server says of its fleet before the controller's first turn."""

import pytest

from cluster.fleet.fleet_record import FleetRecord
from cluster.version import VERSION
from orchestrator.runtime.agents.ray_link import before_joining


def record(state):
    return FleetRecord("demo", state, "127.0.0.1:6379", VERSION, 0.0, "")


@pytest.mark.parametrize(
    ("fleet", "reason"),
    [(record("up"), "joining the Ray cluster at 127.0.0.1:6379"), (record("leaving"), "the fleet is leaving"),
     (None, "no fleet is up")],
)  # fmt: skip
def test_a_server_that_has_just_started_does_not_deny_a_fleet_that_is_up(fleet, reason):
    assert before_joining(fleet) == reason
