"""A pool's checkpoints as its agent looks at them: which is the newest, and how little is read to know it."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
import xxhash

from cluster.errors import PolyfleetError, SpecError
from workers.checkpoint import save
from workers.checkpoint.format.manifest import CHUNK_BYTES
from workers.errors import CheckpointError
from workers.storage.checkpoint_uploads import CheckpointUploads
from workers.storage.pool_checkpoints import PoolCheckpoints
from workers.storage.pool_paths import error_with_pool_paths, with_pool_paths
from workers.storage.pool_storage import PoolStorage

GIB = 1 << 30


@pytest.fixture
def stored(tmp_path) -> PoolCheckpoints:
    return PoolCheckpoints(PoolStorage(tmp_path), "cpu")


def grown(folder: Path, size_bytes: int) -> None:
    """Give the one shard of a checkpoint a hole at its end, which the manifest says is there: sparse, and sound."""
    [shard] = folder.glob("*.safetensors")
    with shard.open("r+b") as file:
        file.truncate(size_bytes)
        first = file.read(CHUNK_BYTES)
    hole = xxhash.xxh3_128(bytes(CHUNK_BYTES)).hexdigest()
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    manifest["files"][shard.name] = {
        "bytes": size_bytes,
        "xxh3_128": [xxhash.xxh3_128(first).hexdigest(), *[hole] * (size_bytes // CHUNK_BYTES - 1)],
    }
    del manifest["digest"]
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["digest"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))


def read_bytes() -> int:
    """What this thread has asked the kernel to read so far. Other threads, those of earlier tests, read what they like;
    what is mapped into memory does not count."""
    told = dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())
    return int(told["rchar"])


@pytest.mark.skipif(not Path("/proc/thread-self/io").exists(), reason="this system does not count what a process reads")
def test_show_plan_and_the_newest_of_a_folder_read_the_manifest_and_no_tensor(stored, tmp_path):
    folder = save(tmp_path / "job", 7, {"state": {"x": torch.zeros(9)}}).path
    grown(folder, GIB)
    stored.plan(stored.resolve("job")["path"], "cpu", 1)  # modules are imported now
    before = read_bytes()
    assert stored.resolve("job") == {"path": f"job/{folder.name}", "passed_over": []}
    assert stored.describe(f"job/{folder.name}")["bytes"] == GIB
    assert stored.plan(f"job/{folder.name}", "cpu", 1)["bytes"] == GIB
    assert read_bytes() - before < 1 << 20
    assert stored.verify(f"job/{folder.name}")["ok"]
    flip_last(folder)
    assert stored.describe(f"job/{folder.name}")["bytes"] == GIB, "only who reads all of it can see that"
    with pytest.raises(CheckpointError, match="chunk 128 of 128 is not what was saved"):
        stored.verify(f"job/{folder.name}")


def flip_last(folder: Path) -> None:
    [shard] = folder.glob("*.safetensors")
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")


@pytest.fixture
def two(tmp_path) -> list[str]:
    """Two checkpoints of one folder, the newer one with a byte that rotted."""
    folders = [save(tmp_path / "job", step, {"t": torch.ones(9)}).path for step in (1, 2)]
    flip_last(folders[1])
    return [f"job/{folder.name}" for folder in folders]


def test_one_that_does_not_verify_is_marked_passed_over_and_named_until_it_verifies(stored, two, tmp_path):
    assert stored.resolve("job") == {"path": two[1], "passed_over": []}  # nobody has read it yet
    with pytest.raises(CheckpointError, match=r"chunk 1 of 1 is not what was saved"):
        stored.verify(two[1])
    [passed] = (found := stored.resolve("job"))["passed_over"]
    assert (found["path"], passed["path"]) == (two[0], f"cpu:{two[1]}")
    assert passed["reason"].startswith(f"cpu:{two[1]}/shard-00001.safetensors: chunk 1 of 1 is not what was saved")
    assert stored.describe(two[1])["damaged"] == passed["reason"]
    assert [row["problem"] for row in stored.list("job")] == [passed["reason"], ""]
    assert stored.damaged() == [{"path": two[1], "reason": passed["reason"]}]
    [shard] = (tmp_path / two[1]).glob("*.safetensors")
    sound = next((tmp_path / two[0]).glob("*.safetensors")).read_bytes()  # the same tensor at the same place
    shard.write_bytes(sound)
    assert stored.verify(two[1])["ok"]
    assert (stored.resolve("job")["path"], stored.damaged()) == (two[1], [])


def test_one_that_was_cut_is_passed_over_without_reading_it_and_none_left_is_an_error(stored, two, tmp_path):
    [shard] = (tmp_path / two[1]).glob("*.safetensors")
    os.truncate(shard, 100)
    assert stored.resolve("job")["path"] == two[0]
    (tmp_path / two[0] / "MANIFEST.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in cpu:job is sound; the newest: cpu:job/"):
        stored.resolve("job")
    assert stored.resolve("nothing") == {"path": "", "passed_over": []}


def test_what_is_told_names_places_as_users_write_them_and_no_path_of_this_disk(stored, two, tmp_path):
    calls = [
        lambda: stored.verify(two[1]),
        lambda: stored.describe("job-without"),
        lambda: stored.plan(two[0], "tpu:v5x", 1),
        lambda: CheckpointUploads(PoolStorage(tmp_path), "cpu").begin("job", Path(two[1]).name, manifest_of(two[0])),
    ]

    def manifest_of(path: str) -> bytes:
        return (tmp_path / path / "MANIFEST.json").read_bytes()

    (tmp_path / "job-without").mkdir()
    for call in calls:
        with pytest.raises(PolyfleetError) as error:
            call()
        assert str(tmp_path) not in str(error.value)
        assert "cpu:job" in str(error.value) or "tpu:v5x" in str(error.value)


def test_a_path_is_only_named_anew_where_it_lies_in_the_storage(tmp_path):
    roots = {tmp_path / "a": "one", tmp_path / "a" / "b": "two"}
    told = {"x": [f"{tmp_path}/a/b/c: is gone", f"in {tmp_path}/a, {tmp_path}/ab/c and /x{tmp_path}/a/c", 7]}
    assert with_pool_paths(told, roots) == {
        "x": ["two:c: is gone", f"in one:, {tmp_path}/ab/c and /x{tmp_path}/a/c", 7]
    }
    error = error_with_pool_paths(SpecError("root", f"{tmp_path}/a/x is not there"), roots)
    assert (type(error), error.args) == (SpecError, ("root", "one:x is not there", ""))
