"""Training on real data that stops in one pool and goes on in another, and back; the one that never stopped is the
reference. Between runs on one kind nothing differs, not a bit; between kinds only how they round."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits

from workers.checkpoint import diff, load, save

pytestmark = pytest.mark.full

INTERPRETER = os.environ.get("POLYFLEET_XLA_PYTHON", "")
PROGRAM = Path(__file__).with_name("moving_training.py")
TOLERANCE = 1e-4
"""Of a loss, relatively, up to four steps after a move: XLA adds in another order."""


@pytest.fixture(scope="module")
def side():
    spec = importlib.util.spec_from_file_location("moving_training", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path):
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    save_file({"images": images, "labels": torch.tensor(data.target)}, tmp_path / "digits.safetensors")
    return tmp_path


@pytest.mark.parametrize("what", ["gpt", "digits"])
def test_a_training_that_is_resumed_on_its_kind_is_the_one_that_never_stopped(what, side, root):
    reference = side.Training(what, root, seed=1).on("cpu")
    expected = reference.steps(0, 16)
    assert expected[-1] < 0.9 * expected[0]  # it learns something
    first = side.Training(what, root, seed=1).on("cpu")
    losses = first.steps(0, 8)
    save(root, 8, first.state(), asynchronous=True)
    second = side.Training(what, root, seed=2).on("cpu")
    assert load(root, second.state()).step == 8
    assert losses + second.steps(8, 16) == expected
    whole, resumed = save(root / "whole", 16, reference.state()), save(root / "resumed", 16, second.state())
    assert not diff(whole.path, resumed.path)["tensors"]


@pytest.mark.xla
@pytest.mark.skipif(not INTERPRETER, reason="POLYFLEET_XLA_PYTHON names no interpreter that has torch_xla")
@pytest.mark.parametrize("what", ["gpt", "digits"])
def test_a_training_moves_to_another_pool_and_back_without_losing_a_step(what, side, root):
    expected = side.Training(what, root, seed=1).on("cpu").steps(0, 16)
    here = side.Training(what, root, seed=1).on("cpu")
    losses = here.steps(0, 8)
    save(root, 8, here.state(), kind="cpu")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "PJRT_DEVICE": "CPU"}
    command = [INTERPRETER, PROGRAM, what, root, "8", "12"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout.splitlines()[-1])
    assert (there["resumed"], len(there["losses"])) == (8, 4)
    back = side.Training(what, root, seed=3).on("cpu")
    assert load(root, back.state()).step == 12
    losses += there["losses"] + back.steps(12, 16)
    assert losses[:8] == expected[:8]
    assert losses[8:] == pytest.approx(expected[8:], rel=TOLERANCE)
    if what == "gpt":
        assert there["retied"] == {"model/head.weight": "model/words.weight"}
        assert back.model.head.weight is back.model.words.weight
