"""States cut among ranks, in real processes: saved by three, loaded by one, two and four, natively and through DCP."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lazy_modules import LazyModule
from safetensors.torch import load_file

from workers import checkpoint
from workers.checkpoint import (
    describe,
    list_checkpoints,
    load,
    open_checkpoint,
    save,
)
from workers.checkpoint.format.manifest_checks import read_manifest
from workers.errors import CheckpointError

dcp = LazyModule("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
RANKS = Path(__file__).with_name("sharded_ranks.py")
CODE = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, dict[str, list[int]], str]:
    """A folder in which ranks have saved, loaded and been killed; their exit codes, and what they said."""
    folder, turns = tmp_path_factory.mktemp("sharded"), ("3:save", "2:load", "4:load", "2:killed")
    env = os.environ | {"PYTHONPATH": str(CODE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, RANKS, folder, *turns], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, dict(zip(turns, json.loads(done.stdout.splitlines()[-1]), strict=True)), done.stderr


@pytest.fixture(scope="module")
def root(ran) -> Path:
    folder, codes, said = ran
    assert codes["3:save"] == [0, 0, 0], said[-4000:]
    return folder


@pytest.mark.parametrize("turn", ["2:load", "4:load"])
def test_what_three_ranks_saved_any_other_number_loads(turn, ran):
    _, codes, said = ran
    assert not any(codes[turn]), said[-4000:]


def test_a_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(ran, root):
    _, codes, _ = ran
    assert codes["2:killed"][1] == -signal.SIGKILL
    assert [row["step"] for row in list_checkpoints(root / "killed")] == [1]
    assert load(root / "killed").step == 1


def only(root: Path) -> Path:
    return next(root.glob("step-*"))


def test_one_process_loads_it_all_and_the_manifest_says_how_it_was_cut(root):
    there = load_file(root / "there.safetensors")
    loaded = load(root / "native").state
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in there.items())
    assert torch.equal(load(root / "dcp").state["model"]["0.weight"], there["0.weight"])
    assert load(root / "dcp").state["extra"] == {"epoch": 2, "shape": (1, 2)}
    manifest = read_manifest(only(root / "native"))
    assert (manifest.world.size, manifest.world.mesh, manifest.world.dims) == (3, (3,), ("dp",))
    boxes = [(s.start, s.shape) for s in manifest.tensors["model/0.weight"].shards]
    assert boxes == [((0, 0), (5, 7)), ((5, 0), (5, 7)), ((10, 0), (3, 7))]
    assert describe(only(root / "native"))["world"] == 3


def test_parts_are_read_without_the_rest_and_replicas_are_stored_once(root):
    wide = torch.arange(60.0).reshape(4, 3, 5)
    manifest = read_manifest(only(root / "inner"))
    assert len(manifest.tensors["t/wide"].shards) == 3
    assert len(manifest.tensors["t/both"].shards) == 1
    with open_checkpoint(only(root / "inner")) as opened:
        assert torch.equal(opened.tensor("t/wide"), wide)
        assert torch.equal(opened.tensor("t/wide", (slice(1, 3), slice(None), slice(1, 4))), wide[1:3, :, 1:4])
        assert torch.equal(opened.tensor("t/wide", (..., 2)), wide[..., 2:3])
        for wrong, said in [((slice(0, 4, 2),), "with step 2"), ((9,), "index 9 is out of range"), (("a",), "'a' is")]:
            with pytest.raises(CheckpointError, match=said):
                opened.tensor("t/wide", wrong)


def test_dcp_without_ranks_saves_and_loads_anything_nested(tmp_path):
    state = {"model": {"w": torch.randn(3, 4), "half": torch.ones(2, dtype=torch.bfloat16)}, "list": [torch.ones(2), 5]}
    writer = checkpoint.PolyfleetStorageWriter(tmp_path, 7)
    dcp.save(state, storage_writer=writer, no_dist=True)
    blank = {"model": {"w": torch.zeros(3, 4), "half": torch.zeros(2)}, "list": [torch.zeros(2), None]}
    dcp.load(blank, storage_reader=checkpoint.PolyfleetStorageReader(tmp_path), no_dist=True)
    assert torch.equal(blank["model"]["w"], state["model"]["w"])
    assert blank["model"]["half"].tolist() == [1, 1]
    assert blank["list"][1] == 5
    assert torch.equal(load(writer.path).state["list"][0], torch.ones(2))


def test_dcp_refuses_what_would_change_values_unless_allowed_and_says_what_is_damaged(tmp_path):
    saved = save(tmp_path, 1, {"t": {"w": torch.tensor([1.001])}})
    blank = {"t": {"w": torch.zeros(1, dtype=torch.bfloat16)}}
    with pytest.raises(dcp.api.CheckpointException, match="t/w: 1 values would change"):
        dcp.load(blank, storage_reader=checkpoint.PolyfleetStorageReader(tmp_path), no_dist=True)
    assert blank["t"]["w"].item() == 0
    dcp.load(blank, storage_reader=checkpoint.PolyfleetStorageReader(tmp_path, on_lossy="allow"), no_dist=True)
    assert blank["t"]["w"].item() == 1
    shard = next(saved.path.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(dcp.api.CheckpointException, match="chunk 1 of 1 is not what was saved"):
        dcp.load(
            {"t": {"w": torch.zeros(1)}}, storage_reader=checkpoint.PolyfleetStorageReader(saved.path), no_dist=True
        )
