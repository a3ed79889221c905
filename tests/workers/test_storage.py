import os

import pytest

from cluster.errors import Conflict, NotFound, UserError
from workers.storage import LARGEST_PIECE_BYTES, Storage


@pytest.fixture
def storage(tmp_path):
    return Storage(tmp_path / "storage")


def test_a_folder_arrives_in_pieces_and_shows_when_it_is_committed(storage):
    aside = "jobs/j/.incoming-1f"
    assert storage.write(f"{aside}/weights/a.bin", 3, b"def") == 3
    assert storage.write(f"{aside}/weights/a.bin", 0, b"abc") == 3
    assert storage.write(f"{aside}/empty", 0, b"") == 0
    storage.commit(aside, "jobs/j/step-1")
    assert not storage.exists(aside)
    assert storage.list_files("jobs/j/step-1") == [{"path": "empty", "bytes": 0}, {"path": "weights/a.bin", "bytes": 6}]
    assert storage.read("jobs/j/step-1/weights/a.bin", 1, 4) == b"bcde"
    assert storage.read("jobs/j/step-1/weights/a.bin", 6, 4) == b""


def test_a_commit_makes_the_folders_above_its_target(storage):
    storage.write(".incoming-1f/a", 0, b"a")
    storage.commit(".incoming-1f", "new/place/step-1")
    assert storage.read("new/place/step-1/a", 0, 9) == b"a"


def test_a_commit_does_not_replace_what_is_there(storage):
    for name in ("1", "2"):
        storage.write(f".incoming-{name}/a", 0, name.encode())
    storage.commit(".incoming-1", "step-1")
    with pytest.raises(Conflict, match="'step-1' is already there"):
        storage.commit(".incoming-2", "step-1")
    assert storage.read("step-1/a", 0, 9) == b"1"


def test_only_a_folder_set_aside_is_written_to_or_committed(storage):
    storage.write(".incoming-1/a", 0, b"a")
    storage.commit(".incoming-1", "step-1")
    with pytest.raises(UserError, match=r"not below a folder \.incoming-"):
        storage.write("step-1/a", 0, b"changed")
    with pytest.raises(UserError, match="cannot be committed"):
        storage.commit("step-1", "step-2")
    with pytest.raises(NotFound):
        storage.commit(".incoming-absent", "step-2")


CLIMBING = ["..", "../x", "a/../../x", "/etc/passwd", "", "a//b", "./a", "a/.", "a\\..\\b", "a\0b", "a/"]


@pytest.mark.parametrize("path", CLIMBING)
def test_a_path_that_could_leave_the_storage_is_refused_everywhere(storage, path):
    storage.write(".incoming-1/a", 0, b"a")
    calls = [
        lambda: storage.read(path, 0, 1),
        lambda: storage.list_files(path),
        lambda: storage.write(f".incoming-1/{path}", 0, b"") if path else storage.write(path, 0, b""),
        lambda: storage.commit(path, "step-1"),
        lambda: storage.commit(".incoming-1", path),
    ]
    for call in calls:
        with pytest.raises(UserError, match=r"is not a path below|is not below"):
            call()


def test_no_link_is_followed_out_of_the_storage_or_inside_it(storage, tmp_path):
    (tmp_path / "secret").write_text("canary")
    (tmp_path / "outside").mkdir()
    (storage.root / "file").symlink_to(tmp_path / "secret")
    (storage.root / "folder").symlink_to(tmp_path / "outside")
    (storage.root / ".incoming-1").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError):
        storage.read("file", 0, 100)
    with pytest.raises(UserError):
        storage.read("folder/x", 0, 100)
    with pytest.raises(UserError):
        storage.list_files("folder")
    with pytest.raises(UserError):
        storage.resolve("folder")
    with pytest.raises(UserError):
        storage.write(".incoming-1/x", 0, b"x")
    with pytest.raises(UserError):
        storage.commit(".incoming-1", "step-1")
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_folder_with_a_link_in_it_is_not_listed_for_copying(storage, tmp_path):
    (storage.root / "step-1").mkdir()
    (storage.root / "step-1/link").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="'link' is neither a file nor a folder"):
        storage.list_files("step-1")


def test_a_fifo_is_no_file_and_nobody_waits_for_it(storage):
    os.mkfifo(storage.root / "pipe")
    with pytest.raises(UserError, match="not a regular file"):
        storage.read("pipe", 0, 1)


def test_pieces_are_bounded(storage):
    with pytest.raises(UserError, match="send at most"):
        storage.write(".incoming-1/a", 0, b"x" * (LARGEST_PIECE_BYTES + 1))
    storage.write(".incoming-1/a", LARGEST_PIECE_BYTES, b"x")
    assert len(storage.read(".incoming-1/a", 0, 1 << 40)) == LARGEST_PIECE_BYTES


def test_what_is_not_there_is_not_found(storage):
    assert not storage.exists("absent")
    with pytest.raises(NotFound, match="no 'absent' in this pool's storage"):
        storage.read("absent/a", 0, 1)
