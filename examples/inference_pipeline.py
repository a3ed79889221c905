"""Inference end to end: will it fit, where does it run, what made it faster, and is the answer still right.

python examples/inference_pipeline.py [LEVEL]        O0, O1, O2 or O3; O1 if left out
"""

import sys

import torch
from torch import nn

from workers import create_with_memory_check, estimate_memory, get_optimizer


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    ).eval()


def images(count: int, size: int = 8) -> list[torch.Tensor]:
    return list(torch.randn(count, size, 3, 32, 32))


def classify(level: str = "O1", batches: int = 4) -> list[int]:
    """The most likely class of every image."""
    model, queue = make_model(), images(batches)
    needed = estimate_memory(model, sample_input=queue[0])
    with create_with_memory_check(["auto", "cpu"], needed) as backend, torch.no_grad():
        print(f"{backend.device} has room: {needed}")
        model, report = get_optimizer(backend.BACKEND_NAME).optimize(model, level, backend.to_device(queue[0]))
        print(f"{level}: {', '.join(report.optimizations_applied) or 'nothing applied'}")
        for name, reason in report.optimizations_skipped.items():
            print(f"  skipped {name}: {reason}")
        return [label for batch in queue for label in model(backend.to_device(batch)).argmax(-1).tolist()]


if __name__ == "__main__":
    print(classify(*sys.argv[1:2]))
