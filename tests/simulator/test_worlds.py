"""A hundred thousand events of worlds under faults: what must always be true was, and everything came to its end.
The seeds are fixed, so that a run can be repeated; `make simulate SEED=N` has other worlds. A fault that a world finds
gets a test of its own in tests/orchestrator/core: with the next change of worlds its seed is another world.
"""

from tests.simulator.campaign import campaign
from tests.simulator.world import Simulation


def test_a_hundred_thousand_events_break_no_law():
    found = campaign(1_000, 100_000)
    assert not found.violations, found.violations
    assert len(found.faults) >= 20, "hardly any kind of fault was injected"


def test_the_same_seed_gives_the_same_world():
    worlds = [Simulation(11), Simulation(11)]
    for world in worlds:
        assert world.run(4_000) is None
    assert worlds[0].store.log == worlds[1].store.log
    assert worlds[0].clock.happened == worlds[1].clock.happened
