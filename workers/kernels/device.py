"""The device of kernels, and transfers between torch's memory and a driver's own memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import psutil
import torch
from torch import Tensor

from cluster.errors import PolyfleetError, UserError, nearest
from workers.devices.backends.precision import name_of
from workers.errors import KernelsFailed
from workers.kernels.arrays import Resident, operand


class KernelDevice(ABC):
    """Base of kernels on one device. `interpreted`: Python interprets the kernels, so results are correct but times are
    meaningless. `flushes_subnormals`: the driver may treat subnormal numbers as 0. `differs_in`: the only operation in
    which a variant differs from its implementation ("": not a variant).
    """

    name: str = ""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float16, torch.bfloat16)
    interpreted: bool = False
    flushes_subnormals: bool = False
    differs_in: str = ""
    device: torch.device
    fallback_from: str = ""
    fallback_reason: str = ""

    def __init__(self, device: Any = None):
        self.device = self._device(device)

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str:
        """Return why these kernels cannot compute in this process, or ""."""

    @abstractmethod
    def device_info(self) -> dict[str, Any]:
        """Return plain data: `device` (torch's name of where arrays are), `device_name`, `driver`, `version`,
        `compiler`, and further facts with units in their names.
        """

    def synchronize(self) -> None:
        """Wait until everything requested so far has been computed."""

    def close(self) -> None:
        """Release compiled programs and cached memory. The next call creates them again."""

    def to_device(self, value: Any) -> Any:
        """Move `value` to where these kernels need no copy per call. Return a contiguous tensor or Resident."""
        return operand("value", value).tensor.to(self.device).contiguous()

    def to_host(self, value: Any) -> Tensor:
        """Convert a method's result to a tensor in the CPU's memory."""
        return operand("value", value).tensor.cpu()

    def free_bytes(self) -> int | None:
        """Return the free memory of the device in bytes, None if it does not report it."""
        if self.device.type == "cpu":
            return int(psutil.virtual_memory().available)
        module = torch.get_device_module(self.device)
        return int(module.mem_get_info(self.device)[0]) if hasattr(module, "mem_get_info") else None

    def takes(self, device: torch.device) -> bool:
        """Return whether these kernels accept tensors on `device`."""
        return device == self.device

    def __enter__(self) -> "KernelDevice":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__module__.rpartition('.')[2]}.{type(self).__name__}(device='{self.device}')"

    # Hooks

    def _device(self, device: Any) -> torch.device:
        """Resolve the requested device (None: the default). Raises UserError for one these kernels do not support."""
        target = as_device("cpu" if device is None else device)
        if target.type != "cpu":
            raise UserError(f"kernels {self.name!r} do not compute on {target}", "use device cpu")
        return target

    def _imported(self, tensor: Tensor, written: bool = False) -> Any:
        """Convert a contiguous tensor to the hooks' array type; `written` if hooks fill it."""
        return tensor

    def _exported(self, array: Any, tensor: Tensor) -> None:
        """Copy what hooks wrote to `array` into `tensor`, from which it was made."""

    def _viewed(self, buffer: Any, like: Tensor) -> Any:
        """Convert a Resident's buffer to the hooks' array type; `like` (meta device) has its shape and dtype."""
        raise NotImplementedError(f"{type(self).__name__} makes no arrays of its own")

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> Resident:
        """Allocate an array in the driver's own memory."""
        raise NotImplementedError(f"{type(self).__name__} makes no arrays of its own")

    def _failure(self, error: Exception) -> PolyfleetError:
        """Convert an error in a hook for the user. The remedy assumes the usual cause: too little memory."""
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return KernelsFailed(self.name, reason, "call it on fewer rows at a time, or use kernels 'torch'")

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in self.dtypes

    def dtype_names(self) -> tuple[str, ...]:
        return tuple(name_of(dtype) for dtype in self.dtypes)


class OwnMemory(KernelDevice):
    """Kernels whose driver has memory of its own: arrays are copied in each call, or once with `to_device`."""

    def to_device(self, value: Any) -> Resident:
        one = operand("value", value)
        if one.buffer is not None:
            return value if value.owner is self else self.to_device(value.owner.to_host(value))
        plain = one.tensor.detach().cpu().contiguous()
        return Resident(self, plain.shape, plain.dtype, self._uploaded(plain))

    def to_host(self, value: Any) -> Tensor:
        one = operand("value", value)
        if one.buffer is None:
            return one.tensor.cpu()
        host = torch.empty(one.tensor.shape, dtype=one.tensor.dtype)
        if host.numel():
            self._download(one.buffer, host)
        return host

    @abstractmethod
    def _uploaded(self, tensor: Tensor) -> Any:
        """Copy a contiguous tensor of the CPU to the driver's memory."""

    @abstractmethod
    def _download(self, buffer: Any, host: Tensor) -> None:
        """Fill `host` from the driver's memory."""


def find_device_named(what: str, name: str, devices: Sequence[Any], name_of: Callable[[Any], str]) -> Any:
    """Return the first device whose name contains `name`, in any case. Raises UserError if there is none."""
    matches = [one for one in devices if name.lower() in name_of(one).lower()]
    if not matches:
        raise UserError(f"no {what} is named {name!r}", nearest(name, [name_of(one) for one in devices]))
    return matches[0]


def why_no_device(devices: Callable[[], Sequence[Any]], no_driver: str, no_binding: str) -> str:
    """Return why `devices` finds none, or "". `no_binding`: the reason if Python's library for the driver is absent."""
    try:
        return "" if devices() else no_driver
    except ImportError:
        return no_binding
    except KernelsFailed as e:
        return e.reason
    except Exception as e:  # a driver's loader may raise anything
        return f"{no_driver}: {e}".splitlines()[0]


def as_device(name: Any) -> torch.device:
    """Convert to a torch.device. Raises UserError if torch does not know it."""
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as e:
        raise UserError(f"{name!r} is not a device", "write a torch device such as cpu, cuda:0 or xpu:0") from e
