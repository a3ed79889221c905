"""Run by test_training_libraries.py: two ranks train under FSDP2 on the CPU, and Accelerate or DCP saves them.

    library_ranks.py whole|save|resume sharded|full|dcp FOLDER

Accelerate shards on accelerators only, so it is told here that it does: its own code cuts, saves and loads the model
over gloo. Prints the losses of rank 0 as JSON: 6 of `whole`, the first 3 of `save`, the last 3 of `resume`.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2))


def train(model, optimizer, scheduler, steps):
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = nn.functional.mse_loss(model(torch.randn(4, 3)), torch.randn(4, 2))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepared(what):
    """An Accelerator or None, the model, its optimizer and scheduler."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if what == "dcp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return None, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    accelerator = Accelerator(cpu=True)
    kind = "FULL_STATE_DICT" if what == "full" else "SHARDED_STATE_DICT"
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=kind, cpu_ram_efficient_loading=False
    )
    for state in (accelerator.state, PartialState()):
        state.distributed_type = DistributedType.FSDP
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def main(rank, verb, what, folder, meeting):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    # Accelerate asks for an address, also of ranks that have met.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=2)
    accelerator, model, optimizer, scheduler = prepared(what)
    there = Path(folder) / "step_3"
    if verb == "resume":
        load(accelerator, model, optimizer, scheduler, there)
    first, last = {"whole": (0, 6), "save": (0, 3), "resume": (3, 6)}[verb]
    losses = train(model, optimizer, scheduler, range(first, last))
    if verb == "save":
        save(accelerator, model, optimizer, scheduler, there)
    if rank == 0:
        print(json.dumps(losses), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads abort an interpreter that is torn down around them


def save(accelerator, model, optimizer, scheduler, there):
    if accelerator is not None:
        accelerator.save_state(str(there))
        return
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": weights, "optim": states}, "scheduler": scheduler.state_dict()}, checkpoint_id=there)


def load(accelerator, model, optimizer, scheduler, there):
    if accelerator is not None:
        accelerator.load_state(str(there))
        return
    weights, states = get_state_dict(model, optimizer)
    state = {"app": {"model": weights, "optim": states}, "scheduler": scheduler.state_dict()}
    dcp.load(state, checkpoint_id=there)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    scheduler.load_state_dict(state["scheduler"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as meeting:
        mp.start_processes(main, (*sys.argv[1:], meeting), nprocs=2, start_method="fork")
