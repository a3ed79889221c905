"""One training loop for every back end: the best that is here, or the one you name.

python examples/cross_platform_training.py [BACKEND]        e.g. cpu, cuda, xla
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from workers import create_with_memory_check, estimate_memory


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on every device: drawn on the CPU."""
    x = torch.rand(256, 1, generator=torch.Generator().manual_seed(step)) * 6
    return x, torch.sin(x)


def train(name: str = "auto", steps: int = 200) -> float:
    torch.manual_seed(0)
    model = make_model()
    needed = estimate_memory(model, mode="training", optimizer="adam", sample_input=batch(0)[0])
    with create_with_memory_check([name], needed) as backend:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer = backend.optimize_for_training(model, optimizer)
        for step in range(steps):
            x, y = backend.to_device(batch(step))
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        print(f"{backend.device}: loss {loss.item():.4f} after {steps} steps; {needed}")
        return loss.item()


if __name__ == "__main__":
    train(*sys.argv[1:2])
