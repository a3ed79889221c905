"""Lazily, by name and by slice; memory that is shared, mapped and bounded; what an older version wrote."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from workers.checkpoint import DamagedCheckpoint, load, open_checkpoint, save, verify
from workers.errors import CheckpointError

VERSION_1 = next((Path(__file__).parents[2] / "data" / "checkpoint-v1").glob("step-*"))


def test_a_whole_tensor_is_mapped_and_writing_to_it_leaves_the_file(tmp_path):
    state = {"w": torch.randn(40, 30), "b": torch.arange(7), "flag": torch.tensor([True]), "none": torch.empty(0, 3)}
    path = save(tmp_path, 1, {"t": state}).path
    with open_checkpoint(path) as opened:
        there = {name: opened.tensor(f"t/{name}") for name in state}
    assert all(torch.equal(there[name], tensor) for name, tensor in state.items())
    there["w"].zero_()
    assert verify(path)["ok"]
    assert torch.equal(load(path).state["t"]["w"], state["w"])


@pytest.mark.parametrize("index", [slice(2, 5), (slice(None), 3), (..., slice(1, 2)), (5, slice(0, 0)), ..., (-1,)])
def test_a_part_is_what_indexing_would_give(index, tmp_path):
    for made in (torch.randn(6, 5, 4), torch.randn(2, 6, 5, 4)[1], torch.randn(4, 5, 6).permute(2, 1, 0)):
        path = save(tmp_path, 1, {"t": made}).path
        with open_checkpoint(path) as opened:
            part = opened.tensor("t", index)
        wanted = made[index]
        assert torch.equal(part.reshape(wanted.shape), wanted)


def test_each_way_to_verify_does_what_it_says(tmp_path):
    path = save(tmp_path, 1, {"t": {"a": torch.zeros(3_000_000), "b": torch.ones(2)}}).path
    shard = next(path.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(5000)
        file.write(b"?")
    with pytest.raises(DamagedCheckpoint, match=r"chunk 1 of 2"):
        open_checkpoint(path, verify="full")
    with open_checkpoint(path, verify="none") as opened:
        assert opened.tensor("t/a").count_nonzero() == 1
    with open_checkpoint(path) as opened:
        assert opened.tensor("t/b").tolist() == [1, 1]
        with pytest.raises(DamagedCheckpoint):
            opened.tensor("t/a")
    with pytest.raises(DamagedCheckpoint):
        load(path, {"t": None})
    assert load(path, verify="none").state["t"]["b"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match="verify is 'some'"):
        load(path, verify="some")


def test_tensors_that_share_memory_are_stored_once_and_share_it_again(tmp_path):
    base = torch.randn(10, 8)
    state = {"row": base[3], "base": base, "block": base[2:5, 1:4], "turned": base.t(), "twin": base.view(10, 8)}
    saved = save(tmp_path, 1, {"t": state})
    assert saved.bytes < 4096 + base.nbytes + 64
    there = load(tmp_path).state["t"]
    assert all(torch.equal(there[name], tensor) for name, tensor in state.items())
    there["base"][3, 2] = 7
    assert (there["row"][2], there["block"][1, 1], there["turned"][2, 3], there["twin"][3, 2]) == (7, 7, 7, 7)
    with open_checkpoint(saved.path) as opened:
        assert torch.equal(opened.tensor("t/block"), state["block"])


def test_tensors_that_overlap_without_one_holding_the_other_are_stored_apart_and_said(tmp_path):
    base = torch.arange(10.0)
    saved = save(tmp_path, 1, {"t": {"a": base[0:6], "b": base[4:10]}})
    assert saved.notes == ("t/b overlaps t/a in memory; they are stored separately and will not share it",)
    assert load(tmp_path).state["t"]["b"].tolist() == [4, 5, 6, 7, 8, 9]


class Shared(nn.Module):
    """Two parameters, one memory: a tie that is no identity."""

    def __init__(self, share=True):
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 3))
        self.b = nn.Parameter(self.a.data if share else torch.zeros(4, 3))


def test_parameters_that_share_memory_are_filled_and_the_report_says_where_they_no_longer_do(tmp_path):
    model = Shared()
    save(tmp_path, 1, {"model": model})
    same, apart = Shared(), Shared(share=False)
    assert load(tmp_path, {"model": same}).report.notes == []
    assert torch.equal(same.b, model.a)
    assert load(tmp_path, {"model": apart}).report.notes == [
        "model/b shared memory with model/a when saved, but not in the live model"
    ]
    assert torch.equal(apart.b, model.a)


PEAK = """
import resource, sys, torch
from torch import nn
from workers.checkpoint import convert, load, save
model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(24)))          # 384 MiB
other = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(24))).bfloat16()
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
load(save(sys.argv[1] + "/warm", 1, {"t": torch.ones(1 << 20)}).path)
torch.ones(4).bfloat16().float().aminmax()
before = peak()
path = save(sys.argv[1] + "/r", 1, {"model": model}).path
load(path, {"model": model})
load(path, {"model": other}, on_lossy="allow")
convert(path, sys.argv[1] + "/c", to_kind="tpu:v5e", dtype={"float32": "bfloat16"}, on_lossy="allow")
print(peak() - before)
"""


def test_saving_loading_and_converting_take_a_few_buffers_not_a_copy(tmp_path):
    done = subprocess.run([sys.executable, "-c", PEAK, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 60  # MiB, beside a checkpoint of 384


def test_a_checkpoint_of_version_1_is_read_for_ever(tmp_path):
    shutil.copytree(VERSION_1, tmp_path / VERSION_1.name)
    assert verify(tmp_path / VERSION_1.name)["ok"]
    loaded = load(tmp_path)
    assert (loaded.step, loaded.state["extra"]["t"], loaded.state["extra"]["big"]) == (12, (1, 2), 2**60)
    model = loaded.state["model"]
    assert model["head.weight"] is model["embedding.weight"]
    assert model["conv.weight"].is_contiguous(memory_format=torch.channels_last)
    assert model["conv.bias"].sum().item() == pytest.approx(-0.19000153)
    save(tmp_path, 13, {"t": 1}, keep=2)
    assert sorted(path.name[:13] for path in tmp_path.iterdir()) == ["step-00000012", "step-00000013"]
