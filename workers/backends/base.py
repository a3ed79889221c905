"""The contract of a back end: what one device is and does. What is done to models lives above, in workers/optimizers.

A public method does the common work; a vendor fills short hooks where it differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from cluster import catalogue
from cluster.errors import UserError
from workers.backends.parts import device_description, device_transfer, dtype_probe, random_state
from workers.backends.parts.precision import dtype_of, precision_of
from workers.backends.parts.traits import Traits
from workers.compat import CompatMethods
from workers.config import Given, VendorConfig, enabled, libraries_of, section
from workers.device_info import DeviceInfo
from workers.errors import BackendUnavailable, OutOfDeviceMemory
from workers.libraries.library_config import apply
from workers.optimization_levels import OptimizationLevel

Memory = dict[str, int | None]
Later = Callable[..., Any]


class BaseBackend(CompatMethods, ABC):
    """One device of one vendor in this process.

    `config` is a PolyfleetConfig, or a dict of its options, of which the vendor's section and the libraries are used.
    Their options, and the choice of the device, take effect while the back end is entered as a context manager; leaving
    gives back what entering changed and frees caches. Raises BackendUnavailable with the reason where no such device
    can be used.
    """

    BACKEND_NAME: ClassVar[str] = ""
    traits: Traits = Traits()
    """What preparing a model has to know of the device."""
    emulated: bool = False
    """The device computes on the CPU; its numbers say nothing of the real one."""

    def __init__(
        self,
        config: Given | VendorConfig = None,
        *,
        device_id: int = 0,
        optimization_level: str | OptimizationLevel = OptimizationLevel.O1,
    ):
        self.optimization_level = OptimizationLevel.from_string(optimization_level)
        self.config = section(config, self.BACKEND_NAME)
        self.libraries = libraries_of(config)
        if reason := self.unavailable_reason():
            raise BackendUnavailable(self.BACKEND_NAME, reason, enabled(config))
        self.device_id = self._checked(device_id)
        self.device = self._device(device_id)
        self._stacks: list[ExitStack] = []
        self._answers: dict[torch.dtype, str] = {}

    # Is it here?

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str:
        """Why no device of this backend can be used in this process, "" when one can."""

    @classmethod
    @abstractmethod
    def count_devices(cls) -> int:
        """Devices this process sees."""

    def get_device_info(self, device_id: int | None = None) -> DeviceInfo:
        """What this environment knows of a device (None: this one); its dtypes are those tried out on it. Raises
        UserError for a number out of range.
        """
        if device_id is None or self._checked(device_id) == self.device_id:
            return device_description.device_info(self)
        return device_description.device_info(type(self)(self.config, device_id=device_id))

    def set_device(self, device_id: int) -> None:
        """Go on with another device of this process. Raises UserError for a number out of range."""
        self.device = self._device(self._checked(device_id))
        self.device_id = device_id
        self._answers = {}
        if self._stacks:
            self._select()

    # Data and time

    def to_device(self, value: Any, non_blocking: bool = False) -> Any:
        """Nested data with its tensors here. A module moves in place with its ties; an object with a `to` uses that."""
        return device_transfer.move_to_device(value, self.device, non_blocking)

    def synchronize(self) -> None:
        """Return when everything asked of the device so far has been computed."""

    def step_boundary(self) -> None:
        """End of one step. Where tensors are lazy the step's graph is cut and sent off here; nothing waits."""

    # Memory

    def empty_cache(self) -> None:
        """Give memory that is cached but unused back to the device."""

    @abstractmethod
    def get_memory_stats(self) -> Memory:
        """allocated_, reserved_, peak_, free_ and total_bytes; None for what this device does not tell."""

    def peak_of(self, call: Callable[[], object]) -> int | None:
        """Bytes held on the device at the highest while `call` runs; None where the device counts no peak anew."""
        return None

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory as a uint8 tensor [nbytes], its content undefined; for `free`.

        Raises UserError for a size that is none, OutOfDeviceMemory where more is asked for than is free.
        """
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
            raise UserError(f"{nbytes!r} is no size in bytes", "give a whole number of at least 0")
        free = self.get_memory_stats()["free_bytes"]
        if free is not None and nbytes > free:
            raise OutOfDeviceMemory(str(self.device), nbytes, free)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def free(self, buffer: torch.Tensor) -> None:
        """Give back what `allocate` returned, though references to it remain: they then see no bytes."""
        buffer.data = torch.empty(0, dtype=buffer.dtype, device=buffer.device)

    # Random numbers

    def seed(self, number: int) -> None:
        """Seed Python, NumPy, torch and the device."""
        random_state.seed_host(number)
        self._seed_device(number)

    def rng_state(self) -> dict[str, Any]:
        """State of every generator, as tensors and numbers. It can be set again on the same type of device only."""
        return {"device_type": self._rng_type(), "device": self._device_rng(), "host": random_state.capture_host()}

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Raises UserError for a state of another type of device: those bits mean nothing here."""
        if not self.accepts_rng_state(state):
            raise UserError(
                f"random state of {state['device_type']} cannot be set on {self._rng_type()}",
                "seed instead; workers.backends.parts.random_state.derived_seed gives a number to seed with",
            )
        random_state.restore_host(state["host"])
        self._set_device_rng(state["device"])

    # Precision

    def dtype_support(self, dtype: str | torch.dtype) -> str:
        """`native`, `emulated` (computed by conversion, or at a small fraction of float32's speed) or `absent`.

        Tried out on the device, once per kind of device and set of libraries: the answers are kept in POLYFLEET_HOME.
        """
        wanted = dtype_of(dtype)
        if wanted not in self._answers:
            self._answers[wanted] = dtype_probe.dtype_support_probe(self, wanted)
        return self._answers[wanted]

    def autocast(self, dtype: str | torch.dtype | None) -> AbstractContextManager[Any]:
        """Lower precision where torch deems it safe; nothing for float32, None and "". Raises UserError if absent."""
        wanted = precision_of(dtype)
        self.require_dtype(wanted)
        return nullcontext() if wanted == torch.float32 else torch.autocast(self.device.type, dtype=wanted)

    # Several ranks

    @property
    @abstractmethod
    def collective_backend(self) -> str:
        """The torch.distributed backend for tensors on this device."""

    def init_group(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        """Make the default group of torch.distributed."""
        dist.init_process_group(self.collective_backend, store=store, rank=rank, world_size=world_size, timeout=timeout)

    def data_parallel(self, model: nn.Module) -> nn.Module:
        """`model`, already here, with gradients averaged over the ranks during backward."""
        return nn.parallel.DistributedDataParallel(model)

    # Giving back

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
        """A device is not copied with a model that knows it."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device='{self.device}', optimization_level={self.optimization_level.value!r})"

    # Hooks

    def _checked(self, device_id: int) -> int:
        count = self.count_devices()
        if isinstance(device_id, bool) or not isinstance(device_id, int) or not 0 <= device_id < count:
            raise UserError(
                f"{self.BACKEND_NAME} has no device {device_id}", f"this process sees {count}, numbered from 0"
            )
        return device_id

    def _device(self, device_id: int) -> torch.device:
        return torch.device(catalogue.vendor(self.BACKEND_NAME).torch_device, device_id)

    def _info(self) -> dict[str, Any]:
        """Fields of DeviceInfo that this vendor knows; those without a field of their own belong in `properties`."""
        return {}

    def _enter(self, later: Later) -> None:
        """Change what this backend needs changed in the process; give `later` a function that changes it back."""

    def _configure(self, later: Later) -> None:
        """Apply the options of `self.config`; give `later` a function that changes each back."""

    def _select(self) -> None:
        """Make `self.device` the one torch takes for this device type without a number."""

    def _seed_device(self, number: int) -> None:
        """torch.manual_seed has seeded what torch knows; here is for what it does not."""

    def _rng_type(self) -> str:
        """Random states move freely between devices that answer the same."""
        return self.device.type

    def _device_rng(self) -> Any:
        return None

    def _set_device_rng(self, state: Any) -> None:
        """Set what `_device_rng` returned."""

    def _has_units(self, dtype: torch.dtype) -> bool | None:
        """Whether the device computes with a dtype that it holds, by its documents; None: a probe measures it."""
        return True
