"""Files of tests are rewritten once in a new checkout: what one process stores is what pytest reads in the others."""

import importlib.util
import sys
from pathlib import Path

import pytest
import rewriting
import tiers


@pytest.fixture
def stored(tmp_path, monkeypatch, request):
    """A file of tests that was rewritten ahead."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "test_it.py"
    file.write_text("def test_it():\n    assert [1, 2] == [1, 3]\n")
    rewriting.rewrite_file(file, request.config)
    return file


def test_pytest_reads_what_was_rewritten_ahead_and_does_not_write_it_again(stored, request):
    before = rewriting.stored_at(stored).stat()
    hook = rewriting.rewrite.AssertionRewritingHook(request.config)
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("test_it", stored, loader=hook))
    hook.exec_module(module)
    after = rewriting.stored_at(stored).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with pytest.raises(AssertionError, match="At index 1 diff"):
        module.test_it()


def test_a_file_that_changed_is_rewritten_and_one_that_did_not_is_left(stored, request):
    before = rewriting.stored_at(stored).stat().st_ino
    rewriting.rewrite_file(stored, request.config)
    assert rewriting.stored_at(stored).stat().st_ino == before
    stored.write_text("def test_it():\n    assert 2 == 3\n")
    rewriting.rewrite_file(stored, request.config)
    assert rewriting.stored_at(stored).stat().st_ino != before


def test_each_file_is_rewritten_by_one_process():
    paths = [Path(f"test_{n}.py") for n in range(8)]
    shares = [rewriting.share(paths, f"gw{n}", 3) for n in range(3)]
    assert sorted(path for each in shares for path in each) == paths
    assert {len(each) for each in shares} == {2, 3}


def test_files_of_other_tiers_are_not_rewritten(tmp_path, request):
    (tmp_path / "test_slow.py").write_text(f"import pytest\npytestmark = pytest.mark.{tiers.FULL}\n")
    (tmp_path / "test_quick.py").write_text("def test_it(): pass\n")
    (tmp_path / "helper.py").write_text("")
    found = {tier: [] for tier in ("gate", "full", "any")}
    for tier, names in found.items():
        config = pytest.Config.fromdictargs({"tier": tier}, [str(tmp_path)])
        config.option.tier = tier
        names += [path.name for path in rewriting.files(config)]
    assert found == {"gate": ["test_quick.py"], "full": ["test_slow.py"], "any": ["test_quick.py", "test_slow.py"]}
