"""Fake copies of a model and of its input: they have shapes, strides and dtypes but no memory."""

import copy
from typing import Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.devices.backends.device_transfer import map_tensors, tensors_of
from workers.measurement.inputs import Sample, as_sample


def fake_copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Copy `model` with fake tensors on the CPU. Tied weights remain tied. Raises UserError if it cannot be copied."""
    fakes = {id(t): _fake(t, dtype) for t in tensors_in(model)}
    try:
        fake_model: nn.Module = copy.deepcopy(model, fakes)
    except (TypeError, RuntimeError) as e:
        raise UserError(
            f"the model cannot be copied: {e}", "estimate it before you add the part that cannot be copied"
        ) from e
    return fake_model


def _fake(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Make a fake tensor with the strides of the original; a Parameter remains one. Call it in a FakeTensorMode."""
    target_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=target_dtype, device="cpu")
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def sample_for(model: nn.Module, sample_input: Any, batch: int | None, seq: int | None) -> Sample:
    """Return the sample input, or token ids of (batch, seq) for a module that has `config.vocab_size`.

    Raises UserError if there is neither, or if the input is on another device than the model.
    """
    if sample_input is None and getattr(getattr(model, "config", None), "vocab_size", None) and seq:
        sample_input = torch.empty(batch or 1, seq, dtype=torch.long, device="meta")
    sample = as_sample(sample_input)
    if sample is None:
        raise UserError(
            "a module is traced, which needs an input",
            "pass sample_input, or seq for a module whose config has vocab_size",
        )
    model_devices = {t.device.type for t in tensors_in(model)} | {"meta"}
    other_devices = {t.device.type for t in tensors_of(sample)} - model_devices
    if other_devices and model_devices != {"meta"}:
        raise UserError(
            f"the sample input is on {', '.join(sorted(other_devices))}, "
            f"the model on {', '.join(sorted(model_devices - {'meta'}))}",
            "move one to the other, or pass a sample input on the meta device",
        )
    return sample


def fake_sample(sample: Sample, batch: int | None, seq: int | None, dtype: torch.dtype | None) -> Sample:
    """Copy `sample` to fake tensors with these sizes and this dtype. Call it in a FakeTensorMode."""

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        if batch and shape:
            shape[0] = batch
        if seq and len(shape) == 2 and not tensor.is_floating_point():
            shape[1] = seq
        target_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty(shape, dtype=target_dtype, device="cpu")

    return Sample(map_tensors(sample.args, resized), map_tensors(sample.kwargs, resized))


def tensors_in(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
