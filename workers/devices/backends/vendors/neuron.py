"""AWS Trainium and Inferentia2, through torch-neuronx, which provides them as torch-xla devices.

Not yet run on a device by us.
"""

import importlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cluster import catalogue
from workers.devices.backends import import_error, torch_settings
from workers.devices.backends.base import Later
from workers.devices.backends.xla import XLABackend


class NeuronBackend(XLABackend):
    BACKEND_NAME = "neuron"

    @classmethod
    def unavailable_reason(cls) -> str:
        """Also require libneuronxla: the torch_neuronx on public package indexes is an empty placeholder."""
        if not any(True for _ in Path("/dev").glob("neuron[0-9]*")):
            return "this node has no /dev/neuron*"
        if os.environ.setdefault("PJRT_DEVICE", "NEURON").upper() != "NEURON":
            return f"PJRT_DEVICE is {os.environ['PJRT_DEVICE']}, not NEURON"
        return import_error("torch_neuronx") or import_error("libneuronxla")

    @property
    def collective_backend(self) -> str:
        return "xla"

    def init_group(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        importlib.import_module("torch_xla.distributed.xla_backend")
        dist.init_process_group("xla", init_method="xla://", timeout=timeout)

    def _rng_type(self) -> str:
        return "neuron"

    def _info(self) -> dict[str, Any]:
        return super()._info() | {"device_name": "AWS Neuron"}

    def _configure(self, later: Later) -> None:
        folder = getattr(self.config, "persistent_cache", None)
        torch_settings.variable("NEURON_COMPILE_CACHE_URL", None if folder is None else str(folder), later)

    def _has_units(self, dtype: torch.dtype) -> bool | None:
        return catalogue.has_native_dtype("neuron", "", str(dtype))


Backend = NeuronBackend
