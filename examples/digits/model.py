"""A small convolutional network for 8x8 digits, and inputs to time it with."""

import torch
from torch import nn


def make_model() -> nn.Module:
    """Images (B, 1, 8, 8) to logits (B, 10); 29 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def sample_input(batch_size: int) -> torch.Tensor:
    return torch.rand(batch_size, 1, 8, 8)
