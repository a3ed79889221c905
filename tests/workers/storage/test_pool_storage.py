import os

import pytest

from cluster.errors import NotFound, UserError
from workers.storage.pool_storage import MAX_PIECE_BYTES, PoolStorage


@pytest.fixture
def storage(tmp_path):
    return PoolStorage(tmp_path / "storage")


CLIMBING = ["..", "../x", "a/../../x", "/etc/passwd", "", "a//b", "./a", "a/.", "a\\..\\b", "a\0b", "a/"]


@pytest.mark.parametrize("path", CLIMBING)
def test_a_path_that_could_leave_the_storage_is_refused_everywhere(storage, path):
    for call in (lambda p: storage.read(p, 0, 1), storage.find, storage.make_folder):
        with pytest.raises(UserError, match="is not a path below"):
            call(path)


def test_no_link_is_followed_out_of_the_storage_or_inside_it(storage, tmp_path):
    (tmp_path / "secret").write_text("canary")
    (tmp_path / "outside").mkdir()
    (storage.root / "file").symlink_to(tmp_path / "secret")
    (storage.root / "folder").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError):
        storage.read("file", 0, 100)
    with pytest.raises(UserError):
        storage.read("folder/x", 0, 100)
    for call in (storage.resolve, storage.find, storage.make_folder):
        with pytest.raises(UserError):
            call("folder")
    with pytest.raises(UserError):
        storage.make_folder("folder/below")
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_fifo_is_no_file_and_nobody_waits_for_it(storage):
    os.mkfifo(storage.root / "pipe")
    with pytest.raises(UserError, match="not a regular file"):
        storage.read("pipe", 0, 1)


def test_pieces_are_bounded(storage):
    (storage.root / "a").write_bytes(b"x" * (MAX_PIECE_BYTES + 1))
    assert len(storage.read("a", 0, 1 << 40)) == MAX_PIECE_BYTES


def test_folders_are_made_with_those_above_them(storage):
    made = storage.make_folder("jobs/j/moved")
    assert made == storage.root / "jobs/j/moved"
    assert made.is_dir()
    assert storage.make_folder("jobs/j/moved") == made
    assert storage.find("jobs/j") == storage.root / "jobs/j"


def test_what_is_not_there_is_not_found(storage):
    assert not storage.exists("absent")
    with pytest.raises(NotFound, match="no 'absent' in this pool's storage"):
        storage.read("absent/a", 0, 1)
