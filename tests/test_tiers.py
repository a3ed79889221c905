"""Every file of tests belongs to one tier, and one command runs each."""

import re
from pathlib import Path

import pytest
import tiers

HERE = Path(__file__).parent
FILES = sorted(HERE.rglob("test_*.py"))
A_MARK = re.compile(r"\bpytest\.mark\.(full|chaos)\b")
A_LIMIT = re.compile(r"\b(timeout|timeout_s)=\d\d|\.(wait|join|result|acquire|communicate)\(\d\d+[,.)]")


def test_every_file_belongs_to_one_tier():
    """A file of the gate has no mark of another tier at all; one of the second may have cases at length for chaos."""
    wrong = []
    for file in FILES:
        marks = set(A_MARK.findall(file.read_text()))
        allowed = {tiers.GATE: set(), tiers.FULL: {"full", "chaos"}, tiers.CHAOS: {"chaos"}}[tiers.tier_of(file)]
        of_the_file = tiers.OF_THE_FILE.search(file.read_text())
        both = of_the_file and len(set(A_MARK.findall(of_the_file[1]))) > 1
        if (marks - allowed and file != Path(__file__)) or both:
            wrong.append(f"{file.relative_to(HERE)}: {sorted(marks)} in a file of {tiers.tier_of(file)}")
    assert not wrong, "\n".join(wrong)


def test_no_call_in_a_test_has_a_limit_of_its_own():
    """The limit of the test, which POLYFLEET_TEST_PATIENCE changes, is the only one: it prints the stacks of all
    processes. A thread, which that limit does not end, waits for `patience.LIMIT_S`."""
    limits = [
        f"{file.relative_to(HERE)}:{number}: {line.strip()}"
        for file in HERE.rglob("*.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if A_LIMIT.search(line)
    ]
    assert not limits, "\n".join(limits)


@pytest.mark.parametrize(
    ("text", "tier"),
    [
        ("import pytest\n", "gate"),
        ("pytestmark = pytest.mark.full\n", "full"),
        ("pytestmark = [pytest.mark.xla, pytest.mark.chaos]\n", "chaos"),
        ("pytestmark = [\n    pytest.mark.full,\n    pytest.mark.xla,\n]\n", "full"),
        ('pytestmark = pytest.mark.xla\n\n\n@pytest.mark.skipif(True, reason="full")\ndef test_a(): ...\n', "gate"),
        ("pytestmark = [\n    pytest.mark.xla,\n]\n\nx = [pytest.mark.full]\n", "gate"),
    ],
)
def test_the_tier_of_a_file_is_read_from_its_text(tmp_path, text, tier):
    file = tmp_path / "test_it.py"
    file.write_text(text)
    assert tiers.tier_of(file) == tier


def test_each_tier_has_files_and_a_command_that_runs_it():
    files = [tiers.tier_of(file) for file in FILES]
    assert min(files.count(tier) for tier in (tiers.GATE, tiers.FULL, tiers.CHAOS)) > 5
    makefile = (HERE.parent / "Makefile").read_text()
    assert dict(re.findall(r"^(test|test-all): RUNS := .*--tier=(\w+)", makefile, re.MULTILINE)) == {
        "test": tiers.GATE,
        "test-all": tiers.FULL,
    }
    assert re.search(r'^phase "tests" .* make test$', (HERE.parent / ".ci" / "run").read_text(), re.MULTILINE)
    campaign = (HERE / "chaos" / "campaign.py").read_text()
    assert f"--tier={tiers.CHAOS}" in campaign and f"--tier={tiers.ANY}" in campaign
