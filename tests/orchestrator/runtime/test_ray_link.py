"""What a server says of its fleet before the controller's first turn."""

import pytest

from cluster.fleet.fleet_record import FleetRecord
from cluster.version import VERSION
from orchestrator.runtime.agents.ray_link import RayLink, before_joining


def record(state):
    return FleetRecord("demo", state, "127.0.0.1:6379", VERSION, 0.0, "")


@pytest.mark.parametrize(
    ("fleet", "reason"),
    [(record("up"), "joining the Ray cluster at 127.0.0.1:6379"), (record("leaving"), "the fleet is leaving"),
     (None, "no fleet is up")],
)  # fmt: skip
def test_a_server_that_has_just_started_does_not_deny_a_fleet_that_is_up(fleet, reason):
    assert before_joining(fleet) == reason


def test_no_fleet_is_up_even_while_the_cluster_of_an_earlier_one_is_being_left():
    link = RayLink(None, lambda message: None)
    link._set_activity("disconnecting from the Ray cluster at 127.0.0.1:6379")
    assert link.update(None, lambda: None) == "no fleet is up"
    assert link.update(record("up"), lambda: None).startswith(
        "disconnecting from the Ray cluster at 127.0.0.1:6379, for "
    )
