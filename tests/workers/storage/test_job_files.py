"""A job's folder in a pool's storage: which one counts, how it changes hands, and what a client adds to it."""

import os

import pytest

from cluster.errors import Conflict, NotFound, UserError
from cluster.input.folder_access import FolderTree, digest
from workers.storage.job_files import JobFiles
from workers.storage.pool_storage import PoolStorage

UP = "0123456789abcdef"


@pytest.fixture
def storage(tmp_path):
    return PoolStorage(tmp_path / "storage")


@pytest.fixture
def files(storage):
    return JobFiles(storage)


def wrote(storage, epoch, name="a", text="1", job="j"):
    folder = storage.root / job / f"output-{epoch}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder


def sent(files, path, data, end=True):
    whole = {"bytes": len(data), "modified_s": 1.0, "mode": 0o644} if end else None
    files.write(UP, path, 0, data, digest(data), whole)


def test_the_folder_of_the_newest_attempt_counts(files, storage):
    assert files.newest("j")["epoch"] == 0
    wrote(storage, 2)
    wrote(storage, 11)
    (storage.root / "j/output-12").symlink_to(storage.root)
    (storage.root / "j/output-13").write_text("a file")
    assert files.newest("j") == {"epoch": 11, "storage": files.identity()}


def test_nodes_of_one_storage_tell_the_same_name_of_it_and_others_another(files, storage, tmp_path):
    assert JobFiles(PoolStorage(storage.root)).identity() == files.identity()
    assert JobFiles(PoolStorage(tmp_path / "other")).identity() != files.identity()


def test_the_next_attempt_takes_the_folder_over_and_who_holds_the_old_path_finds_nothing(files, storage):
    old = wrote(storage, 1)
    files.rename("j", 1, 2)
    files.rename("j", 1, 2)
    assert (storage.root / "j/output-2/a").read_text() == "1"
    with pytest.raises(FileNotFoundError):
        (old / "late").write_text("of an attempt that was replaced")
    with pytest.raises(NotFound):
        files.rename("j", 1, 3)


def test_a_copy_counts_once_it_is_whole(files, storage):
    files.begin(UP)
    sent(files, "a/b", b"12")
    files.write_others(UP, [{"type": "folder", "path": "e"}, {"type": "link", "path": "l", "target": "a/b"}])
    sent(files, "stale", b"x")
    assert files.newest("j")["epoch"] == 0
    files.keep_only(UP, ["a/b", "l"])
    files.adopt_upload(UP, "j", 4)
    there = storage.root / "j/output-4"
    assert {p.name for p in there.iterdir()} == {"a", "e", "l"} and (there / "l").read_text() == "12"
    files.begin(UP)
    files.adopt_upload(UP, "j", 4)
    assert files.newest("j")["epoch"] == 4


def test_what_an_earlier_try_sent_is_told_and_a_damaged_piece_is_refused(files):
    assert files.begin(UP) == {}
    sent(files, "f", b"123", end=False)
    assert files.begin(UP) == {"f": 3}
    with pytest.raises(UserError, match="arrived damaged"):
        files.write(UP, "f", 0, b"124", digest(b"123"), None)
    files.discard(UP)
    assert files.begin(UP) == {}


@pytest.mark.parametrize("upload", ["", "short", "../../etc", "UPPERCASE", "a" * 65, "with/slash"])
def test_an_upload_has_an_id_and_no_path(files, upload):
    with pytest.raises(UserError, match="is not an upload's id"):
        files.begin(upload)


def test_files_are_put_where_none_is_or_with_force_and_never_over_those_of_a_running_job(files, storage):
    there = wrote(storage, 1, "model.pt", "theirs")
    files.begin(UP)

    def put(new, running=False, force=False):
        sent(files, "mine", b"mine")
        return files.put(UP, [["mine", new]], "j", 1, running, force)

    assert put("d/new", running=True) == ["d/new"]
    for running, force, why in ((False, False, "--force"), (True, False, "running job"), (True, True, "running job")):
        with pytest.raises(Conflict, match=why):
            put("model.pt", running, force)
        assert (there / "model.pt").read_text() == "theirs"
    put("model.pt", force=True)
    assert (there / "model.pt").read_text() == "mine"
    put("model.pt", running=True)  # the same is there
    (there / "folder").mkdir()
    with pytest.raises(Conflict):
        put("folder", force=True)


def test_a_removed_job_leaves_nothing_and_its_checkpoints_stay(files, storage):
    wrote(storage, 1)
    wrote(storage, 2)
    (storage.root / "j/step-00000001-abcdef01").mkdir()
    files.remove("j", 2)
    assert os.listdir(storage.root / "j") == ["step-00000001-abcdef01"]  # noqa: PTH208
    wrote(storage, 1, job="k")
    files.remove("k", 1)
    assert not (storage.root / "k").exists()
    files.remove("absent", 1)


def test_sizes_are_of_the_folder_that_counts_of_each_job(files, storage):
    wrote(storage, 1, text="1234")
    wrote(storage, 3, text="12345")
    wrote(storage, 1, text="12", job="k")
    (storage.root / "l").mkdir()
    assert files.sizes() == {"j": 5, "k": 2}


def test_what_was_sent_and_never_placed_goes_after_a_week(files, storage):
    files.begin(UP)
    sent(files, "f", b"1")
    os.utime(storage.root / ".uploads" / UP, (1, 1))
    files.begin("another-upload")
    assert not (storage.root / ".uploads" / UP).exists()


def test_a_folder_in_place_of_an_upload_is_no_way_out(files, storage, tmp_path):
    (tmp_path / "outside").mkdir()
    (storage.root / ".uploads").mkdir()
    (storage.root / ".uploads" / UP).symlink_to(tmp_path / "outside")
    with pytest.raises(UserError):
        files.begin(UP)
    with pytest.raises(UserError):
        sent(files, "f", b"1")
    assert list((tmp_path / "outside").iterdir()) == []
    assert FolderTree(storage.root).exists(".uploads")
