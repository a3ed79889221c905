"""Measure kernels on exactly the calls that a model makes of its modules."""

import torch
from torch import nn

from workers.kernels.dispatch.comparison import measure
from workers.kernels.dispatch.fastest import candidates
from workers.kernels.dispatch.probes import Probe
from workers.kernels.dispatch.tuner import REFERENCE, KernelMeasurement
from workers.kernels.models import kernel_insertion
from workers.measurement.sample import Sample


def measure_calls(
    model: nn.Module, sample: Sample, device: torch.device, *, compiled: bool = False
) -> list[KernelMeasurement]:
    """Measure every implementation of the device for each size that occurs in one call of the model."""
    sites, _ = kernel_insertion.find(model)
    calls = kernel_insertion.record(model, sites, sample, device)
    cases = dict.fromkeys((Probe(one.operation, one.shapes, one.causal), one.dtype) for one in calls)
    kernels = [one for name, one in candidates(device).items() if name != REFERENCE]
    return measure(list(cases), kernels, device, compiled=compiled)
