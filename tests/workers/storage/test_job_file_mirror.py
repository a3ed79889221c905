"""Files of jobs in a pool whose storage is an object store: uploaded, downloaded elsewhere, removed.

The store is fsspec's in memory, so tools run in this process; test_stored_files_over_http.py has S3 and children.
"""

import json
import os
import shutil
import threading
import time

import pytest
from memory_store import memory_store
from patience import LIMIT_S

from cluster.errors import Conflict, FleetError
from cluster.input.folder_access import PIECE_BYTES, FolderTree, digest
from workers.checkpoint.tools import run
from workers.checkpoint.transfer import stores
from workers.storage.job_file_mirror import JobFileMirror
from workers.storage.job_files import JobFiles
from workers.storage.pool_storage import PoolStorage

URI = "memory://bucket/runs"


@pytest.fixture
def memory(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    with memory_store(monkeypatch) as files:
        yield files


@pytest.fixture
def node(memory, tmp_path):
    """node(name, *ended): the mirror of a node with a disk of its own, on which the attempts `ended` have ended."""

    def make(name, *ended, tool=run):
        return JobFileMirror(PoolStorage(tmp_path / name), name, URI, lambda: ended, tool)

    return make


def write(mirror, epoch, files, job="j"):
    folder = mirror._storage.make_folder(f"{job}/output-{epoch}")
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def restore(mirror, origin="a", floor=1, job="j"):
    reply = mirror.restore(job, origin, floor, LIMIT_S)
    return mirror._storage.root / job / f"output-{reply['epoch']}" if reply["epoch"] else None


def objects(memory):
    return sorted(path.removeprefix("/bucket/runs/.files/") for path in memory.store)


def test_files_of_an_ended_attempt_come_back_on_another_node_as_they_were(node, memory):
    a, b = node("a", ("j", 1)), node("b")
    files = {"x": b"1" * (PIECE_BYTES + 5), "sub/y": b"", "sub/z": b"2"}
    folder = write(a, 1, files)
    (folder / "sub/run.sh").write_bytes(b"#!/bin/sh")
    (folder / "sub/run.sh").chmod(0o755)
    (folder / "latest").symlink_to("sub/z")
    (folder / "empty").mkdir()
    os.utime(folder / "x", (7.0, 7.0))
    a.upload_due()
    assert a.findings() == () and a.pending_uploads == 0
    back = restore(b)
    assert content(back) == content(folder) and (back / "empty").is_dir()
    assert str((back / "latest").readlink()) == "sub/z" and os.access(back / "sub/run.sh", os.X_OK)
    assert (back / "x").stat().st_mtime == 7.0
    assert b.origin("j", 1) == {"origin": "a", "missing": ""} and list((b._storage.root / ".uploads").iterdir()) == []


def test_what_still_runs_or_is_empty_is_not_uploaded(node, memory):
    a = node("a", ("empty", 1))
    write(a, 1, {"x": b"1"}, "runs")
    write(a, 1, {}, "empty")
    a.upload_due()
    assert objects(memory) == [] and a.pending_uploads == 0


def test_a_restarted_agent_uploads_nothing_again_but_what_a_client_changed_since(node, memory):
    a = node("a", ("j", 1))
    folder = write(a, 1, {"x": b"1"})
    a.upload_due()
    memory.store.clear()
    node("a", ("j", 1)).upload_due()
    assert objects(memory) == []
    (folder / "x").write_bytes(b"2")
    node("a", ("j", 1)).mark_changed("j", 1)
    restarted = node("a", ("j", 1))
    restarted.upload_due()
    assert content(restore(node("b"))) == {"x": b"2"}


def test_a_change_of_a_downloaded_folder_is_uploaded_also_after_a_restart(node, memory):
    a, b = node("a", ("j", 1)), node("b")
    write(a, 1, {"x": b"1"})
    a.upload_due()
    (restore(b) / "x").write_bytes(b"2")
    b.mark_changed("j", 1)
    node("b").upload_due()
    node("b").upload_due()
    assert content(restore(node("c"))) == {"x": b"2"}


def test_of_nodes_that_share_a_folder_each_uploads_it_when_its_own_part_has_ended(node, memory, tmp_path):
    storage, uploads = PoolStorage(tmp_path / "shared"), []

    def tool(verb, arguments, progress=None):
        uploads.append(arguments["node"])
        return run(verb, arguments, progress)

    a, b = (JobFileMirror(storage, name, URI, lambda: [("j", 1)], tool) for name in "ab")
    folder = write(a, 1, {"x": b"1"})
    a.upload_due()
    (folder / "y").write_bytes(b"2")
    b.upload_due()
    for one in (a, b):
        one.upload_due()
    JobFileMirror(storage, "b", URI, lambda: [("j", 1)], tool).upload_due()
    assert [one.origin("j", 1)["origin"] for one in (a, b)] == ["", ""], "it was not downloaded"
    assert uploads == ["a", "a"] and content(restore(node("c"))) == {"x": b"1", "y": b"2"}


def test_objects_that_a_newer_index_does_not_name_are_removed_and_so_are_older_attempts(node, memory):
    a = node("a", ("j", 1))
    folder = write(a, 1, {"x": b"1", "y": b"2"})
    a.upload_due()
    (folder / "x").write_bytes(b"3")
    a.mark_changed("j", 1)
    a.upload_due()
    assert objects(memory) == sorted(f"j/output-1/a/{n}" for n in ("FILES.json", digest(b"2"), digest(b"3")))
    b = node("b", ("j", 2))
    write(b, 2, {"x": b"4"})
    b.upload_due()
    assert objects(memory) == sorted(f"j/output-2/b/{n}" for n in ("FILES.json", digest(b"4")))


def test_an_interrupted_upload_is_not_visible_and_continues(node, memory, monkeypatch):
    a, written = node("a", ("j", 1)), []
    write(a, 1, {str(number): bytes([number]) for number in range(9)})
    real = stores.ObjectStore.write

    def limited(self, name, parts):
        if len(written) == 5:
            raise FleetError("the network is down")
        written.append(name)
        real(self, name, parts)

    monkeypatch.setattr(stores.ObjectStore, "write", limited)
    a.upload_due()
    assert "files of jobs are not uploaded to memory://bucket/runs: the network is down" in a.findings()[0].message
    assert a.pending_uploads == 1 and restore(node("b")) is None
    before = set(objects(memory))
    assert 0 < len(before) <= 5
    a.upload_due()
    assert a.pending_uploads == 1 and a.findings(), "it waits before the next try"
    monkeypatch.setattr(stores.ObjectStore, "write", lambda self, name, parts: (written.append(name), real(self, name, parts)))  # fmt: skip  # noqa: E501
    a._retry_s.clear()
    written.clear()
    a.upload_due()
    assert len(written) == 10 - len(before) and before < set(objects(memory)), "only what is missing, and the index"
    assert a.findings() == () and a.pending_uploads == 0 and len(content(restore(node("c")))) == 9


def test_the_index_is_written_after_all_pieces(node, memory, monkeypatch):
    a, written = node("a", ("j", 1)), []
    write(a, 1, {"x": b"1", "y": b"2"})
    real = stores.ObjectStore.write
    monkeypatch.setattr(stores.ObjectStore, "write", lambda self, name, parts: (real(self, name, parts), written.append(name)))  # fmt: skip  # noqa: E501
    a.upload_due()
    assert set(written) == {"FILES.json", digest(b"1"), digest(b"2")} and written[-1] == "FILES.json"


def test_an_object_that_was_damaged_or_lost_is_refused_and_nothing_of_it_is_used(node, memory):
    a, b = node("a", ("j", 1)), node("b")
    write(a, 1, {"x": b"1" * 100})
    a.upload_due()
    path = f"/bucket/runs/.files/j/output-1/a/{digest(b'1' * 100)}"
    memory.pipe({path: b"2" * 100})
    with pytest.raises(FleetError, match=r"'x' in .* is damaged: its bytes differ"):
        restore(b)
    memory.rm_file(path)
    with pytest.raises(FleetError, match=r"'x' in .* is damaged: .* does not exist"):
        restore(b)
    assert b._files.newest("j")["epoch"] == 0
    memory.pipe({path: b"1" * 100})
    assert content(restore(b)) == {"x": b"1" * 100}, "and the next try continues"


@pytest.mark.parametrize(
    "entry",
    [
        {"path": "../x"},
        {"path": "/x"},
        {"path": "l", "type": "link", "target": "../../x", "bytes": 0, "pieces": []},
        {"type": "other"},
        {"pieces": ["../../../j/output-1/a/x"]},
        {"pieces": []},
        {"bytes": -1, "pieces": []},
        {"modified_s": "nan"},
    ],
)
def test_an_index_that_somebody_else_wrote_is_not_believed(node, memory, entry, tmp_path):
    a, b = node("a", ("j", 1)), node("b")
    write(a, 1, {"x": b"1"})
    a.upload_due()
    path = "/bucket/runs/.files/j/output-1/a/FILES.json"
    index = json.loads(memory.cat_file(path))
    index["entries"][0] |= entry
    memory.pipe({path: json.dumps(index).encode()})
    with pytest.raises(FleetError, match="is not an index of files"):
        restore(b)
    assert b._files.newest("j")["epoch"] == 0 and not (tmp_path / "x").exists()


def test_links_that_leave_the_folder_and_pipes_are_left_out_and_named(node, memory):
    a, b = node("a", ("j", 1)), node("b")
    folder = write(a, 1, {"x": b"1"})
    (folder / "passwords").symlink_to("/etc/passwd")
    (folder / "up").symlink_to("../..")
    os.mkfifo(folder / "pipe")
    a.upload_due()
    assert a.findings() == ()
    back = restore(b)
    assert [path.name for path in back.iterdir()] == ["x"]
    missing = b.origin("j", 1)["missing"]
    assert missing.startswith("3 of its files were not uploaded, such as 'passwords': ")
    assert not any(b"root:" in memory.cat_file(path) for path in memory.store)


def test_a_file_that_becomes_a_link_during_the_upload_is_not_followed(node, memory, tmp_path):
    (tmp_path / "secret").write_bytes(b"hunter2")
    a = node("a", ("j", 1))
    folder = write(a, 1, {"x": b"1", "d/y": b"2"})

    def swap(verb, arguments, progress=None):
        real = FolderTree.all_entries

        def listed(self, path=""):
            entries = list(real(self, path))
            (folder / "x").unlink()
            (folder / "x").symlink_to(tmp_path / "secret")
            return iter(entries)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FolderTree, "all_entries", listed)
            return run(verb, arguments, progress)

    a._run = swap
    a.upload_due()
    assert "'x' is a link" in a.findings()[0].message
    assert not any(b"hunter2" in memory.cat_file(path) for path in memory.store)


