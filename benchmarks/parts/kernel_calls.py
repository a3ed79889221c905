"""What a call of an operator costs without its computation: microseconds of calls with one short row."""

import random
from collections.abc import Callable
from typing import Any

import torch
from parts.kernel_works import WORKS, Arrays, arrays
from torch import Tensor

from workers.kernels.dispatch import operators
from workers.measurement.statistics import interval, paired

SHAPES = {
    **dict.fromkeys(("rmsnorm", "layernorm", "softmax", "silu", "swiglu", "rope"), (1, 16)),
    "matmul": (2, 16, 16),
    "attention": (1, 1, 1, 2, 2, 16),
}
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "rope": operators.apply_rope,
    **{name: getattr(operators, name) for name in SHAPES if name != "rope"},
}
CALLS = 300
"""Calls of one sample."""


def calls_of(name: str, given: Arrays, made: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Calls of torch's function, of each of the kernels' methods, and of the operator with these kernels."""
    work, operator = WORKS[name], OPERATORS[name]
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: work.eager(*given)}
    for kernels, one in made.items():
        calls[f"{kernels} method"] = lambda one=one: work.ours(one, *given)
        calls[f"{kernels} operator"] = lambda kernels=kernels: operator(*given, kernels=kernels)
    return calls


def measure_calls(
    made: dict[str, Any], rounds: int, device: str, clocked: Callable[[Callable[[], Any], int, str], float]
) -> list[dict[str, Any]]:
    """Rows with seconds of each call, and of an operator's call beyond torch's and beyond its method: [median, low,
    high] of the rounds.
    """
    rows = []
    for name, shape in SHAPES.items():
        calls = calls_of(name, arrays(name, shape, torch.float32, device), made)
        samples = _samples(calls, rounds, device, clocked)
        beyond = {
            kernels: {peer: _beyond(samples, kernels, peer) for peer in ("eager", f"{kernels} method")}
            for kernels in made
        }
        ratios = {kernels: paired(samples[f"{kernels} operator"], samples["eager"]).ratio for kernels in made}
        seconds = {case: list(interval(values)) for case, values in samples.items()}
        rows.append({"operation": name, "shape": shape, "seconds": seconds, "operator_beyond_s": beyond,
                     "operator_over_eager": ratios})  # fmt: skip
    return rows


def _beyond(samples: dict[str, list[float]], kernels: str, peer: str) -> list[float]:
    return list(interval([a - b for a, b in zip(samples[f"{kernels} operator"], samples[peer], strict=True)]))


def _samples(calls: dict[str, Callable[[], Any]], rounds: int, device: str, clocked: Any) -> dict[str, list[float]]:
    """Every call runs once per round, in a shuffled order, without gradients."""
    samples: dict[str, list[float]] = {case: [] for case in calls}
    with torch.no_grad():
        for call in calls.values():
            clocked(call, CALLS, device)
        for number in range(rounds):
            order = list(calls)
            random.Random(number).shuffle(order)
            for case in order:
                samples[case].append(clocked(calls[case], CALLS, device))
    return samples
