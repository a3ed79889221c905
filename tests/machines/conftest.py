"""Three machines for these tests, without faults at the start of each."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers; nothing else is called like them
sys.path.insert(0, str(Path(__file__).parents[1]))

from bed import Bed, missing, refused


@pytest.fixture(scope="package")
def shared_bed(tmp_path_factory: pytest.TempPathFactory, absent: Callable[[str, str], None]) -> Iterator[Bed]:
    if why := missing():
        absent("machines", why)
    if why := refused():
        pytest.skip(why)
    made = Bed(tmp_path_factory.mktemp("bed"))
    yield made
    made.close()


@pytest.fixture
def bed(shared_bed: Bed) -> Iterator[Bed]:
    """All machines are up, and nothing is wrong with them, before and after."""
    yield shared_bed
    shared_bed.heal()
    for machine in shared_bed.machines.values():
        if not machine.is_up:
            machine.boot()
