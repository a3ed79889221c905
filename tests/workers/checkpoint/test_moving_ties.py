"""A training whose weights are tied goes from torch on the CPU to torch_xla in another environment, and back."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from second_environment import INTERPRETER, on_xla

from workers.checkpoint import describe, load, plan, save

pytestmark = [
    pytest.mark.full,
    pytest.mark.xla,
    pytest.mark.skipif(not INTERPRETER, reason="POLYFLEET_XLA_PYTHON names no interpreter that has torch_xla"),
]


SIDE = Path(__file__).with_name("tied_training.py")


@pytest.fixture(scope="module")
def side() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tied_training", SIDE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_training_moves_to_xla_and_back_as_if_it_had_stayed(side, tmp_path):
    reference = side.build(seed=1)
    expected = [side.step(*reference, number) for number in range(12)]

    model, optimizer = side.build(seed=1)
    losses = [side.step(model, optimizer, number) for number in range(4)]
    saved = save(tmp_path, 4, side.state(model, optimizer), kind="cpu")
    assert plan(saved.path, "tpu:emulated")["ok"]

    there = on_xla([str(SIDE), str(tmp_path), "4", "8"])
    assert there.pop("torch") != torch.__version__
    losses += there.pop("losses")
    assert there == {
        "untied_by_the_move": True,
        "tied_by_the_load": True,
        "retied": {"model/head.weight": "model/embedding.weight"},
        "random": {
            "python": "continued",
            "numpy": "continued",
            "cpu": "continued",
            "xla": "derived from (seed, rank, step, device type): saved on cpu",
        },
        "resumed": 4,
        "devices": {"step": "cpu", "exp_avg": "xla", "exp_avg_sq": "xla"},
        "layout_kept": True,
    }

    back, back_optimizer = side.build(seed=50)
    loaded = load(tmp_path, side.state(back, back_optimizer))
    summary = describe(loaded.report.path)
    assert (loaded.step, loaded.report.source.kind) == (8, "tpu:emulated")
    assert summary["ties"] == {"model/head.weight": "model/embedding.weight"}
    assert back.head.weight is back.embedding.weight
    assert back.steps.item() == 8
    losses += [side.step(back, back_optimizer, number) for number in range(8, 12)]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[:4] == expected[:4]
