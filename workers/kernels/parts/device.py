"""Where kernels compute, and what crosses between torch's memory and a driver's own."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import psutil
import torch
from torch import Tensor

from cluster.errors import PolyfleetError, UserError
from workers.backends.parts.precision import name_of
from workers.errors import KernelsFailed
from workers.kernels.parts.arrays import Resident, operand


class Device(ABC):
    """`interpreted`: Python steps through what a compiler would make; results are right, and times mean nothing.
    `flushes_subnormals`: numbers below the smallest normal one of their dtype may count as 0, as the driver pleases.
    """

    name: ClassVar[str] = ""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float16, torch.bfloat16)
    interpreted: bool = False
    flushes_subnormals: bool = False
    device: torch.device
    fallback_from: str = ""
    fallback_reason: str = ""

    def __init__(self, device: Any = None):
        self.device = self._device(device)

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str:
        """Why these kernels cannot compute in this process, "" when they can."""

    @abstractmethod
    def device_info(self) -> dict[str, Any]:
        """`device` (torch's name of where arrays are), `device_name`, `driver`, `version`, `compiler`, and what else is
        known: plain data, with units in names.
        """

    def synchronize(self) -> None:
        """Return when everything asked so far has been computed."""

    def close(self) -> None:
        """Give compiled programs and cached memory back. The next call makes them anew."""

    def to_device(self, value: Any) -> Any:
        """`value` where these kernels compute without a copy for each call: a tensor, or a Resident. Contiguous."""
        return operand("value", value).tensor.to(self.device).contiguous()

    def to_host(self, value: Any) -> Tensor:
        """What a method answered, as a tensor in the memory of the CPU."""
        return operand("value", value).tensor.cpu()

    def free_bytes(self) -> int | None:
        """Memory that is free on the device; None where it does not tell."""
        if self.device.type == "cpu":
            return int(psutil.virtual_memory().available)
        module = torch.get_device_module(self.device)
        return int(module.mem_get_info(self.device)[0]) if hasattr(module, "mem_get_info") else None

    def takes(self, device: torch.device) -> bool:
        """Whether tensors there can be given to these kernels."""
        return device == self.device

    def __enter__(self) -> "Device":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__module__.rpartition('.')[2]}.{type(self).__name__}(device='{self.device}')"

    # Hooks

    def _device(self, device: Any) -> torch.device:
        """The device that was asked for (None: the one of these kernels). Raises UserError for one they do not have."""
        wanted = as_device("cpu" if device is None else device)
        if wanted.type != "cpu":
            raise UserError(f"kernels {self.name!r} do not compute on {wanted}", "they compute on cpu")
        return wanted

    def _imported(self, tensor: Tensor, written: bool = False) -> Any:
        """What hooks get of contiguous memory of torch's; `written` if they fill it."""
        return tensor

    def _exported(self, array: Any, tensor: Tensor) -> None:
        """Bring what hooks wrote to `array`, made of `tensor`, into that tensor."""

    def _viewed(self, buffer: Any, like: Tensor) -> Any:
        """What hooks get of a Resident's buffer; `like`, on the meta device, has shape and dtype."""
        raise NotImplementedError(f"{type(self).__name__} makes no arrays of its own")

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> Resident:
        """New memory of the driver's own."""
        raise NotImplementedError(f"{type(self).__name__} makes no arrays of its own")

    def _failure(self, error: Exception) -> PolyfleetError:
        """What a user reads of an error in a hook. The remedy is for memory that ended, as it mostly is."""
        told = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return KernelsFailed(self.name, told, "call it on fewer rows at a time, or use kernels 'torch'")

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in self.dtypes

    def dtype_names(self) -> tuple[str, ...]:
        return tuple(name_of(dtype) for dtype in self.dtypes)


def as_device(word: Any) -> torch.device:
    """Raises UserError for what torch does not know as a device."""
    try:
        return torch.device(word)
    except (RuntimeError, TypeError) as e:
        raise UserError(f"{word!r} is no device", "name one as torch does: cpu, cuda:0, xpu:0") from e
