"""Fits a sine with a small network. A plain torch loop: only `ctx` is ours.

Arguments of the job: steps (200), save_every (50).
"""

import torch
from torch import nn


def make_model():
    return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))


def sample_input(batch_size):
    return torch.rand(batch_size, 1)


def batch(step, rank):
    """The same for the same step on every device, so that a resumed run goes on with the data it would have had."""
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.rand(256, 1, generator=numbers) * 6
    return x, torch.sin(x)


def train(ctx):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = ctx.prepare(model, optimizer)
    restored = ctx.checkpoint.restore({"model": model, "optimizer": optimizer})
    first = restored.step + 1 if restored else 1
    print(f"rank {ctx.rank} of {ctx.world_size} on {ctx.kind}, from step {first}")
    last = ctx.arguments.get("steps", 200)
    for step in range(first, last + 1):
        x, y = ctx.backend.to_device(batch(step, ctx.rank))
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(step=step, of=last, loss=loss)
        stop = ctx.preempted
        if stop or step == last or step % ctx.arguments.get("save_every", 50) == 0:
            ctx.checkpoint.save(step, {"model": model, "optimizer": optimizer})
            print(f"step {step}: loss {loss.item():.4f}, saved")
        if stop:
            return {"stopped_at": step}
    return {"loss": loss.item()}
