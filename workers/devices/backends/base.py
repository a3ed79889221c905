"""Base class of backends: one device of one vendor. Public methods do the common work; a vendor overrides short hooks.

What users call beyond this contract, such as `backend.prepare_model(model)`, is functions: see user_methods.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from cluster import catalogue
from cluster.errors import UserError
from workers.devices.backends import BackendUnavailable, device_description, device_transfer
from workers.devices.backends.device_facts import Traits
from workers.devices.backends.dtype_checks import probe_dtype_support, require_dtype
from workers.devices.backends.precision import dtype_of, precision_of
from workers.devices.backends.user_methods import BackendMeta
from workers.devices.capability.device_info import DeviceInfo
from workers.errors import OutOfDeviceMemory
from workers.options.config import ConfigLike, VendorConfig, enabled_backends, libraries_of, section_of
from workers.options.library_config import apply
from workers.options.optimization_levels import OptimizationLevel

Memory = dict[str, int | None]
Later = Callable[..., Any]


class BaseBackend(metaclass=BackendMeta):
    """One device of one vendor in this process.

    `config` is a PolyfleetConfig or a dict of its options; only the vendor's section and the libraries are used.
    Their options, and the choice of the device, take effect while the backend is entered as a context manager; leaving
    it restores what entering changed and frees caches. Raises BackendUnavailable with the reason if no such device
    can be used.
    """

    BACKEND_NAME: ClassVar[str] = ""
    traits: Traits = Traits()
    """Facts about the device that the preparation of a model depends on."""
    emulated: bool = False
    """True if the CPU emulates the device; its timings then do not predict those of a real one."""

    def __init__(
        self,
        config: ConfigLike | VendorConfig = None,
        *,
        device_id: int = 0,
        optimization_level: str | OptimizationLevel = OptimizationLevel.O1,
    ):
        self.optimization_level = OptimizationLevel.from_string(optimization_level)
        self.config = section_of(config, self.BACKEND_NAME)
        self.libraries = libraries_of(config)
        if reason := self.unavailable_reason():
            raise BackendUnavailable(self.BACKEND_NAME, reason, enabled_backends(config))
        self.device_id = self._check_device_id(device_id)
        self.device = self._device(device_id)
        self._stacks: list[ExitStack] = []
        self._dtype_support: dict[torch.dtype, str] = {}

    # Availability

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str:
        """Return the reason why no device of this backend can be used in this process, "" if one can."""

    @classmethod
    @abstractmethod
    def count_devices(cls) -> int:
        """Number of devices visible to this process."""

    def get_device_info(self, device_id: int | None = None) -> DeviceInfo:
        """Describe a device (None: this one); its dtypes come from probes on the device.

        Raises UserError for a number out of range.
        """
        if device_id is None or self._check_device_id(device_id) == self.device_id:
            return device_description.device_info(self)
        return device_description.device_info(type(self)(self.config, device_id=device_id))

    def set_device(self, device_id: int) -> None:
        """Switch to another device of this process. Raises UserError for a number out of range."""
        self.device = self._device(self._check_device_id(device_id))
        self.device_id = device_id
        self._dtype_support = {}
        if self._stacks:
            self._select()

    # Data and time

    def to_device(self, value: Any, non_blocking: bool = False) -> Any:
        """Move nested data to the device. A module moves in place and keeps tied parameters tied.

        An object that has a method `to` moves by that.
        """
        return device_transfer.move_to_device(value, self.device, non_blocking)

    def synchronize(self) -> None:
        """Wait until the device has finished all work submitted so far."""

    def step_boundary(self) -> None:
        """Mark the end of a step. A backend with lazy tensors submits the step's graph here, without waiting for it."""

    # Memory

    def empty_cache(self) -> None:
        """Return cached, unused memory to the device."""

    @abstractmethod
    def get_memory_stats(self) -> Memory:
        """Return allocated_, reserved_, peak_, free_ and total_bytes; None for values the device does not report."""

    def peak_of(self, call: Callable[[], object]) -> int | None:
        """Peak bytes allocated on the device while `call` runs; None if the device cannot reset its peak."""
        return None

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate device memory as a uint8 tensor [nbytes] with undefined content. Release it with `free`.

        Raises UserError for an invalid size, OutOfDeviceMemory if `nbytes` exceeds the free memory.
        """
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
            raise UserError(f"{nbytes!r} is not a size in bytes", "give an integer of at least 0")
        free = self.get_memory_stats()["free_bytes"]
        if free is not None and nbytes > free:
            raise OutOfDeviceMemory(str(self.device), nbytes, free)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def free(self, buffer: torch.Tensor) -> None:
        """Release a tensor from `allocate`. Remaining references to it then have 0 bytes."""
        buffer.data = torch.empty(0, dtype=buffer.dtype, device=buffer.device)

    # Precision

    def dtype_support(self, dtype: str | torch.dtype) -> str:
        """`native`, `emulated` (computed by conversion, or at a small fraction of float32's speed) or `absent`.

        Probed on the device, once per kind of device and set of libraries; results are cached in POLYFLEET_HOME.
        """
        requested = dtype_of(dtype)
        if requested not in self._dtype_support:
            self._dtype_support[requested] = probe_dtype_support(self, requested)
        return self._dtype_support[requested]

    def autocast(self, dtype: str | torch.dtype | None) -> AbstractContextManager[Any]:
        """Autocast context for a dtype; no effect for float32, None and "". Raises UserError if the dtype is absent."""
        requested = precision_of(dtype)
        require_dtype(self, requested)
        return nullcontext() if requested == torch.float32 else torch.autocast(self.device.type, dtype=requested)

    # Multiple ranks

    @property
    @abstractmethod
    def collective_backend(self) -> str:
        """The torch.distributed backend for tensors on this device."""

    def init_group(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        """Initialize the default process group of torch.distributed."""
        dist.init_process_group(self.collective_backend, store=store, rank=rank, world_size=world_size, timeout=timeout)

    def data_parallel(self, model: nn.Module) -> nn.Module:
        """Wrap `model`, already on the device, so that backward averages gradients over the ranks."""
        return nn.parallel.DistributedDataParallel(model)

    # Context manager and copies

    def __enter__(self) -> BaseBackend:
        self._stacks.append(ExitStack())
        try:
            self._enter(self._stacks[-1].callback)
            self._configure(self._stacks[-1].callback)
            self._stacks[-1].enter_context(apply(self.libraries))
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()
        self.empty_cache()

    def _leave(self) -> None:
        self._stacks.pop().close()

    def __deepcopy__(self, memo: dict[int, Any]) -> BaseBackend:
        """Return self: copying a model that refers to a backend must not copy the device."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device='{self.device}', optimization_level={self.optimization_level.value!r})"

    # Hooks

    def _check_device_id(self, device_id: int) -> int:
        count = self.count_devices()
        if isinstance(device_id, bool) or not isinstance(device_id, int) or not 0 <= device_id < count:
            raise UserError(
                f"{self.BACKEND_NAME} has no device {device_id}", f"this process sees {count}, numbered from 0"
            )
        return device_id

    def _device(self, device_id: int) -> torch.device:
        return torch.device(catalogue.vendor(self.BACKEND_NAME).torch_device, device_id)

    def _info(self) -> dict[str, Any]:
        """Values for DeviceInfo that this vendor provides; a key that is not a field is stored in `properties`."""
        return {}

    def _enter(self, later: Later) -> None:
        """Change process-wide state that this backend needs; pass `later` a function that restores it."""

    def _configure(self, later: Later) -> None:
        """Apply the options of `self.config`; pass `later` a function that restores each."""

    def _select(self) -> None:
        """Make `self.device` torch's current device of its type."""

    def _seed_device(self, number: int) -> None:
        """Seed generators that torch.manual_seed does not seed."""

    def _rng_type(self) -> str:
        """Type of random state. Devices with equal types can exchange random states."""
        return self.device.type

    def _device_rng(self) -> Any:
        return None

    def _set_device_rng(self, state: Any) -> None:
        """Restore a state from `_device_rng`."""

    def _has_units(self, dtype: torch.dtype) -> bool | None:
        """Return whether the device computes natively with a dtype, as documented; None if it must be probed."""
        return True
