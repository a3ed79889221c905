"""Tests of what a machine may lack are skipped there, but never where that was installed for them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_what_is_not_here_skips_a_test_and_fails_it_where_it_has_to_be_here(absent, monkeypatch):
    monkeypatch.delenv("POLYFLEET_TESTS_NEED", raising=False)
    with pytest.raises(pytest.skip.Exception, match="strace is not here"):
        absent("strace", "strace is not here")
    monkeypatch.setenv("POLYFLEET_TESTS_NEED", "postgresql strace")
    with pytest.raises(pytest.skip.Exception):
        absent("mount", "no file system can be mounted here")
    with pytest.raises(pytest.fail.Exception, match="strace is not here; POLYFLEET_TESTS_NEED says"):
        absent("strace", "strace is not here")


def test_the_whole_check_needs_what_it_installs():
    (needed,) = re.findall(r'^export POLYFLEET_TESTS_NEED="(.*)"$', (ROOT / ".ci" / "run").read_text(), re.M)
    asked = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r'\babsent\("(\w+)"', path.read_text())
        if path != Path(__file__)
    }
    assert asked == set(needed.split())
