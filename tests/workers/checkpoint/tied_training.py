"""A small training with tied weights, run by test_xla.py on both sides: here on the CPU, and as a program on XLA.

tied_training.py ROOT FROM TO     resume at step FROM from ROOT on the XLA device, train to TO, save there
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workers.checkpoint import load, save


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.middle = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.head(self.middle(self.embedding(tokens)))


def build(seed: int) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """The batch depends on the step alone, so that both sides see the same data."""
    device = next(model.parameters()).device
    if device.type == "xla":
        sync()  # one program a step, not one that grows with every step; the last step is left for save to sync
    tokens = torch.randint(0, 50, (32,), generator=torch.Generator().manual_seed(number)).to(device)
    loss = nn.functional.cross_entropy(model(tokens), (tokens * 7 + 3) % 50)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def sync() -> None:
    import torch_xla

    torch_xla.sync()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "rng": True}


def resume_on_xla(root: Path, start: int, end: int) -> dict[str, Any]:
    import torch_xla

    model, _ = build(seed=99)
    model = model.to(torch_xla.device())
    untied = model.head.weight is not model.embedding.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    loaded = load(root, state(model, optimizer), dtype="native", supported_dtypes=["float32", "bfloat16", "float16"])
    losses = [step(model, optimizer, number) for number in range(start, end)]
    save(root, end, state(model, optimizer), kind="tpu:emulated")
    slots = optimizer.state[model.embedding.weight]
    return {
        "torch": torch.__version__,
        "untied_by_the_move": untied,
        "tied_by_the_load": model.head.weight is model.embedding.weight,
        "retied": loaded.report.retied,
        "random": loaded.report.random,
        "resumed": loaded.step,
        "losses": losses,
        "devices": {name: slot.device.type for name, slot in slots.items()},
        "layout_kept": all(p.device.type == "xla" for p in model.parameters()),
    }


if __name__ == "__main__":
    print(json.dumps(resume_on_xla(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
