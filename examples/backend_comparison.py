"""The same model on every back end of this machine: how fast, and how far from the CPU's answer.

    python examples/backend_comparison.py

For figures to rely on, with intervals and across a fleet, use `polyfleet benchmark`.
"""

from statistics import median
from time import perf_counter

import torch
from torch import nn

from workers import get_backend, list_available_backends, print_backend_summary


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 10)).eval()


def measure(name: str, model: nn.Module, sample: torch.Tensor, calls: int = 20) -> tuple[float, torch.Tensor]:
    """Median seconds of a call, each waited for, and the output back on the CPU."""
    with get_backend(name) as backend, torch.no_grad():
        prepared, sample = backend.prepare_model(model), backend.to_device(sample)
        times = []
        for _ in range(calls + 1):
            start = perf_counter()
            output = prepared(sample)
            backend.synchronize()
            times.append(perf_counter() - start)
        return median(times[1:]), output.cpu()  # the first call compiles, or warms up


def compare() -> dict[str, tuple[float, float]]:
    """Name to median seconds and largest difference from the untouched model on the CPU."""
    model, sample = make_model(), torch.randn(32, 256)
    with torch.no_grad():
        expected = model(sample)
    found = {}
    for name in list_available_backends():
        seconds, output = measure(name, model, sample)
        found[name] = seconds, (output - expected).abs().max().item()
    return found


if __name__ == "__main__":
    print_backend_summary()
    for name, (seconds, difference) in compare().items():
        print(f"{name:8} {seconds * 1e3:8.3f} ms   differs by {difference:.1e}")
