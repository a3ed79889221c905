"""A pool whose storage is an object store: what nodes save is uploaded, and what is only there is listed and staged.

The store is fsspec's in memory, so tools run in this process and not in a child; test_stored_over_http.py uses S3.
"""

import shutil
import threading

import pytest
from memory_store import memory_store

from cluster.errors import FleetError, NotFound, SpecError, UserError
from workers.checkpoint.disk.damage_marks import damage_reason, mark_damaged
from workers.checkpoint.disk.pins import pin
from workers.checkpoint.format.step_folders import newest_first
from workers.checkpoint.tools import run
from workers.errors import CheckpointError
from workers.storage.checkpoint_mirror import CheckpointMirror
from workers.storage.pool_storage import PoolStorage

URI = "memory://bucket/runs"
KEEP = {"j": 2}


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """fsspec's store in memory, which only tests may name."""
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    with memory_store(monkeypatch) as files:
        yield files


@pytest.fixture
def node(memory, tmp_path):
    """node(name): the mirror of a node with a disk of its own. Both nodes' stores are one."""
    return lambda name, tool=run: CheckpointMirror(PoolStorage(tmp_path / name), "p", URI, KEEP.get, tool)


@pytest.fixture
def save():
    save = pytest.importorskip("workers.checkpoint").save
    torch = pytest.importorskip("torch")

    def save_on(mirror, step, folder="j"):
        root = mirror._storage.make_folder(folder)
        path = save(root, step, {"t": {"w": torch.full((3_000_000,), float(step))}}).path
        return f"{folder}/{path.name}"

    return save_on


def objects(memory):
    return sorted(path.removeprefix("/bucket/runs/") for path in memory.store)


def test_what_a_node_saves_is_uploaded_once_and_other_nodes_list_it(node, save, memory):
    a, b = node("a"), node("b")
    path = save(a, 1)
    assert b.list("") == [] and b.resolve("j") == {"path": "", "passed_over": []}
    a.upload_due()
    assert f"{path}/MANIFEST.json" in objects(memory)
    memory.store.clear()
    a.upload_due()
    assert objects(memory) == [], "it was uploaded before"


