"""Models and optimizers as other people's programs build them, saved as those save them: with torch.save."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.ln = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(self.ln(x))))


class Language(nn.Module):
    """Shaped like a small GPT: blocks between an embedding and a head that are one tensor."""

    def __init__(self, width: int = 8, blocks: int = 2):
        super().__init__()
        self.wte = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, 20, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


class WithUnused(Language):
    """Some of its parameters never get a gradient, and so no state."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.ParameterList([torch.ones(3), torch.ones(20, 8)])


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as nanoGPT and many others make them, so that numbers are not in the order of the module."""
    parameters = [*model.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> list[float]:
    made = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 20, (6,), generator=made)
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved(path: Path, make: Make = decayed, model: "nn.Module | None" = None, **more: Any) -> Path:
    """A file of {"model", "optimizer", …} after three steps."""
    model = model or Language()
    optimizer = make(model)
    train(model, optimizer, 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}, path)
    return path


def resumed_by_torch(
    file: Path, make: Make = decayed, model: "nn.Module | None" = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What the program that saved the file would go on with."""
    model = model or Language()
    optimizer = make(model)
    held = torch.load(file, weights_only=True)
    model.load_state_dict({name.removeprefix("_orig_mod."): tensor for name, tensor in held["model"].items()})
    optimizer.load_state_dict(held["optimizer"])
    return model, optimizer
