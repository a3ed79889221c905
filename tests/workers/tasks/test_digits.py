"""The example users start from, run as they would run it."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workers.devices import backends
from workers.tasks import train
from workers.tasks.context import Context

EXAMPLE = Path(__file__).parents[3] / "examples" / "digits"
MODULES = ("train", "model", "data", "prepare_data")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder as it is submitted, with the data file that its own script writes."""
    if not importlib.util.find_spec("sklearn"):
        pytest.skip("scikit-learn, which ships the digits, is not in this environment")
    copy = tmp_path_factory.mktemp("digits")
    shutil.copytree(EXAMPLE, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.npz"))
    subprocess.run([sys.executable, "prepare_data.py"], cwd=copy, check=True, capture_output=True)
    return copy


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])

    def one(root, arguments, resume_from=""):
        for name in MODULES:
            sys.modules.pop(name, None)
        ctx = Context(
            backends.create("cpu"),
            entry="train.py",
            arguments=arguments,
            checkpoint_root=str(tmp_path / root),
            resume_from=resume_from,
            seed=7,
        )
        ctx.backend.seed(7)
        result = train.main(ctx)
        losses = {e["step"]: e["loss"] for e in ctx.events.in_memory if e["type"] == "report" and "loss" in e}
        return result, losses, [e["path"] for e in ctx.events.in_memory if e["type"] == "checkpoint"]

    yield one
    for name in MODULES:
        sys.modules.pop(name, None)


def test_it_reads_97_percent_of_unseen_digits_and_a_resumed_run_repeats_the_uninterrupted_one(run):
    whole, losses, _ = run("whole", {})
    assert whole["returned"]["accuracy"] >= 0.97
    assert whole["returned"]["first_loss_after_resume"] is None
    assert whole["metrics"]["accuracy"] == whole["returned"]["accuracy"]
    assert whole["last_step"] == 300

    _, first_losses, paths = run("part", {"steps": 60, "save_every": 40})
    assert [first_losses[s] for s in range(1, 61)] == [losses[s] for s in range(1, 61)]
    resumed, later, _ = run("part", {}, resume_from=paths[0])
    assert min(later) == 41
    assert resumed["returned"]["first_loss_after_resume"] == losses[41]
    assert [later[s] for s in (41, 150, 300)] == [losses[s] for s in (41, 150, 300)]
    assert resumed["returned"]["accuracy"] == whole["returned"]["accuracy"]


def test_batches_depend_on_seed_and_step_alone_and_visit_every_image_once_per_epoch(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    data = importlib.import_module("data")
    try:
        digits = data.load()
        assert (len(digits.train_labels), len(digits.test_labels)) == (1437, 360)
        seen = torch.cat([data.batch(digits, step, 479, seed=3)[0] for step in range(3)])
        assert torch.equal(seen.flatten(1).sum(1).sort().values, digits.train_images.flatten(1).sum(1).sort().values)
        again = data.batch(digits, 2, 479, seed=3)[0]
        assert torch.equal(again, seen[2 * 479 :])
        assert not torch.equal(data.batch(digits, 0, 64, seed=4)[1], data.batch(digits, 0, 64, seed=3)[1])
    finally:
        for name in MODULES:
            sys.modules.pop(name, None)
