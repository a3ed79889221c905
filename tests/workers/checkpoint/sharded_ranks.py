"""Run by test_sharded.py as several ranks: a small FSDP2 training that saves, or loads what other ranks saved.

    sharded_ranks.py ROOT COUNT:WHAT...      WHAT is save, load or killed; e.g. 3:save 2:load

Ranks are forked from this process, which imports torch once for all of them. Prints the exit codes of each in turn, as
JSON. A rank ends hard: gloo's threads abort an interpreter that is torn down around them.
"""

import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import psutil
import torch
import torch._dynamo  # as optimizers do, each rank for itself if not here
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from workers.checkpoint import PolyfleetStorageReader, PolyfleetStorageWriter, load, save, verify
from workers.checkpoint.disk.files import Files
from workers.errors import CheckpointError


def build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5))


def whole(state):
    return {name: tensor.full_tensor().contiguous() for name, tensor in state.items()}


def cut(seed, mesh):
    model = build(seed)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())


def step(model, optimizer, number):
    torch.manual_seed(number)
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_all(root, mesh):
    model, optimizer = cut(0, mesh)
    for number in range(3):
        step(model, optimizer, number)
    saved = save(root / "native", 3, {"model": model, "optimizer": optimizer, "extra": {"epoch": 2}})
    assert save(root / "background", 3, {"model": model}, asynchronous=True).result().path.is_dir()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(
        state | {"extra": {"epoch": 2, "shape": (1, 2)}}, storage_writer=PolyfleetStorageWriter(root / "dcp", 3, keep=1)
    )
    wide = distribute_tensor(torch.arange(60.0).reshape(4, 3, 5), mesh, [Shard(2)])
    both = distribute_tensor(torch.arange(6.0), mesh, [Replicate()])
    save(root / "inner", 1, {"t": {"wide": wide, "both": both}})
    there = whole(model.state_dict())
    step(model, optimizer, 3)
    after = whole(model.state_dict())
    if dist.get_rank() == 0:
        assert verify(saved.path)["ok"]
        save_file(there, root / "there.safetensors")
        save_file(after, root / "after.safetensors")
    one = root / "one rank cannot write"
    if dist.get_rank() == 0:
        one.mkdir()
    dist.barrier()
    broken = nn.Module()
    broken.weight = nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)]))
    if dist.get_rank() == 1:
        broken.note = nn.Parameter(torch.ones(2, device="meta"))
    try:
        save(one, 1, {"model": broken})
    except CheckpointError as e:
        assert "meta device" in str(e), e
        assert not list(one.iterdir())
    else:
        raise AssertionError("a rank that cannot save must fail all")


def load_all(root, mesh):
    there = load_file(root / "there.safetensors")
    model, optimizer = cut(1, mesh)
    loaded = load(root / "native", {"model": model, "optimizer": optimizer})
    assert loaded.state["extra"] == {"epoch": 2}
    assert all(isinstance(held["exp_avg"], DTensor) for held in optimizer.state.values())
    equal(whole(model.state_dict()), there)
    step(model, optimizer, 3)
    for name, tensor in whole(model.state_dict()).items():  # sums over another number of ranks round differently
        assert torch.allclose(tensor, load_file(root / "after.safetensors")[name], rtol=1e-4, atol=1e-6), name
    other, _ = cut(2, mesh)
    state = {"model": get_model_state_dict(other), "extra": {"epoch": 0, "shape": None}}
    dcp.load(state, storage_reader=PolyfleetStorageReader(root / "dcp"))
    assert state["extra"] == {"epoch": 2, "shape": (1, 2)}
    equal(whole(state["model"]), there)
    for name in ("native", "background"):
        columns = distribute_tensor(torch.zeros(13, 7), mesh, [Shard(1)])
        dcp.load({"model": {"0.weight": columns}}, storage_reader=PolyfleetStorageReader(root / name))
        assert torch.equal(columns.full_tensor(), there["0.weight"])
    middle = distribute_tensor(torch.zeros(4, 3, 5), mesh, [Shard(1)])
    holder = nn.Module()
    dcp.load({"t": {"wide": middle}}, storage_reader=PolyfleetStorageReader(root / "inner"))
    assert torch.equal(middle.full_tensor(), torch.arange(60.0).reshape(4, 3, 5)), holder


class Killed(Files):
    """A rank that is killed while it writes."""

    def write(self, file, buffer, size_bytes, offset):
        os.kill(os.getpid(), signal.SIGKILL)


def be_killed(root, mesh):
    model, _ = cut(0, mesh)
    save(root / "killed", 1, {"model": model})
    save(root / "killed", 2, {"model": model}, files=Killed() if dist.get_rank() == 1 else Files())


def equal(found, wanted):
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def be_rank(rank, count, meeting, root, what):
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, count), rank=rank, world_size=count)
    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("dp",))
    {"save": save_all, "load": load_all, "killed": be_killed}[what](root, mesh)
    dist.barrier()


def fork(rank, *arguments):
    if child := os.fork():
        return child
    try:
        be_rank(rank, *arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def run(root, count, what):
    """Exit codes by rank; when one has failed, the others are ended, as torchrun does.

    They meet in a file. A TCPStore has a thread, and a rank that is forked while that holds a lock waits for ever.
    """
    assert psutil.Process().num_threads() == 1
    with tempfile.TemporaryDirectory() as folder:
        ranks = {fork(rank, count, f"{folder}/meeting", root, what): rank for rank in range(count)}
        codes, left = {}, set(ranks)
        while left:
            pid, status = os.waitpid(-1, 0)
            left.discard(pid)
            codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
            if codes[ranks[pid]]:
                for other in left:
                    os.kill(other, signal.SIGKILL)
        return [codes[rank] for rank in range(count)]


if __name__ == "__main__":
    asked = [word.split(":") for word in sys.argv[2:]]
    print(json.dumps([run(Path(sys.argv[1]), int(count), what) for count, what in asked]))
