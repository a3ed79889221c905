"""A small state with everything hard in it, and comparisons bit for bit."""

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn


class Tied(nn.Module):
    """Embedding and head are one tensor; batch norm brings buffers, dropout draws random numbers."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.middle = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.middle(self.embedding(tokens)))))


def bits(value: Any) -> Any:
    """A comparable image of a nested value: tensors as dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().cpu()
        if plain.element_size() == 1:
            plain = plain.view(torch.uint8)
        return (
            str(value.dtype),
            tuple(value.shape),
            plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 20, (6,))
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(name="tied")
def tied_model() -> Callable[..., Tied]:
    return Tied


@pytest.fixture(name="bits")
def bits_of() -> Callable[[Any], Any]:
    return bits


@pytest.fixture(name="train")
def train_steps() -> Callable[..., list[float]]:
    return train


@pytest.fixture(scope="session")
def torch_files() -> ModuleType:
    """torch_files.py, which several files of tests share."""
    spec = importlib.util.spec_from_file_location("torch_files", Path(__file__).with_name("torch_files.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def image() -> Callable[..., Any]:
    """What a live model, optimizer and all random streams hold, to be compared before and after."""

    def take(model: nn.Module, optimizer: "torch.optim.Optimizer | None" = None) -> Any:
        held = {name: bits(t) for name, t in model.state_dict(keep_vars=True).items()}
        identity = {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}
        opt = bits(copy.deepcopy(optimizer.state_dict())) if optimizer else None
        return held, identity, opt, bits(torch.get_rng_state())

    return take


@pytest.fixture
def checkpoint_of_40_mib(tmp_path):
    from workers.checkpoint import save

    return save(tmp_path / "source", 5, {"t": {"w": torch.randn(10 << 20)}}).path
