"""A training that goes on until a file is there. What it does is in its ledger: one line per start, step and save."""

import json
import os
import time
from pathlib import Path

import torch


def train(ctx):
    end, ledger = Path(ctx.arguments["end"]), ctx.arguments["ledger"]
    hang_at, nan_at = ctx.arguments.get("hang_at", 0), ctx.arguments.get("nan_at", 0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ctx.prepare(model, optimizer)

    def note(what, step):
        told = {"what": what, "epoch": int(os.environ["POLYFLEET_EPOCH"]), "rank": ctx.rank, "step": step}
        with open(ledger, "a") as file:  # noqa: PTH123 - one write of one line
            file.write(json.dumps(told | {"at_s": time.monotonic()}) + "\n")

    restored = ctx.checkpoint.restore({"model": model, "optimizer": optimizer})
    step = restored.step if restored else 0
    note("start", step)
    while True:
        step += 1
        loss = model(torch.ones(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == nan_at:
            loss = loss * float("nan")
        if step == hang_at and not restored:
            time.sleep(3600)
        ctx.report(step=step, loss=loss)
        note("step", step)
        over = torch.tensor(float(end.exists()))
        if ctx.world_size > 1:
            torch.distributed.all_reduce(over)
        if step % ctx.arguments.get("save_every", 5) == 0 or ctx.preempted:
            note("saving", step)
            ctx.checkpoint.save(step, {"model": model, "optimizer": optimizer}, asynchronous=False)
            note("saved", step)
        if ctx.preempted or over:
            return {"last": step}
        time.sleep(0.1)
