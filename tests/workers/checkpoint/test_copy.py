"""Copies: only what is missing travels, cut anywhere they go on, and the far end is whole or not there at all."""

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cluster.errors import Conflict, NotFound, UserError
from workers.checkpoint import DamagedCheckpoint, copy, describe, list_checkpoints, load, pin, save, verify
from workers.checkpoint.disk.files import PAGE_BYTES, Files
from workers.checkpoint.format.step_folders import checkpoints_below, step_of
from workers.checkpoint.tools import run_in_child
from workers.checkpoint.transfer import stores
from workers.checkpoint.transfer.copier import verify_location
from workers.checkpoint.transfer.object_store import CACHE_AGE_S
from workers.checkpoint.transfer.receiver import CheckpointReceiver
from workers.errors import CheckpointError


def state(step, frozen=2_500_000):
    """About three chunks that never change, and one that does."""
    torch.manual_seed(0)
    return {"t": {"frozen": torch.randn(frozen), "moving": torch.full((9,), float(step))}, "extra": {"step": step}}


@pytest.fixture
def source(tmp_path):
    return save(tmp_path / "source", 1, state(1)).path


def same(a, b):
    names = sorted(path.name for path in a.iterdir())
    return names == sorted(p.name for p in b.iterdir()) and all(
        (a / n).read_bytes() == (b / n).read_bytes() for n in names
    )


def test_a_copy_is_the_same_bits_and_a_second_one_is_nothing_to_do(source, tmp_path):
    told = []
    report = copy(source, tmp_path / "target", progress=lambda *n: told.append(n))
    there = tmp_path / "target" / source.name
    assert same(source, there)
    assert (report["transferred_bytes"], report["already_there"]) == (report["bytes"], False)
    assert told[-1] == (report["bytes"], report["bytes"])
    again = copy(source, tmp_path / "target")
    assert (again["transferred_bytes"], again["already_there"]) == (0, True)


def test_of_a_folder_the_newest_goes_and_only_what_changed_travels(source, tmp_path):
    copy(source, tmp_path / "target")
    save(tmp_path / "source", 2, state(2))
    report = copy(tmp_path / "source", tmp_path / "target")
    assert report["step"] == 2
    assert 0 < report["transferred_bytes"] < report["bytes"]
    assert load(tmp_path / "target").state["t"]["moving"][0] == 2


