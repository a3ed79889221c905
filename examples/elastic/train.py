"""Trains on one device or two, and goes on with another number of them after a stop: batches depend on seed and step
alone, and each rank takes an equal share of the whole batch.

Arguments of the job: steps (200), save_every (20), pause_s (0; a demo slows down by it).
"""

import time

import torch
import torch.distributed as dist
from torch.nn import Linear, Sequential, Tanh
from torch.nn.functional import mse_loss


def batch(step, size, seed):
    """All of batch number `step`, the same on every rank."""
    random = torch.Generator().manual_seed(seed * 1_000_003 + step)
    x = torch.rand(size, 1, generator=random) * 6 - 3
    return x, torch.sin(x)


def train(ctx):
    steps, save_every = ctx.arguments.get("steps", 200), ctx.arguments.get("save_every", 20)
    ctx.backend.seed(ctx.seed)
    model = Sequential(Linear(1, 32), Tanh(), Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = ctx.prepare(model, optimizer)
    restored = ctx.checkpoint.restore({"model": model, "optimizer": optimizer})
    done = restored.step if restored else 0
    mine = slice(ctx.rank, None, ctx.world_size)
    for step in range(done + 1, steps + 1):
        x, y = batch(step, ctx.global_batch_size or 32, ctx.seed)
        x, y = ctx.backend.to_device((x[mine], y[mine]))
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(step=step, of=steps, loss=of_all_ranks(ctx, loss.detach()), ranks=ctx.world_size)
        stop = ctx.preempted
        if stop or step == steps or step % save_every == 0:
            ctx.checkpoint.save(step, {"model": model, "optimizer": optimizer})
        if stop and step < steps:
            return {"first": done + 1, "last": step, "ranks": ctx.world_size}
        time.sleep(ctx.arguments.get("pause_s", 0.0))
    return {"first": done + 1, "last": steps, "ranks": ctx.world_size}


def of_all_ranks(ctx, loss):
    """The loss of the whole batch: the shares are equal, so that it is the mean."""
    if ctx.world_size > 1:
        dist.all_reduce(loss)
    return loss / ctx.world_size