def test_nodes_that_share_a_folder_upload_what_is_in_it_once(node, save):
    uploads = []

    def tool(verb, arguments, progress=None):
        uploads.extend([arguments["source"]] if verb == "copy" else [])
        return run(verb, arguments, progress)

    nodes = [node("a", tool) for _ in range(4)]
    save(nodes[0], 1)
    threads = [threading.Thread(target=one.upload_due) for one in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(uploads) == 1 and [one.findings() for one in nodes] == [()] * 4


def test_what_is_only_in_the_store_is_described_as_on_the_node_that_saved_it(node, save):
    a, b = node("a"), node("b")
    path = save(a, 1)
    a.upload_due()
    (here,), (there,) = a.list(""), b.list("j")
    assert there == here and b.describe(path) == a.describe(path)
    assert b.verify(path)["ok"] and b.resolve("j")["path"] == b.resolve(path)["path"] == path
    b.hold(path)
    with pytest.raises(NotFound, match="no checkpoint 'j/step-00000009-00000000' on this node or in"):
        b.describe("j/step-00000009-00000000")


def test_a_checkpoint_of_the_store_is_staged_bit_by_bit_and_once(node, save, tmp_path):
    a, b = node("a"), node("b")
    path = save(a, 1)
    a.upload_due()
    arguments = {"source": f"{URI}/{path}", "target": str(b._storage.make_folder("j"))}
    assert not run("stage", arguments)["already_there"] and run("stage", arguments)["already_there"]
    for file in (tmp_path / "a" / path).glob("*.*"):
        assert file.name.startswith(".") or file.read_bytes() == (tmp_path / "b" / path / file.name).read_bytes()
    (shard,) = (tmp_path / "b" / path).glob("shard-*")
    shard.write_bytes(b"x")
    mark_damaged(shard.parent, "half of it is gone")
    assert not run("stage", arguments)["already_there"] and not damage_reason(shard.parent)
    assert PoolStorage(tmp_path / "b").exists(path) and b.verify(path)["ok"]


def test_the_newest_of_node_and_store_is_resolved(node, save):
    a, b = node("a"), node("b")
    save(a, 1)
    newest = save(a, 2)
    a.upload_due()
    assert b.resolve("j")["path"] == newest
    own = save(b, 3)
    assert b.resolve("j")["path"] == own and len(b.list("j")) == 3


def test_as_many_as_a_job_keeps_stay_in_the_store_and_copies_that_belong_to_no_job_all(node, save, memory):
    a = node("a")
    paths = [save(a, step) for step in (1, 2, 3)]
    assert len(a.list("j")) == 3, "this save keeps all"
    copies = [save(a, step, "moved") for step in (1, 2, 3)]
    a.upload_due()
    stored = {path.rpartition("/")[0] for path in objects(memory)}
    assert stored == {*paths[1:], *copies}
    assert sorted(row["path"] for row in node("b").list("j")) == paths[1:]


def test_what_was_lost_or_cut_in_the_store_is_passed_over_and_named(node, save, memory):
    a, b = node("a"), node("b")
    old, new = save(a, 1), save(a, 2)
    a.upload_due()
    shard = next(name for name in memory.store if new in name and "shard" in name)
    memory.pipe({shard: b"x"})
    resolved = b.resolve("j")
    assert resolved["path"] == old
    assert resolved["passed_over"][0]["path"] == new and "has 1 bytes" in resolved["passed_over"][0]["reason"]
    memory.rm_file(f"/bucket/runs/{old}/MANIFEST.json")
    with pytest.raises(CheckpointError, match="no checkpoint in memory://bucket/runs/j is sound"):
        b.resolve("j")


def test_bits_that_changed_in_the_store_are_found_and_then_passed_over(node, save, memory):
    a, b = node("a"), node("b")
    old, new = save(a, 1), save(a, 2)
    a.upload_due()
    shard = next(name for name in memory.store if new in name and "shard" in name)
    memory.pipe({shard: bytes(len(memory.cat_file(shard)))})
    assert b.resolve("j")["path"] == new
    with pytest.raises(CheckpointError, match="is not what was saved"):
        b.verify(new)
    assert b.resolve("j")["path"] == old
    with pytest.raises(CheckpointError):
        run("stage", {"source": f"{URI}/{new}", "target": str(b._storage.make_folder("j"))})


def test_an_upload_that_fails_is_a_finding_and_is_tried_again(node, save, memory):
    broken = [True]

    def tool(verb, arguments, progress=None):
        if verb == "copy" and broken:
            raise FleetError("the network is down")
        return run(verb, arguments, progress)

    a = node("a", tool)
    path = save(a, 1)
    a.upload_due()
    assert [(f.subject, f.message) for f in a.findings()] == [
        ("storage", "checkpoints are not uploaded to memory://bucket/runs: the network is down")
    ]
    broken.clear()
    a.upload_due()
    assert objects(memory) == [] and a.findings(), "it waits before the next try"
    a._retry_s.clear()
    a.upload_due()
    assert f"{path}/MANIFEST.json" in objects(memory) and a.findings() == ()


def test_a_store_that_cannot_be_listed_is_a_finding_before_anything_is_saved(node):
    broken = [True]

    def tool(verb, arguments, progress=None):
        if broken:
            raise UserError("s3:// needs the package s3fs", "run pip install s3fs")
        return run(verb, arguments, progress)

    a = node("a", tool)
    a.upload_due()
    assert "s3:// needs the package s3fs; run pip install s3fs" in a.findings()[0].message
    broken.clear()
    a._retry_s.clear()
    a.upload_due()
    assert a.findings() == ()


def test_a_damaged_checkpoint_is_not_uploaded(node, save, memory, tmp_path):
    a = node("a")
    mark_damaged(tmp_path / "a" / save(a, 1), "a bit is wrong")
    a.upload_due()
    assert objects(memory) == [] and a.findings() == ()


def test_a_store_that_does_not_answer_is_an_error_not_an_empty_list(node, save):
    def tool(verb, arguments, progress=None):
        raise FleetError("the network is down")

    a = node("a", tool)
    save(a, 1)
    for call in (a.list, a.resolve):
        with pytest.raises(FleetError, match="the network is down"):
            call("j")


def test_another_store_gets_all_again(node, save, memory, tmp_path):
    a = node("a")
    path = save(a, 1)
    a.upload_due()
    other = CheckpointMirror(PoolStorage(tmp_path / "a"), "p", "memory://bucket/other", KEEP.get, run)
    other.upload_due()
    assert f"/bucket/other/{path}/MANIFEST.json" in memory.store


@pytest.mark.parametrize("uri", ["file:///etc", "s3://user:hunter2@bucket/x", "s3://bucket/../x", "/mnt", "s3://[x]/"])
def test_only_plain_locations_of_stores_without_credentials_are_accepted(tmp_path, uri):
    with pytest.raises(SpecError) as refused:
        CheckpointMirror(PoolStorage(tmp_path), "p", uri)
    assert "hunter2" not in str(refused.value)


def test_names_that_somebody_else_wrote_into_the_store_are_not_believed(node, save, memory):
    a = node("a")
    path = save(a, 1)
    a.upload_due()
    manifest = memory.cat_file(f"/bucket/runs/{path}/MANIFEST.json")
    for folder in ("../x", "j/..", "a\\b", "c\nd"):
        memory.store[f"/bucket/runs/{folder}/step-00000007-0000000a/MANIFEST.json"] = memory.store[
            f"/bucket/runs/{path}/MANIFEST.json"
        ]
    memory.pipe({"/bucket/runs/j/step-00000009-0000000a/MANIFEST.json": b"{" * 100})
    rows = node("b").list("")
    assert {row["path"] for row in rows} == {path, "j/step-00000009-0000000a"} and manifest
    assert [bool(row["problem"]) for row in rows] == [True, False], "newest first"
    assert node("b").resolve("j")["path"] == path


def test_a_folder_that_a_job_named_like_a_pattern_is_refused_and_does_not_stop_others(node, save, memory):
    a = node("a")
    save(a, 1, "what?")
    path = save(a, 1)
    a.upload_due()
    assert {name.rpartition("/")[0] for name in objects(memory)} == {path}
    assert "what?" in a.findings()[0].message


def test_a_checkpoint_that_retention_removes_during_its_upload_is_no_problem(node, save, tmp_path):
    a = node("a")

    def tool(verb, arguments, progress=None):
        if verb == "copy":
            shutil.rmtree(arguments["source"])
            raise FleetError("its files are gone")
        return run(verb, arguments, progress)

    b = node("a", tool)
    save(a, 1)
    b.upload_due()
    assert b.findings() == () and newest_first(tmp_path / "a/j") == []


def test_what_is_not_uploaded_is_counted_until_it_is(node, save, memory, tmp_path):
    broken = [True]

    def tool(verb, arguments, progress=None):
        if verb == "copy" and broken:
            raise FleetError("the network is down")
        return run(verb, arguments, progress)

    a = node("a", tool)
    assert a.pending_uploads == 1, "not counted yet"
    a.upload_due()
    assert a.pending_uploads == 0
    save(a, 1)
    mark_damaged(tmp_path / "a" / save(a, 2), "a bit is wrong")
    save(a, 3, "what?")
    a.search_now()
    assert a.pending_uploads == 1, "an attempt has ended: there may be more"
    save(a, 4)
    a.upload_due()
    assert a.pending_uploads == 2, "neither the damaged one nor that whose name no store accepts"
    broken.clear()
    a._retry_s.clear()
    a.upload_due()
    assert a.pending_uploads == 0


def test_a_pin_that_a_job_set_is_uploaded_with_its_checkpoint(node, save, tmp_path):
    a = node("a")
    path = save(a, 1)
    pin(tmp_path / "a" / path)
    a.upload_due()
    assert [row["pinned"] for row in node("b").list("")] == [True]
    for step in (2, 3, 4):
        save(a, step)
    a.upload_due()
    assert [row["step"] for row in node("b").list("j")] == [4, 3, 1], "and `keep` does not count it"
