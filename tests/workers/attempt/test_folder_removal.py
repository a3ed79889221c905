"""Folders that user code filled are gone, whatever modes it gave them, and nothing outside of them is touched."""

import logging
import os
import stat
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest
from patience import LIMIT_S

from workers.storage import folder_removal


@pytest.fixture
def shared():
    """A folder that any user may enter."""
    path = Path(tempfile.mkdtemp(prefix="pf-removal-"))
    path.chmod(0o777)
    yield path
    subprocess.run(["rm", "-rf", path], check=True)


def removed(folder):
    """`folder` is removed and what was in it, before this returns."""
    folder_removal.remove(folder)
    for thread in threading.enumerate():
        if thread.name == "removal":
            thread.join(LIMIT_S)
    return sorted(path.name for path in folder.parent.iterdir())


def fill_with_closed_folders(folder):
    """As Go's module cache has them, and one that its owner may not even list; a link leads out."""
    outside = folder.with_name("outside")
    outside.mkdir()
    outside.chmod(0o500)
    inner = folder / "mod" / "golang.org@v1" / "deep"
    inner.mkdir(parents=True)
    (inner / "file.go").write_text("package x")
    (folder / "mod" / "out").symlink_to(outside)
    (folder / "unlisted").mkdir()
    (folder / "unlisted" / "file").touch()
    for closed in (inner, inner.parent, folder / "mod"):
        closed.chmod(0o555)
    (folder / "unlisted").chmod(0)
    return outside


def test_folders_that_may_not_be_written_are_removed_by_their_owner(shared, nobody):
    def act():
        outside = fill_with_closed_folders(shared / "j.1.0")
        return removed(shared / "j.1.0"), stat.S_IMODE(outside.stat().st_mode)

    assert nobody.does(act) == [["outside"], 0o500]


def test_what_cannot_be_removed_is_told_in_the_log(shared, nobody):
    """Another user's, below a folder of ours."""
    kept = shared / "j.1.0" / "of-another"
    kept.mkdir(parents=True)
    (kept / "file").touch()
    os.chown(shared / "j.1.0", nobody.uid, nobody.uid)
    told = []

    class Keep(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    def act():
        logging.getLogger(folder_removal.__name__).addHandler(Keep())
        return removed(shared / "j.1.0"), told

    [left], [said] = nobody.does(act)
    assert said.startswith(f"{shared / left} was removed, but this user may not delete some of its files")


def test_a_link_in_the_place_of_a_folder_is_removed_and_not_followed(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").touch()
    (tmp_path / "j.1.0").symlink_to(target)
    assert removed(tmp_path / "j.1.0") == ["target"]
    assert (target / "kept").exists()
