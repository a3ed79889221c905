"""Differences between two results, computed in float64 on the CPU."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cluster.errors import UserError
from workers.devices.backends.device_transfer import tensors_of


class Difference(NamedTuple):
    """`max_rel` is max |actual - expected| / max |expected|; inf if only one has a NaN or infinity at a position."""

    max_abs: float
    max_rel: float
    largest: float


def all_tensors(output: Any) -> list[torch.Tensor]:
    """Return every tensor of a model's output, in order. Raises UserError if there is none."""
    if hasattr(output, "to_tuple"):  # outputs of transformers models
        output = output.to_tuple()
    tensors = tensors_of(output)
    if not tensors:
        raise UserError(f"the model returned {type(output).__name__} without a tensor", "return a tensor first")
    return tensors


def first_tensor(output: Any) -> torch.Tensor:
    """Return the first tensor of a model's output. Raises UserError if there is none."""
    return all_tensors(output)[0]


def largest_difference(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Difference:
    """Return the largest difference of any pair, each relative to its own largest value; inf if the counts differ."""
    if len(actual) != len(expected):
        return Difference(float("inf"), float("inf"), 0.0)
    differences = [difference(a, b) for a, b in zip(actual, expected, strict=True)]
    return Difference(
        max(d.max_abs for d in differences), max(d.max_rel for d in differences), max(d.largest for d in differences)
    )


def difference(actual: torch.Tensor, expected: torch.Tensor) -> Difference:
    """Compare two tensors of one shape. Raises UserError if the shapes differ."""
    if actual.shape != expected.shape:
        raise UserError(
            f"outputs have shapes {tuple(actual.shape)} and {tuple(expected.shape)}", "make the model deterministic"
        )
    a, b = (t.detach().cpu().to(torch.complex128 if t.is_complex() else torch.float64) for t in (actual, expected))
    if a.numel() == 0:
        return Difference(0.0, 0.0, 0.0)
    finite = torch.isfinite(a) & torch.isfinite(b)
    same_odd = torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()) and torch.equal(a.isnan(), b.isnan())
    if not same_odd:
        return Difference(float("inf"), float("inf"), float(b.abs().max()))
    if not finite.any():
        return Difference(0.0, 0.0, 0.0)
    gap, largest = float((a - b)[finite].abs().max()), float(b[finite].abs().max())
    return Difference(gap, gap / largest if largest else (0.0 if gap == 0 else float("inf")), largest)
