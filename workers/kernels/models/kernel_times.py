"""Measures kernels on exactly the calls that a model makes of its modules."""

import torch
from torch import nn

from workers.kernels.models import kernel_insertion
from workers.kernels.parts.comparison import measure
from workers.kernels.parts.fastest import candidates
from workers.kernels.parts.probes import Probe
from workers.kernels.tuner import REFERENCE, Measured
from workers.optimizers.pass_context import Sample


def measure_calls(model: nn.Module, sample: Sample, device: torch.device, *, compiled: bool = False) -> list[Measured]:
    """Every implementation that computes on the device, on each call of a size that one call of the model makes."""
    sites, _ = kernel_insertion.find(model)
    seen = kernel_insertion.record(model, sites, sample, device)
    wishes = dict.fromkeys((Probe(one.operation, one.shapes, one.causal), one.dtype) for one in seen)
    kernels = [one for name, one in candidates(device).items() if name != REFERENCE]
    return measure(list(wishes), kernels, device, compiled=compiled)
