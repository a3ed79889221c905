"""Trainings whose numbers are no numbers any more: real ranks, real checkpoints."""

import socket

import pytest

from workers.checkpoint import load
from workers.storage.pool_checkpoints import PoolCheckpoints
from workers.storage.pool_storage import PoolStorage

LOSS = """
import torch

def train(ctx):
    model = torch.nn.Linear(2, 1)
    for step in range(1, 6):
        ctx.checkpoint.save(step, {"model": model}) if step < 3 else None
        loss = float("nan") if step == 3 and ctx.rank == 1 else 0.5
        try:
            ctx.report(step=step, loss=loss)
        except Exception:
            ctx.checkpoint.save(step, {"model": model})  # a loop that catches everything
"""
SAVING = """
import time
import torch

def train(ctx):
    model = torch.nn.Linear(1 << 13, 1 << 13)  # 256 MiB: it takes longer to write than a rank to fail
    ctx.checkpoint.save(1, {"model": model})
    ctx.report(step=2, loss=float("inf") if ctx.rank == 1 else 0.5)
    time.sleep(600)
"""


@pytest.fixture
def gang():
    """What a gang of two on this machine has in its orders."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return {"ranks": 2, "world_size": 2, "devices": (0, 1), "master_port": port}


def newest(node):
    """Step of the newest checkpoint of the job, which can be loaded."""
    storage = PoolStorage(node.root / "storage")
    found = PoolCheckpoints(storage).resolve("c")["path"]
    return load(node.root / "storage" / found).step if found else None


def test_a_loss_that_is_nan_ends_the_gang_at_that_step_and_the_last_good_checkpoint_stays(node, gang):
    node.train(LOSS, checkpoint_root="c", **gang)
    ended = node.outcome()
    failure = ended["failure"]
    assert (ended["state"], failure["kind"], failure["rank"], failure["node"]) == ("failed", "nan", 1, "n0"), failure
    assert failure["message"].startswith("the reported loss is nan at step 3; check the learning rate")
    assert newest(node) == 2


def test_a_checkpoint_that_was_being_written_when_a_sister_failed_is_finished_first(node, gang):
    node.train(SAVING, checkpoint_root="c", **gang)
    failure = node.outcome()["failure"]
    assert (failure["kind"], failure["rank"]) == ("nan", 1)
    assert failure["message"].startswith("the reported loss is inf at step 2")
    assert newest(node) == 1
