"""A fleet for all faults that leave one, and cases on it with their seeds."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers; nothing else is called like them
sys.path.insert(0, str(Path(__file__).parents[1]))

import faults

STORAGE_BYTES = 96 << 20
"""Of the disk that one pool has for its checkpoints, so that it can be filled."""


@pytest.fixture(scope="package")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """None where no file system can be mounted."""
    folder = tmp_path_factory.mktemp("small")
    words = ["mount", "-t", "tmpfs", "-o", f"size={STORAGE_BYTES},mode=700", "tmpfs", str(folder)]
    mounted = subprocess.run(words, capture_output=True, check=False).returncode == 0
    yield folder if mounted else None
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="package")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory, small_disk: Path | None) -> Iterator[faults.Fleet]:
    """POLYFLEET_CHAOS_HISTORY: so many jobs ended there before."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYFLEET_HOME", str(folder))
        patch.setenv("POLYFLEET_KEEP_JOBS", "forever")
        fleet = faults.Fleet(folder, small_disk, int(os.environ.get("POLYFLEET_CHAOS_HISTORY", "0")))
        yield fleet
        fleet.down()


@pytest.fixture
def fleet(shared_fleet: faults.Fleet, monkeypatch: pytest.MonkeyPatch) -> faults.Fleet:
    monkeypatch.setenv("POLYFLEET_HOME", str(shared_fleet.home))
    monkeypatch.setenv("POLYFLEET_KEEP_JOBS", "forever")
    return shared_fleet


@pytest.fixture
def case(fleet: faults.Fleet, tmp_path: Path) -> Callable[..., faults.Case]:
    """`with case("F1", "what is hit", seed) as now:`"""
    return partial(faults.case, fleet, tmp_path)


@pytest.fixture
def own_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], faults.Fleet]]:
    """A fleet for one test, in the environment that it has made by then."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("POLYFLEET_HOME", str(home))
    made = []

    def make() -> faults.Fleet:
        made.append(faults.Fleet(home))
        return made[-1]

    yield make
    for fleet in made:
        fleet.down()


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
