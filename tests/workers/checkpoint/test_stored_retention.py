"""Checkpoints of a pool in an object store that expire, are pruned, pinned or held. The store is fsspec's in memory."""

import time

import pytest
from memory_store import memory_store

from cluster.errors import NotFound, UserError
from workers.checkpoint.transfer import stored_marks
from workers.checkpoint.transfer.copier import copy, verify_location
from workers.checkpoint.transfer.object_store import open_objects
from workers.checkpoint.transfer.stored_checkpoints import stage, stored
from workers.checkpoint.transfer.stored_marks import HOLD, HOLD_S, hold_objects
from workers.checkpoint.transfer.stored_retention import pin_stored, prune_stored, retain
from workers.errors import CheckpointError

ROOT = "memory://bucket/runs/j"


@pytest.fixture
def memory(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    with memory_store(monkeypatch) as files:
        yield files


@pytest.fixture
def put(memory, tmp_path):
    """put(1, 2, …): saves these steps and uploads them. Returns their names."""
    save = pytest.importorskip("workers.checkpoint").save
    torch = pytest.importorskip("torch")

    def uploaded(step):
        path = save(tmp_path / "disk", step, {"t": {"w": torch.full((99,), float(step))}}, keep=99).path
        copy(path, ROOT)
        return path.name

    return lambda *steps: [uploaded(step) for step in steps]


def listed():
    return [path.partition("-")[2][:8].lstrip("0") for path in stored(ROOT)["paths"]]


def objects(memory):
    return {path.split("/")[4] for path in memory.store}


def test_prune_leaves_the_newest_and_deletes_every_object_of_the_others(put, memory):
    names = put(1, 2, 3)
    result = prune_stored(ROOT, 2)
    assert (result["kept"], result["deleted"]) == ([names[2], names[1]], [names[0]])
    assert result["bytes"] > 0 and objects(memory) == set(names[1:])


def test_a_dry_run_says_the_same_and_deletes_nothing(put, memory):
    put(1, 2)
    before = dict(memory.store)
    planned = prune_stored(ROOT, 1, dry_run=True)
    assert memory.store == before
    assert prune_stored(ROOT, 1) == planned | {"dry_run": False}


def test_what_is_pinned_stays_and_is_not_counted_until_it_is_unpinned(put):
    names = put(1, 2, 3)
    pin_stored(f"{ROOT}/{names[0]}")
    assert stored(ROOT)["pinned"] == [names[0]]
    prune_stored(ROOT, 1)
    assert retain(ROOT, 1, names[2]) == {"deleted": []} and listed() == ["1", "3"]
    pin_stored(f"{ROOT}/{names[0]}", remove=True)
    prune_stored(ROOT, 1)
    assert listed() == ["3"]


def test_what_is_downloaded_now_stays_until_the_download_has_ended(put, tmp_path):
    names = put(1, 2)
    seen = []

    def progress(done, total):
        seen.append(prune_stored(ROOT, 1)["deleted"])

    stage(f"{ROOT}/{names[0]}", str(tmp_path / "staged"), progress)
    assert seen and not any(seen)
    assert prune_stored(ROOT, 1)["deleted"] == [names[0]]


@pytest.mark.parametrize("text", ["{old_s:.0f}", "no time", ""])
def test_a_hold_whose_process_was_killed_or_that_is_no_time_protects_nothing(put, memory, text):
    names, old_s = put(1, 2), time.time() - HOLD_S - 1
    memory.pipe({f"/bucket/runs/j/{names[0]}/{HOLD}": text.format(old_s=old_s).encode()})
    assert prune_stored(ROOT, 1)["deleted"] == [names[0]]


def test_a_store_that_may_only_be_read_is_read_without_a_hold(put, memory, tmp_path, monkeypatch):
    names = put(1)

    def refuse(*words, **more):
        raise PermissionError("read only")

    for method in ("_open", "rm_file"):
        monkeypatch.setattr(type(memory), method, refuse)
    with hold_objects(open_objects(f"{ROOT}/{names[0]}"), None) as renew:
        renew(1, 2)


class Killed(BaseException):
    pass


def test_however_far_a_deletion_came_each_checkpoint_is_complete_or_not_listed_and_the_next_prune_ends_it(
    put, memory, monkeypatch
):
    names, steps = put(1, 2, 3), 0
    content = dict(memory.store)
    remove = type(memory).rm_file
    while True:
        memory.store.clear()
        memory.store.update(content)
        left = [steps]

        def dies(self, path, left=left):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            remove(self, path)

        with monkeypatch.context() as patch:
            patch.setattr(type(memory), "rm_file", dies)
            try:
                prune_stored(ROOT, 1)
                break
            except Killed:
                pass
        for path in stored(ROOT)["paths"]:
            assert verify_location(f"{ROOT}/{path}")["ok"]
        assert prune_stored(ROOT, 1)["kept"] == [names[2]]
        assert objects(memory) == {names[2]}, f"after {steps} deletions"
        steps += 1
    assert steps >= 2 * 3, "manifest, shard and mark of two checkpoints"


def test_a_checkpoint_whose_deletion_was_interrupted_can_be_uploaded_again_beside_a_prune(put, memory, tmp_path):
    old, name = put(1, 2)
    memory.rm_file(f"/bucket/runs/j/{name}/MANIFEST.json")
    memory.pipe({f"/bucket/runs/j/{name}/{stored_marks.DELETION}": b"x"})
    deleted = []
    copy(tmp_path / "disk" / name, ROOT, progress=lambda done, total: deleted.extend(prune_stored(ROOT, 9)["deleted"]))
    assert deleted == [] and verify_location(f"{ROOT}/{name}")["ok"]
    assert prune_stored(ROOT, 1)["deleted"] == [old]


def test_damaged_ones_newer_than_the_newest_intact_one_stay_and_do_not_count(put, memory):
    names = put(1, 2, 3)
    (shard,) = (path for path in memory.store if names[2] in path and "shard" in path)
    memory.pipe({shard: bytes(len(memory.cat_file(shard)))})
    result = prune_stored(ROOT, 1)
    assert (result["kept"], result["deleted"]) == ([names[2], names[1]], [names[0]])


def test_nothing_is_deleted_where_none_is_intact_or_none_is_there(put, memory):
    with pytest.raises(NotFound, match=f"no checkpoint in {ROOT}"):
        prune_stored(ROOT, 1)
    put(1)
    with pytest.raises(UserError, match="keep is 0"):
        prune_stored(ROOT, 0)
    shard = next(path for path in memory.store if "shard" in path)
    memory.pipe({shard: b"x"})
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        prune_stored(ROOT, 1)
    assert listed() == ["1"]
