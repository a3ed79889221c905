"""How far one result is from another, in float64 on the CPU, whichever side was computed first."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cluster.errors import UserError
from workers.backends.parts.device_transfer import tensors_of


class Difference(NamedTuple):
    """`max_rel` is max |have - want| over max |want|; inf when either has a NaN or infinity the other has not."""

    max_abs: float
    max_rel: float
    largest: float


def all_tensors(output: Any) -> list[torch.Tensor]:
    """Every tensor of a model's output, in order. Raises UserError when there is none."""
    if hasattr(output, "to_tuple"):  # outputs of transformers models
        output = output.to_tuple()
    tensors = tensors_of(output)
    if not tensors:
        raise UserError(f"the model returned {type(output).__name__} without a tensor", "return a tensor first")
    return tensors


def first_tensor(output: Any) -> torch.Tensor:
    """The first tensor of a model's output. Raises UserError when there is none."""
    return all_tensors(output)[0]


def largest_difference(have: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> Difference:
    """The largest difference of any pair, each relative to its own largest value; inf where their numbers differ."""
    if len(have) != len(want):
        return Difference(float("inf"), float("inf"), 0.0)
    found = [difference(a, b) for a, b in zip(have, want, strict=True)]
    return Difference(max(d.max_abs for d in found), max(d.max_rel for d in found), max(d.largest for d in found))


def difference(have: torch.Tensor, want: torch.Tensor) -> Difference:
    """Raises UserError when the shapes differ."""
    if have.shape != want.shape:
        raise UserError(
            f"outputs have shapes {tuple(have.shape)} and {tuple(want.shape)}", "make the model deterministic"
        )
    a, b = (t.detach().cpu().to(torch.complex128 if t.is_complex() else torch.float64) for t in (have, want))
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
