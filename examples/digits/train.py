"""Trains the digits network on whatever device the job was placed on. A plain torch loop: only `ctx` is ours.

Arguments of the job: steps (300), save_every (50), learning_rate (0.002), min_step_s (0; a demo slows down by it).
"""

import time

import data
import torch
from model import make_model
from torch.nn import functional


def train(ctx):
    steps, save_every = ctx.arguments.get("steps", 300), ctx.arguments.get("save_every", 50)
    size = ctx.global_batch_size or 64
    digits = data.load()
    ctx.backend.seed(ctx.seed)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.arguments.get("learning_rate", 0.002))
    model, optimizer = ctx.prepare(model, optimizer)
    restored = ctx.checkpoint.restore({"model": model, "optimizer": optimizer})
    done = restored.step if restored else 0
    first_loss = None
    for step in range(done + 1, steps + 1):
        started = time.monotonic()
        images, labels = data.batch(digits, step - 1, size, ctx.seed)
        mine = slice(ctx.rank, None, ctx.world_size)
        images, labels = ctx.backend.to_device((images[mine], labels[mine]))
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(step=step, of=steps, loss=loss)
        first_loss = loss.item() if first_loss is None else first_loss
        stop = ctx.preempted
        if stop or step == steps or step % save_every == 0:
            ctx.checkpoint.save(step, {"model": model, "optimizer": optimizer})
        if stop and step < steps:
            return {"accuracy": None}
        time.sleep(max(0.0, ctx.arguments.get("min_step_s", 0.0) - (time.monotonic() - started)))
    accuracy = evaluate(ctx, model, digits)
    ctx.report(step=steps, accuracy=accuracy)
    return {"accuracy": accuracy, "first_loss_after_resume": first_loss if restored else None}


def evaluate(ctx, model, digits):
    """Share of test digits told right."""
    model.eval()
    images, labels = ctx.backend.to_device((digits.test_images, digits.test_labels))
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).float().mean()
    return right.item()
