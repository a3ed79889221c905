"""Accept arrays of callers: torch tensors, NumPy arrays, arrays with DLPack, and our own that stay on a device.
Arguments that are numbers are checked here, too.

Internally all arrays are torch tensors that share the memory, without a copy. An array in a driver's own memory is
represented by a tensor on torch's meta device, which has a shape but no values, and the driver's buffer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor

from cluster.errors import UserError
from workers.devices.backends.precision import name_of

if TYPE_CHECKING:
    from workers.kernels.device import KernelDevice

META = torch.device("meta")
Back = Callable[[Tensor], Any]


class Resident:
    """A contiguous array in a driver's own memory, which torch cannot access.

    Methods of the kernels that made it accept it like a tensor, and return a Resident for a Resident.
    """

    def __init__(self, owner: "KernelDevice", shape: torch.Size, dtype: torch.dtype, buffer: Any):
        self.owner, self.buffer = owner, buffer
        self.like = torch.empty(shape, dtype=dtype, device=META)

    @property
    def shape(self) -> torch.Size:
        return self.like.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def nbytes(self) -> int:
        return self.like.nbytes

    def __repr__(self) -> str:
        return f"Resident(shape={tuple(self.shape)}, dtype={name_of(self.dtype)}, kernels={self.owner.name!r})"


@dataclass(slots=True, eq=False)
class Operand:
    """One array of a call. `name` is its parameter; `back` converts a tensor to the caller's type; `is_callers_output`:
    it is an output that the caller passed.
    """

    name: str
    tensor: Tensor
    buffer: Any = None
    back: Back | None = None
    is_callers_output: bool = False

    def returned(self, tensor: Tensor) -> Any:
        return tensor if self.back is None else self.back(tensor)


def operand(name: str, value: Any) -> Operand:
    """Convert an array to an Operand. Raises UserError for other objects, and for memory or dtypes torch cannot use."""
    if isinstance(value, Tensor):
        return Operand(name, _checked_tensor(name, value))
    if isinstance(value, Resident):
        return Operand(name, value.like, value.buffer)
    if isinstance(value, np.ndarray):
        return Operand(name, _from_numpy(name, value), back=_to_numpy)
    if hasattr(value, "__dlpack__"):
        return Operand(name, _from_dlpack(name, value), back=_to_library(value))
    type_name = type(value).__name__
    raise UserError(f"{name} is a {type_name}", "pass a torch tensor, a NumPy array, or an array with __dlpack__")


def _checked_tensor(name: str, value: Tensor) -> Tensor:
    """Check a tensor. One that needs gradients is refused: only the operators support them."""
    if value.layout is not torch.strided or value.is_nested:
        raise UserError(f"{name} is a tensor of layout {value.layout}", "pass a dense tensor: x.to_dense()")
    if value.requires_grad and torch.is_grad_enabled():
        raise UserError(
            f"{name} needs gradients, which this method does not support",
            "call the operators of workers.kernels.dispatch.operators, or call under torch.no_grad()",
        )
    return value.resolve_neg() if value.is_neg() else value


def _from_numpy(name: str, value: "np.ndarray[Any, Any]") -> Tensor:
    """Make a tensor that shares the memory if torch can. NumPy lacks bfloat16: ml_dtypes' is recognised by name."""
    plain = value
    if not value.flags.writeable or any(stride < 0 for stride in value.strides) or not value.dtype.isnative:
        plain = np.array(value, dtype=value.dtype.newbyteorder("="))
    try:
        if value.dtype.name == "bfloat16":
            return torch.from_numpy(plain.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(plain)
    except (TypeError, ValueError) as e:
        raise UserError(f"{name} is an array that torch cannot convert: {e}", "convert it to float32 first") from e


def _to_numpy(tensor: Tensor) -> "np.ndarray[Any, Any]":
    host = tensor.detach().cpu()
    if host.dtype == torch.bfloat16:
        import ml_dtypes

        return host.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()


def _from_dlpack(name: str, value: Any) -> Tensor:
    try:
        return torch.utils.dlpack.from_dlpack(value)
    except (RuntimeError, TypeError, ValueError, BufferError) as e:
        raise UserError(f"{name} is an array that torch cannot convert: {e}", "pass a tensor or a NumPy array") from e


def _to_library(like: Any) -> Back:
    """Return a function that converts tensors to the library of `like`, by the array API's `from_dlpack`."""

    def back(tensor: Tensor) -> Any:
        if not hasattr(like, "__array_namespace__"):
            return tensor
        return like.__array_namespace__().from_dlpack(tensor.detach())

    return back


def number(name: str, value: Any, least: float = -math.inf) -> float:
    """Return a finite number of at least `least`. Raises UserError."""
    try:
        converted = float(value)
    except (TypeError, ValueError):
        converted = math.nan
    if not math.isfinite(converted) or converted < least:
        raise UserError(
            f"{name} is {value!r}", f"write a finite number{f' of at least {least:g}' if least > -math.inf else ''}"
        )
    return converted


def count(name: str, value: Any) -> int:
    """Return an integer of at least 0. Raises UserError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"{name} is {value!r}", "write an integer of at least 0")
    return value


def mask_strides(mask: Any) -> tuple[int, ...]:
    """Return the strides of an attention mask (B, H, T, S), 0 for dimensions that are broadcast and without a mask."""
    if mask is None:
        return (0,) * 4
    steps = torch.empty(mask.shape, device="meta").stride()
    return tuple(0 if size == 1 else step for size, step in zip(mask.shape, steps, strict=True))