def test_a_file_that_changes_during_the_upload_is_uploaded_again(node, memory):
    a = node("a", ("j", 1))
    folder = write(a, 1, {"x": b"1" * (2 * PIECE_BYTES)})

    def changing(verb, arguments, progress=None):
        return run(verb, arguments, lambda done, total: (folder / "x").write_bytes(b"2" * (2 * PIECE_BYTES)))

    a._run = changing
    a.upload_due()
    assert "'x' changed while it was uploaded" in a.findings()[0].message
    a._run = run
    a._retry_s.clear()
    a.upload_due()
    assert content(restore(node("b"))) == {"x": b"2" * (2 * PIECE_BYTES)}


def test_a_change_during_the_upload_has_the_folder_uploaded_again(node, memory):
    a = node("a", ("j", 1))
    folder = write(a, 1, {"x": b"1"})

    def tool(verb, arguments, progress=None):
        result = run(verb, arguments, progress)
        if (folder / "x").read_bytes() == b"1":
            (folder / "x").write_bytes(b"2")
            a.mark_changed("j", 1)
        return result

    a._run = tool
    a.upload_due()
    a.upload_due()
    assert content(restore(node("b"))) == {"x": b"2"}


def test_a_folder_that_the_next_attempt_took_over_is_no_problem(node, memory):
    a = node("a", ("j", 1))

    def tool(verb, arguments, progress=None):
        JobFiles(a._storage).rename("j", 1, 2)
        return run(verb, arguments, progress)

    a._run = tool
    write(a, 1, {"x": b"1"})
    a.upload_due()
    assert a.findings() == () and a.pending_uploads == 0 and restore(node("b")) is None


