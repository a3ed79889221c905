"""A fleet for all faults that leave one, and cases on it with their seeds."""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers; nothing else is called like them
sys.path.insert(0, str(Path(__file__).parents[1]))

import faults


@pytest.fixture(scope="package")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[faults.Fleet]:
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYFLEET_HOME", str(folder))
        fleet = faults.Fleet(folder)
        yield fleet
        fleet.down()


@pytest.fixture
def fleet(shared_fleet: faults.Fleet, monkeypatch: pytest.MonkeyPatch) -> faults.Fleet:
    monkeypatch.setenv("POLYFLEET_HOME", str(shared_fleet.home))
    return shared_fleet


@pytest.fixture
def case(fleet: faults.Fleet, tmp_path: Path) -> Callable[..., faults.Case]:
    """`with case("F1", "what is hit", seed) as now:`"""
    return partial(faults.case, fleet, tmp_path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every case is run once for each seed; POLYFLEET_CHAOS_SEEDS says which, as in "1-20" or "7"."""
    if "seed" in metafunc.fixturenames:
        first, _, last = os.environ.get("POLYFLEET_CHAOS_SEEDS", "1").partition("-")
        metafunc.parametrize("seed", range(int(first), int(last or first) + 1))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A connection that a server's end refuses stays open until it is collected (httpcore 1.0, Unix sockets)."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
