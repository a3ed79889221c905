"""Choose among torch's kernels for attention by stored measurements. Without any, torch's own order decides.

A call never measures. The lines are those of the variants `torch:flash`, `torch:math`, …, which
`polyfleet kernels tune attention` measures against torch's own choice.
"""

import math

import torch
from torch import Tensor

from workers import kernels as registry
from workers.devices.backends.precision import name_of
from workers.kernels.dispatch.classes import shape_class
from workers.kernels.dispatch.fastest import agreed_choices, agreed_text, kind_of, torch_variants
from workers.kernels.dispatch.tuner import Situation, fastest_choices, read_measurements, software_of

UNMEASURED = 1.0
"""Speed of a kernel without measurements, relative to torch's choice."""


class AttentionChoice:
    """The fastest kernel for each class of shapes. Measurements are read once for each device, at its first call.

    With torch.distributed, all ranks on one kind of device use the first rank's choice.
    """

    def __init__(self) -> None:
        self._choices: dict[torch.device, tuple[str, dict[Situation, str]]] = {}

    def __call__(self, q: Tensor, k: Tensor, dtype: torch.dtype, gradient: bool) -> str:
        if q.device not in self._choices:
            kind = kind_of(q.device)
            own_choices = fastest_choices(kind, _software(q.device))
            self._choices[q.device] = kind, agreed_choices("attention", kind, own_choices)
        kind, choices = self._choices[q.device]
        shapes = shape_class("attention", q.shape, k.shape)
        return choices.get(Situation(kind, "attention", name_of(dtype), shapes, gradient), "").partition(":")[2]


def measured_order(device: torch.device) -> tuple[str, ...]:
    """Return torch's kernels for attention on the device, the fastest of all measured calls first; () if none was.

    A kernel's speed is the geometric mean of its measurements relative to torch's choice.
    """
    kind, software = kind_of(device), _software(device)
    last = {
        (one.situation, one.kernels): one
        for one in read_measurements()
        if one.situation.kind == kind and software.get(one.kernels) == one.software
    }
    speeds = {
        name: [math.log(one.speedup) for (_, kernels), one in last.items() if kernels == name and one.right]
        for name in software
    }
    means = {name: sum(logs) / len(logs) if logs else math.log(UNMEASURED) for name, logs in speeds.items()}
    order = sorted(means, key=lambda name: -means[name]) if any(speeds.values()) else []
    agreed = agreed_text(f"attention order/{kind}", ",".join(name.partition(":")[2] for name in order))
    return tuple(agreed.split(",")) if agreed else ()


def _software(device: torch.device) -> dict[str, str]:
    return {name: software_of(registry.create(name, device)) for name in torch_variants(device)}
