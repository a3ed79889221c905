"""The train task as real processes; in the XLA environment the same on lazy tensors, beside gloo."""

import signal

import pytest
import torch

from workers.checkpoint import load
from workers.devices import backends

ORDER = {"backend": "tpu", "kind": "tpu:emulated", "emulated": True} if "tpu" in backends.available() else {}

LINEAR = """
import torch
from torch import nn

def train(ctx):
    torch.manual_seed(5 + ctx.rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    torch.manual_seed(0)
    if ctx.rank == 0:
        torch.save(model.state_dict(), "../start.pt")
    if ctx.arguments["start"]:
        model.load_state_dict(torch.load(ctx.arguments["start"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x, y = torch.rand(6, 8, 4), torch.rand(6, 8, 1)
    size = 8 // ctx.arguments["parts"]
    batches = [(a, b) for i in range(6) for a, b in zip(x[i].split(size), y[i].split(size))]
    model, optimizer, loader = ctx.prepare(model, optimizer, batches)
    for step, (a, b) in enumerate(loader, 1):
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(step=step, loss=loss)
    ctx.checkpoint.save(step, {"model": model, "optimizer": optimizer})
    return {"steps": step, "device": str(ctx.device)}
"""

UNTIL_STOPPED = """
import time

def train(ctx):
    step = 0
    while not ctx.preempted:
        step += 1
        ctx.report(step=step)
        time.sleep(0.01)
    return {"stopped_at": step}
"""


def parameters(path):
    return load(path).state["model"]


def test_two_ranks_end_with_the_parameters_of_one_rank_with_the_joined_batch(attempt):
    two = attempt("two", checkpoint_root="../checkpoints", arguments={"start": "", "parts": 2}, **ORDER)
    two.write(LINEAR)
    results = two.run(world_size=2)
    assert [r["returned"]["steps"] for r in results] == [6, 6]
    assert [r["last_step"] for r in results] == [6, 6]
    assert {r["checkpoints"] for r in results} == {1}

    start = str(two.folder / "start.pt")
    one = attempt("one", checkpoint_root="../checkpoints", arguments={"start": start, "parts": 1}, **ORDER)
    one.write(LINEAR)
    (result,) = one.run()
    assert result["returned"]["device"].startswith("xla" if ORDER else "cpu")
    mine, theirs = parameters(one.folder / "checkpoints"), parameters(two.folder / "checkpoints")
    assert set(mine) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-5, atol=1e-6)
    (event,) = two.events("checkpoint")
    assert (event["rank"], event["step"]) == (0, 6)
    assert [e["loss"] for e in one.events("report")] != []


@pytest.mark.skipif(bool(ORDER), reason="what a rank does with a signal does not depend on the device")
def test_a_rank_that_is_asked_to_stop_ends_well_and_says_that_it_did_not_finish(attempt):
    stopped = attempt(**ORDER)
    stopped.write(UNTIL_STOPPED)
    ranks = stopped.start()
    try:
        stopped.until_reported(ranks)
        ranks[0].send_signal(signal.SIGTERM)
        (result,) = stopped.finish(ranks)
    finally:
        ranks[0].kill()
    assert result["returned"]["stopped_at"] == result["last_step"] > 0
    assert [event["preempted"] for event in stopped.events("note") if "preempted" in event] == [True]


@pytest.mark.skipif(bool(ORDER), reason="the ranks' agreement does not depend on the device")
def test_two_ranks_that_are_asked_to_stop_leave_at_the_same_step(attempt):
    stopped = attempt()
    stopped.write(
        UNTIL_STOPPED.replace("step += 1", "step += 1; __import__('torch.distributed').distributed.barrier()")
    )
    ranks = stopped.start(world_size=2)
    try:
        stopped.until_reported(ranks)
        ranks[1].send_signal(signal.SIGTERM)
        results = stopped.finish(ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert results[0]["returned"] == results[1]["returned"]


@pytest.mark.skipif(bool(ORDER), reason="who writes does not depend on the device")
def test_a_checkpoint_that_rank_0_cannot_write_fails_every_rank_and_leaves_none_waiting(attempt):
    failing = attempt()
    failing.order["checkpoint_root"] = str(failing.folder / "order.json")
    failing.write("def train(ctx):\n    ctx.checkpoint.save(1, {'extra': {'n': ctx.rank}})\n")
    ranks = failing.start(world_size=2)
    try:
        told = [rank.communicate()[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert all("CheckpointError: cannot save step 1" in text for text in told), told