class Cut(Files):
    """The disk that fails at one operation, or the process that dies there."""

    def __init__(self, left, how="error"):
        self.left, self.how = left, how

    def __getattribute__(self, name):
        operation = super().__getattribute__(name)
        if name not in vars(Files):
            return operation

        def counted(*arguments):
            self.left -= 1
            if self.left < 0 and self.how == "die":
                if name == "write":
                    file, data, _, offset = arguments
                    operation(file, data, len(data) // 3 // PAGE_BYTES * PAGE_BYTES, offset)
                os._exit(9)
            if self.left == -1:
                raise OSError(errno.EIO, "Input/output error")
            return operation(*arguments)

        return counted


@pytest.mark.parametrize("how", ["error", "die"])
def test_cut_at_any_operation_the_target_is_old_or_new_and_the_next_try_goes_on(how, tmp_path):
    source = save(tmp_path / "source", 2, state(2, frozen=2_200_000)).path
    save(tmp_path / "template", 1, {"t": {"old": torch.ones(3)}})
    transferred = []
    for last in range(100):
        target = tmp_path / "target"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(tmp_path / "template", target)
        if how == "error":
            try:
                copy(source, target, files=Cut(last))
                done = True
            except CheckpointError as e:
                assert "Input/output error" in e.message, last
                done = False
        else:
            child = os.fork()
            if child == 0:
                copy(source, target, files=Cut(last, "die"))
                os._exit(0)
            done = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        steps = [row["step"] for row in list_checkpoints(target)]
        assert steps in ([1], [2, 1]), (last, steps)
        assert all(verify(path)["ok"] for path in target.glob("step-*") if (path / "MANIFEST.json").exists()), last
        transferred.append(copy(source, target)["transferred_bytes"])
        assert same(source, target / source.name), last
        assert load(target).step == 2
        if done:
            break
    assert len(transferred) > 8
    assert min(transferred[:-1]) < max(transferred)  # a later cut left more to go on with


@pytest.mark.parametrize("kept", [0, 1, (8 << 20) - 1, 8 << 20, (8 << 20) + 1, -1])
def test_what_arrived_before_a_cut_at_any_byte_is_used(kept, source, tmp_path):
    aside = tmp_path / "target" / f".incoming-{source.name}"
    aside.mkdir(parents=True)
    shard = next(source.glob("*.safetensors"))
    data = shard.read_bytes()
    (aside / shard.name).write_bytes(data[:kept])
    report = copy(source, tmp_path / "target")
    whole_chunks = len(data[:kept]) // (8 << 20)
    assert report["transferred_bytes"] == len(data) - whole_chunks * (8 << 20)
    assert same(source, tmp_path / "target" / source.name)


def test_what_rotted_while_it_waited_travels_again(source, tmp_path):
    aside = tmp_path / "target" / f".incoming-{source.name}"
    shutil.copytree(source, aside)
    shard = next(aside.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(5000)
        file.write(b"?")
    assert copy(source, tmp_path / "target")["transferred_bytes"] == 8 << 20
    assert same(source, tmp_path / "target" / source.name)


def test_a_damaged_source_is_named_and_nothing_appears(source, tmp_path):
    shard = next(source.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek((8 << 20) + 7)
        file.write(b"?")
    with pytest.raises(DamagedCheckpoint, match=r"chunk 2 of 2 is not what was saved"):
        copy(source, tmp_path / "target")
    assert list_checkpoints(tmp_path / "target") == []
    assert verify_location(source)["problems"]


def test_a_copy_that_rotted_is_marked_and_made_good_by_copying_again(source, tmp_path):
    there = Path(copy(source, tmp_path / "target")["target"])
    pin(there)
    with next(there.glob("*.safetensors")).open("r+b") as file:
        file.seek((8 << 20) + 7)
        file.write(b"?")
    assert not run_in_child("verify", {"place": str(there)})["ok"]
    assert "chunk 2 of 2 is not what was saved" in describe(there)["damaged"]
    again = copy(source, tmp_path / "target")
    assert not again["already_there"] and again["transferred_bytes"] < again["bytes"]  # the first chunk was sound
    assert verify(there)["ok"]
    assert (describe(there)["damaged"], describe(there)["pinned"]) == ("", True)


def test_a_pinned_copy_that_is_replaced_stays_pinned_at_whatever_operation_that_was_cut(tmp_path):
    source = save(tmp_path / "source", 1, {"t": torch.ones(9)}).path
    there = Path(copy(source, tmp_path / "template")["target"])
    pin(there)
    with next(there.glob("*.safetensors")).open("r+b") as file:
        file.write(b"?")
    for last in range(100):
        target = tmp_path / f"{last}"
        shutil.copytree(tmp_path / "template", target)
        try:
            copy(source, target, files=Cut(last))
            done = True
        except CheckpointError:
            done = False
        copy(source, target)
        assert verify(target / source.name)["ok"] and describe(target / source.name)["pinned"], last
        if done:
            break
    assert last > 8


def test_another_checkpoint_of_the_same_name_is_not_overwritten(source, tmp_path):
    there = save(tmp_path / "other", 1, {"t": 1}).path
    (tmp_path / "target").mkdir()
    there.rename(tmp_path / "target" / source.name)
    with pytest.raises(DamagedCheckpoint, match="already exists: it is another checkpoint with that name"):
        copy(source, tmp_path / "target")


def test_two_copies_of_one_checkpoint_do_not_meet(source, tmp_path):
    text = (source / "MANIFEST.json").read_bytes()
    with CheckpointReceiver(tmp_path / "target", source.name, text), pytest.raises(Conflict, match="another copy of"):
        copy(source, tmp_path / "target")
    copy(source, tmp_path / "target")


@pytest.fixture
def memory(monkeypatch):
    """fsspec's store in memory, which only tests may name."""
    monkeypatch.setattr(stores, "IN_MEMORY", ("memory",))


@pytest.mark.usefixtures("memory")
def test_an_object_store_gets_the_manifest_last_and_gives_it_back(source, tmp_path):
    import fsspec

    memory = fsspec.filesystem("memory")
    written = []
    opened, memory_open = memory.open, type(memory).open

    def noting(self, path, mode="rb", **options):
        if "w" in mode:
            written.append(Path(path).name)
        return memory_open(self, path, mode, **options)

    type(memory).open = noting
    try:
        report = copy(source, "memory://bucket/runs")
    finally:
        type(memory).open = memory_open
    assert opened is not None
    assert written == ["shard-00001.safetensors", "MANIFEST.json"]
    assert report["transferred_bytes"] == report["bytes"]
    assert copy(source, "memory://bucket/runs")["already_there"]
    assert verify_location("memory://bucket/runs")["ok"]
    memory.rm_file(f"/bucket/runs/{source.name}/MANIFEST.json")  # cut before the last put
    assert copy(source, "memory://bucket/runs")["transferred_bytes"] == 0
    back = copy("memory://bucket/runs", tmp_path / "back")
    assert back["transferred_bytes"] == back["bytes"]
    assert same(source, tmp_path / "back" / source.name)
    memory.pipe_file(f"/bucket/runs/{source.name}/shard-00001.safetensors", b"rubbish")
    assert not verify_location(f"memory://bucket/runs/{source.name}")["ok"]
    with pytest.raises(DamagedCheckpoint):
        copy(f"memory://bucket/runs/{source.name}", tmp_path / "again")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("http://example.com/x", "has the scheme 'http'"),
        ("simplecache::s3://b/x", "has the scheme 'simplecache::s3'"),
        ("ssh://host/x", "has the scheme 'ssh'"),
        ("s3://key@bucket/x", "is not a plain location in a store"),
        ("s3://bucket/../b", "is not a plain location in a store"),
        ("memory://bucket/x", "has the scheme 'memory', not an object store's"),
    ],
)
def test_only_plain_places_in_known_stores_are_read_or_written(place, said, source):
    for arguments in ((place, source.parent), (source, place)):
        with pytest.raises(UserError, match=said):
            copy(*arguments)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(NotFound, match="no checkpoint at"):
        copy(tmp_path, tmp_path / "target")


def test_a_tool_in_a_child_tells_progress_results_and_errors(source, tmp_path):
    told = []
    report = run_in_child("copy", {"source": str(source), "target": str(tmp_path / "t")}, lambda *n: told.append(n))
    assert report["verified"]
    assert told[-1][0] == told[-1][1] == report["bytes"]
    with pytest.raises(NotFound, match="no checkpoint at"):
        run_in_child("copy", {"source": str(tmp_path / "nothing"), "target": str(tmp_path)})
    with pytest.raises(UserError, match=r"no tool 'veryfy'; did you mean 'verify'\?"):
        run_in_child("veryfy", {})


def test_a_copy_whose_reader_is_killed_ends_and_can_go_on(source, tmp_path):
    code = (
        "import sys; from workers.checkpoint.tools import run_in_child\n"
        "run_in_child('copy', {'source': sys.argv[1], 'target': sys.argv[2]}, lambda *n: __import__('os')._exit(9))"
    )
    done = subprocess.run([sys.executable, "-c", code, source, tmp_path / "target"])
    assert done.returncode == 9
    for _ in range(100):  # the child it left notices, and lets go of its lock
        try:
            copy(source, tmp_path / "target")
            break
        except Conflict:
            pass
    assert same(source, tmp_path / "target" / source.name)


@pytest.mark.usefixtures("memory")
def test_a_save_goes_straight_into_an_object_store_and_is_loaded_from_there(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    root = "memory://saves/run"
    for step in (1, 2, 3):
        saved = save(root, step, state(step), keep=2, attempt="j-1a2b3c.2")
    assert saved.path.startswith(f"{root}/step-00000003-")
    assert verify_location(root)["ok"]
    loaded = load(root)
    assert (loaded.step, loaded.state["t"]["moving"][0].item()) == (3, 3)
    assert load(root, step=2).state["extra"] == {"step": 2}
    with pytest.raises(NotFound, match=r"no checkpoint of step 1"):
        load(root, step=1)
    with pytest.raises(CheckpointError, match="attempt 1 of job j-1a2b3c may not save"):
        save(root, 4, state(4), attempt="j-1a2b3c.1")
    background = save(root, 5, state(5), asynchronous=True)
    for one in checkpoints_below(tmp_path / "home" / "cache"):
        long_ago = time.time() - CACHE_AGE_S - 60
        os.utime(one, (long_ago, long_ago))
    assert load(root).step == 5
    assert [step_of(one) for one in checkpoints_below(tmp_path / "home" / "cache")] == [5]
    assert background.result().path == background.path


@pytest.mark.usefixtures("memory")
def test_a_save_into_a_store_that_fails_leaves_no_checkpoint(monkeypatch):
    from workers.checkpoint.transfer.stores import ObjectStore

    real = ObjectStore.write

    def failing(self, name, parts):
        if name == "MANIFEST.json":
            raise CheckpointError("the store cannot be written", "")
        real(self, name, parts)

    monkeypatch.setattr(ObjectStore, "write", failing)
    with pytest.raises(CheckpointError, match="cannot be written"):
        save("memory://failing/run", 1, {"t": torch.ones(3)})
    with pytest.raises(NotFound):
        verify_location("memory://failing/run")