def test_a_downloaded_folder_that_a_client_changes_stays_one_folder_in_the_store(node, memory):
    a, b = node("a", ("j", 1)), node("b")
    write(a, 1, {"x": b"1"})
    a.upload_due()
    (restore(b) / "y").write_bytes(b"2")
    b.mark_changed("j", 1)
    b.upload_due()
    assert content(restore(node("c"))) == {"x": b"1", "y": b"2"} and b.origin("j", 1)["origin"] == "a"
    assert {path.split("/")[2] for path in objects(memory)} == {"a"}


def test_only_attempts_that_count_are_downloaded_and_each_node_holds_one_folder_of_a_job(node, memory):
    a, other, c = node("a", ("j", 3)), node("b", ("j", 3)), node("c")
    write(a, 3, {"x": b"a"})
    write(other, 3, {"x": b"b"})
    a.upload_due()
    other.upload_due()
    assert restore(c, floor=4) is None and restore(c, "nobody", 3) is None
    assert content(restore(c, "a", 3)) == {"x": b"a"}
    with pytest.raises(Conflict, match="node c has other files of j"):
        restore(c, "b", 3)
    assert content(restore(node("d"), "b", 3)) == {"x": b"b"}


def test_a_node_that_lost_its_disk_gets_its_own_files_back_and_one_that_left_none_asks_no_store(node, memory):
    a = node("a", ("j", 1), ("nothing", 1))
    write(a, 1, {"x": b"1"})
    a.upload_due()
    shutil.rmtree(a._storage.root / "j")
    assert content(restore(a)) == {"x": b"1"} and a.origin("j", 1)["origin"] == ""

    def tool(verb, arguments, progress=None):
        raise FleetError("the store was called")

    a._run = tool
    assert restore(a, job="nothing") is None
    with pytest.raises(FleetError, match="the store was called"):
        restore(node("b", tool=tool))


