"""Fake copies of a model and of its input: shapes, strides and dtypes, and no memory."""

import copy
from typing import Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.backends.parts.device_transfer import map_tensors, tensors_of
from workers.optimizers.pass_context import Sample, as_sample


def fake_copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy whose tensors are fake: they have shapes and no memory. Ties stay; the device is the CPU."""
    fakes = {id(t): _fake(t, dtype) for t in tensors_in(model)}
    try:
        twin: nn.Module = copy.deepcopy(model, fakes)
    except (TypeError, RuntimeError) as e:
        raise UserError(f"the model cannot be copied: {e}", "estimate it before what cannot be copied is added") from e
    return twin


def _fake(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Called in a FakeTensorMode. Contiguous or in the strides of the original, parameters as parameters."""
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def sample_for(model: nn.Module, sample_input: Any, batch: int | None, seq: int | None) -> Sample:
    """Raises UserError where there is none and the module does not tell, or where it is on another device."""
    if sample_input is None and getattr(getattr(model, "config", None), "vocab_size", None) and seq:
        sample_input = torch.empty(batch or 1, seq, dtype=torch.long, device="meta")
    sample = as_sample(sample_input)
    if sample is None:
        raise UserError(
            "a module is traced, which takes an input",
            "give sample_input, or seq for a module whose config tells vocab_size",
        )
    here = {t.device.type for t in tensors_in(model)} | {"meta"}
    elsewhere = {t.device.type for t in tensors_of(sample)} - here
    if elsewhere and here != {"meta"}:
        raise UserError(
            f"the sample input is on {', '.join(sorted(elsewhere))}, the model on {', '.join(sorted(here - {'meta'}))}",
            "move one to the other, or give a sample input on the meta device",
        )
    return sample


def fake_sample(sample: Sample, batch: int | None, seq: int | None, dtype: torch.dtype | None) -> Sample:
    """Of those sizes and that dtype, without memory. Called in a FakeTensorMode."""

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        if batch and shape:
            shape[0] = batch
        if seq and len(shape) == 2 and not tensor.is_floating_point():
            shape[1] = seq
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty(shape, dtype=wanted, device="cpu")

    return Sample(map_tensors(sample.args, resized), map_tensors(sample.kwargs, resized))


def tensors_in(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
