"""Which process runs which files of tests, and in what order.

The longest files begin first, by seconds that were measured (tests/durations.json), so that all processes end within a
minute of each other. Files of one group share what is dear to start, such as a fleet, and run in one process.
"""

import json
import os
import random
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
UNKNOWN_S = 1.0
SEED = "POLYFLEET_TESTS_SEED"
GROUPS: dict[str, tuple[str, ...]] = {
    "the shared fleet": tuple(
        f"tests/end_to_end/test_{name}.py"
        for name in ("benchmark", "checkpoints", "exec", "faults", "files", "jobs", "bad_input", "lost_head")
    ),
}


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def group_of(nodeid: str) -> str:
    file = file_of(nodeid)
    return next((group for group, files in GROUPS.items() if file in files), file)


class Schedule:
    """Sorts the tests, unless files are named, and gives them out by groups.

    With POLYFLEET_TESTS_SEED the order is drawn: of groups, of files in a group, of tests in a file but where a module
    says `ORDERED = True`.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._as_named = any((config.invocation_params.dir / file_of(word)).is_file() for word in config.args)
        self._measured: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}

    def pytest_report_header(self) -> str | None:
        return f"order of tests: {SEED}={os.environ[SEED]}" if SEED in os.environ else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._as_named and SEED not in os.environ:
            return
        groups: dict[str, dict[str, list[pytest.Item]]] = {}
        for item in items:
            groups.setdefault(group_of(item.nodeid), {}).setdefault(file_of(item.nodeid), []).append(item)
        if SEED in os.environ:
            chosen = shuffled(groups, random.Random(os.environ[SEED]))
        else:
            chosen = [
                list(groups[name].values()) for name in sorted(groups, key=lambda name: -self._seconds(groups[name]))
            ]
        items[:] = [item for files in chosen for file in files for item in file]

    def _seconds(self, files: dict[str, list[pytest.Item]]) -> float:
        return sum(self._measured.get(file, UNKNOWN_S) for file in files)


def shuffled(groups: dict[str, dict[str, list[pytest.Item]]], chance: random.Random) -> list[list[list[pytest.Item]]]:
    chosen = [list(files.values()) for files in groups.values()]
    chance.shuffle(chosen)
    for files in chosen:
        chance.shuffle(files)
        for items in files:
            if not getattr(items[0].getparent(pytest.Module).obj, "ORDERED", False):  # type: ignore[union-attr]
                chance.shuffle(items)
    return chosen


def write_durations(seconds: dict[str, float]) -> None:
    """Of files that ran; others keep theirs, and those that are gone are dropped."""
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    root = DURATIONS.parents[1]
    kept = {file: s for file, s in (known | seconds).items() if (root / file).exists()}
    DURATIONS.write_text(json.dumps({file: round(kept[file], 1) for file in sorted(kept)}, indent=0) + "\n")


def make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        """Whole groups to one process, in the order of the collection."""

        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return ByGroup(config, log)