def test_what_is_removed_is_removed_from_the_store_also_by_another_node_and_after_a_restart(node, memory):
    a, b = node("a", ("j", 1), ("k", 1)), node("b")
    write(a, 1, {"x": b"1"})
    write(a, 1, {"x": b"1"}, "k")
    a.upload_due()
    b.remove("j", 1)
    restarted = node("b")
    assert restarted.pending_uploads == 1
    restarted.upload_due()
    assert {path.partition("/")[0] for path in objects(memory)} == {"k"} and restarted.pending_uploads == 0
    assert restarted._records.all() == {}
    restarted.remove("k", 0)
    restarted.upload_due()
    assert {path.partition("/")[0] for path in objects(memory)} == {"k"}, "attempt 1 is newer"


def test_a_removal_that_fails_is_a_finding_and_is_tried_again(node, memory):
    a = node("a", ("j", 1))
    write(a, 1, {"x": b"1"})
    a.upload_due()
    a.remove("j", 1)
    broken = [True]

    def tool(verb, arguments, progress=None):
        if broken:
            raise FleetError("the network is down")
        return run(verb, arguments, progress)

    a._run = tool
    a.upload_due()
    assert "files of jobs are not removed from memory://bucket/runs: the network is down" in a.findings()[0].message
    broken.clear()
    a._retry_s.clear()
    a.upload_due()
    assert objects(memory) == [] and a.findings() == ()


def test_a_download_goes_on_while_nobody_waits_and_says_how_far_it_is(node, memory):
    a = node("a", ("j", 1))
    write(a, 1, {"x": b"1" * 10, "y": b"2" * 10})
    a.upload_due()
    reached, go_on = threading.Event(), threading.Event()

    def tool(verb, arguments, progress=None):
        def hold(done, total):
            progress(done, total)
            reached.set()
            assert go_on.wait(LIMIT_S)

        return run(verb, arguments, hold if verb == "fetch_files" else None)

    b = node("b", tool=tool)
    assert b.restore("j", "a", 1, 0.0)["epoch"] is None
    assert reached.wait(LIMIT_S)
    assert b.restore("j", "a", 1, 0.0)["progress"][1] == 20
    with pytest.raises(Conflict, match="node b has other files of j"):
        b.restore("j", "another", 1, 0.0)
    go_on.set()
    deadline_s = time.monotonic() + LIMIT_S
    while b._files.newest("j")["epoch"] != 1 and time.monotonic() < deadline_s:
        b.restore("j", "a", 1, 1.0)
    assert len(content(b._storage.root / "j/output-1")) == 2


def test_a_search_that_has_not_ended_counts_as_an_upload(memory, tmp_path):
    """Else an autoscaler could take the node between the end of an attempt and the count of its files."""
    counts = []

    def ended():
        counts.append(mirror.pending_uploads)
        return ()

    mirror = JobFileMirror(PoolStorage(tmp_path / "a"), "a", URI, ended, run)
    for _ in range(2):
        mirror.upload_due()
        counts.append(mirror.pending_uploads)
        mirror.search_now()
    assert counts == [1, 0, 1, 0] and mirror.pending_uploads == 1
