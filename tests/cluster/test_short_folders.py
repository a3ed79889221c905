"""Folders whose paths leave room for sockets."""

import tempfile
from pathlib import Path

import pytest

from cluster import paths


@pytest.mark.parametrize(("place", "taken"), [("s", True), ("l" * 40, False)], ids=["short", "long"])
def test_a_short_folder_lies_in_the_temporary_folder_that_is_named_unless_that_is_long(monkeypatch, place, taken):
    with tempfile.TemporaryDirectory(prefix=place, dir="/tmp") as named:
        assert (len(named) <= paths.MAX_TEMPORARY_LENGTH) is taken
        monkeypatch.setattr(tempfile, "tempdir", named)
        made = paths.make_short_folder("pf-")
        assert made.parent == (Path(named) if taken else Path("/tmp"))
        assert made.stat().st_mode & 0o777 == 0o700
        made.rmdir()
