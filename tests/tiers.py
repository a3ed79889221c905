"""Tiers of tests. Every file of tests belongs to one, by a mark of the whole file:

gate   no mark                          `make test`: every change must pass
full   pytestmark = pytest.mark.full    `make test-all`: slow tests; run before work is called done
chaos  pytestmark = pytest.mark.chaos   `make chaos`: faults injected for a longer time

A file of the second tier may mark single cases `chaos`, which only `make chaos` runs.
"""

import re
from functools import cache
from pathlib import Path

import pytest

GATE, FULL, CHAOS, ANY = TIERS = ("gate", "full", "chaos", "any")
OF_THE_FILE = re.compile(r"^pytestmark = (\[$.*?^\]|[^\n]*$)", re.MULTILINE | re.DOTALL)
TIER = re.compile(r"\bmark\.(full|chaos)\b")
OF_A_CASE = re.compile(r"\bmark\.chaos\b")


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help="update tests/durations.json from this run")
    tiers = (
        "run the files of this tier (default: gate); chaos also runs cases with that mark; files you name always run"
    )
    parser.addoption("--tier", choices=TIERS, default=GATE, help=tiers)


@cache
def tier_of(file: Path) -> str:
    """Read from the text: a file of another tier is not imported."""
    marks = OF_THE_FILE.search(file.read_text())
    tier = TIER.search(marks[1]) if marks else None
    return tier[1] if tier else GATE


@cache
def has_chaos_cases(file: Path) -> bool:
    return OF_A_CASE.search(file.read_text()) is not None


class Tiers:
    """Leaves out files of other tiers before they are imported, and cases for `make chaos`."""

    def __init__(self, config: pytest.Config):
        self._tier: str = config.option.tier
        given = [config.invocation_params.dir / word.split("::")[0] for word in config.args]
        self._named = {path.resolve() for path in given if path.is_file()}

    def pytest_report_header(self) -> str:
        return f"tier: {self._tier} (see tests/tiers.py)"

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        path = collection_path
        if self._tier == ANY or not path.match("test_*.py") or path.resolve() in self._named:
            return None
        if self._tier == CHAOS:
            return None if has_chaos_cases(path) else True
        return None if tier_of(path) == self._tier else True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._tier == ANY:
            return
        parts: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            parts[(item.get_closest_marker("chaos") is not None) == (self._tier == CHAOS)].append(item)
        if parts[False]:
            config.hook.pytest_deselected(items=parts[False])
            items[:] = parts[True]
