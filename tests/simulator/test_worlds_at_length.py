"""What test_worlds.py does, at length: other seeds, and enough events for every kind of fault."""

import pytest

from tests.simulator.campaign import campaign

pytestmark = pytest.mark.full


@pytest.mark.parametrize("seed", (10_000, 2_000_000))
def test_two_hundred_thousand_events_break_no_law(seed):
    found = campaign(seed, 200_000)
    assert not found.violations, found.violations
    assert len(found.faults) >= 20, "hardly any kind of fault was injected"
