"""Data from an object store: listed, fetched, gone on with, and refused where a stranger's names could do harm."""

import pytest
from memory_store import memory_store

from cluster.errors import FleetError, NotFound, UserError
from cluster.host.content_hash import content_of
from workers.checkpoint.transfer import data_download

WHERE = "memory://bucket/data"


@pytest.fixture
def memory(monkeypatch):
    with memory_store(monkeypatch) as files:
        files.pipe({"/bucket/data/a": b"A\n", "/bucket/data/deep/b": bytes(20_000_000), "/bucket/other": b"x"})
        yield files


def fetched(tmp_path, where=WHERE):
    progress = []
    told = data_download.fetch(
        where, str(tmp_path), data_download.look(where)["version"], lambda *n: progress.append(n)
    )
    return told, progress


def test_all_objects_below_a_prefix_arrive_whole(memory, tmp_path):
    told, progress = fetched(tmp_path)
    assert told == {"inner": ""} and progress[-1] == (20_000_002, 20_000_002)
    assert (tmp_path / "a").read_bytes() == b"A\n" and (tmp_path / "deep/b").stat().st_size == 20_000_000
    assert content_of(tmp_path).files == 2


def test_a_single_object_is_named(memory, tmp_path):
    assert fetched(tmp_path, f"{WHERE}/a")[0] == {"inner": "a"} and (tmp_path / "a").read_bytes() == b"A\n"


def test_what_an_earlier_try_brought_is_not_fetched_again_and_half_of_a_file_is_not_believed(memory, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/b").write_bytes(bytes(20_000_000))
    (tmp_path / "half.part").write_bytes(b"A")
    (tmp_path / "gone").write_bytes(b"of an object that was removed since")
    read = []
    cat_file = type(memory).cat_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(memory), "cat_file", lambda self, path, **at: read.append(path) or cat_file(self, path, **at)
        )
        fetched(tmp_path)
    assert read == ["/bucket/data/a"]
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["a", "b"]


def test_what_changes_meanwhile_is_no_version_at_all(memory, tmp_path):
    before = data_download.look(WHERE)
    memory.pipe({"/bucket/data/c": b"C"})
    assert data_download.look(WHERE)["version"] != before["version"]
    with pytest.raises(FleetError, match="has changed since it was listed"):
        data_download.fetch(WHERE, str(tmp_path), before["version"])


def test_nothing_there_is_told(memory):
    with pytest.raises(NotFound, match="nothing is at memory://bucket/absent"):
        data_download.look("memory://bucket/absent")


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "x\\y", "x\ny", "n" * 300])
def test_names_that_could_leave_the_folder_are_refused(memory, name):
    memory.store[f"/bucket/data/{name}"] = memory.store["/bucket/data/a"]
    with pytest.raises(UserError, match="has an object"):
        data_download.look(WHERE)


def test_an_object_that_is_also_a_folder_cannot_be_data(memory):
    memory.store["/bucket/data/a/b"] = memory.store["/bucket/data/a"]
    with pytest.raises(UserError, match="has both an object and a folder"):
        data_download.look(WHERE)


def test_places_that_are_no_object_stores_are_refused():
    for place in ("/etc", "file:///etc/passwd", "memory://bucket/data", "s3://bucket/../x"):
        with pytest.raises(UserError):
            data_download.look(place)


def test_what_a_store_refuses_is_the_users_and_what_else_goes_wrong_is_tried_again(memory, monkeypatch):
    def refuses(*_, **__):
        raise PermissionError("403")

    def breaks(*_, **__):
        raise RuntimeError("connection reset")

    monkeypatch.setattr(type(memory), "find", refuses)
    with pytest.raises(UserError, match="may not be listed: 403"):
        data_download.look(WHERE)
    monkeypatch.setattr(type(memory), "find", breaks)
    with pytest.raises(FleetError, match="RuntimeError: connection reset"):
        data_download.look(WHERE)
