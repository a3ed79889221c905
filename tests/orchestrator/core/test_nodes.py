"""What the planner makes of what a node tells of its devices."""

from dataclasses import replace

from cluster.types import Device
from orchestrator.core.controller.nodes import device_groups

GiB = 1 << 30


def cards(*totals, **more):
    return tuple(
        Device("nvidia", "nvidia:H100-80GB", i, "H100", total_memory_bytes=t, **more) for i, t in enumerate(totals)
    )


def test_a_card_whose_memory_nobody_tells_does_not_hide_that_of_its_equals(t):
    facts = replace(t.facts("a"), devices=cards(80 * GiB, None, 79 * GiB))
    (group,) = device_groups(facts, "a", "", 0.0, {})
    assert (group.memory_bytes, group.total) == (79 * GiB, 3)
    (unknown,) = device_groups(replace(facts, devices=cards(None)), "a", "", 0.0, {})
    assert unknown.memory_bytes == 0


def test_a_card_that_is_lost_costs_itself_and_not_its_equals(t):
    lost = replace(cards(None)[0], index=9, unavailable_reason="GPU is lost")
    usable, gone = device_groups(replace(t.facts("a"), devices=(*cards(80 * GiB), lost)), "a", "", 0.0, {})
    assert (usable.free, usable.schedulable) == ((0,), True)
    assert (gone.free, gone.schedulable, gone.reason) == ((9,), False, "GPU is lost")
