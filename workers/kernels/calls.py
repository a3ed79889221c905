"""One call of an operation: check its arrays and make them contiguous for the hooks."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cluster.errors import PolyfleetError, UserError
from workers.devices.backends.precision import name_of
from workers.kernels.arrays import META, Operand, Resident, operand

if TYPE_CHECKING:
    from workers.kernels.device import KernelDevice


class Call:
    """Arrays are passed to `take` in the order of parameters: the first determines the dtype and the result's type."""

    __slots__ = ("_copies", "_exports", "_returned", "inputs", "kernels")

    def __init__(self, kernels: "KernelDevice"):
        self.kernels = kernels
        self.inputs: list[Operand] = []
        self._returned: Tensor | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._exports: list[tuple[Any, Tensor]] = []

    # Arrays of the caller

    def take(self, name: str, value: Any, dims: int, also: Sequence[torch.dtype] = ()) -> Operand:
        """An input of at least `dims` dimensions, in the dtype of the first or one of `also`. Raises UserError."""
        one = operand(name, value)
        tensor = one.tensor
        if tensor.dim() < dims:
            raise UserError(f"{name} has {tensor.dim()} dimensions", f"pass at least {dims}: {shape_text(tensor)}")
        self._check_dtype(one, also)
        self._check_device(one, value)
        self.inputs.append(one)
        return one

    def vector(self, name: str, value: Any, length: int) -> Operand | None:
        """Check a weight or bias [length], in the dtype of the first array or in float32."""
        if value is None:
            return None
        one = self.take(name, value, 1, (torch.float32,))
        if one.tensor.shape != (length,):
            raise UserError(
                f"{name} has shape {shape_text(one.tensor)}", f"pass [{length}], the number of columns of the rows"
            )
        return one

    def output(
        self, value: Any, shape: Sequence[int], may_be: Sequence[Operand] = (), dtype: torch.dtype | None = None
    ) -> Operand:
        """Return the output: new memory, or `value`, which may be one of `may_be` but must not overlap other arrays."""
        first = self.inputs[0]
        expected = torch.Size(shape), dtype or first.tensor.dtype
        if value is None:
            if first.buffer is not None:
                resident = self.kernels._empty(*expected)
                return Operand("out", resident.like, resident.buffer, lambda _: resident)
            return Operand(
                "out", torch.empty(expected[0], dtype=expected[1], device=first.tensor.device), None, first.back
            )
        one = self._callers_output(value)
        if (one.tensor.shape, one.tensor.dtype) != expected:
            description = f"{list(expected[0])} in {name_of(expected[1])}"
            raise UserError(
                f"out has shape {shape_text(one.tensor)} in {name_of(one.tensor.dtype)}", f"pass {description}, or none"
            )
        self._check_device(one, value)
        self._check_overlap(one, may_be)
        return one

    def like(self, value: Any, one: Operand, may_be: Sequence[Operand]) -> Operand:
        """Return an output with the shape and dtype of `one`, the first array."""
        if value is None and one.buffer is None:
            tensor = torch.empty_like(one.tensor, memory_format=torch.contiguous_format)
            return Operand("out", tensor, None, one.back)
        return self.output(value, one.tensor.shape, may_be)

    # Arrays for hooks

    def array(self, one: Operand | None, shape: Sequence[int]) -> Any:
        """Return a contiguous input in this shape."""
        if one is None:
            return None
        if one.buffer is not None:
            return self.kernels._viewed(one.buffer, one.tensor.view(tuple(shape)))
        return self.kernels._imported(_contiguous(one.tensor, shape))

    def rows(self, one: Operand) -> Any:
        return self.array(one, as_rows(one.tensor.shape))

    def written(self, one: Operand, shape: Sequence[int] | None = None) -> Any:
        """Return a contiguous output in this shape (None: its rows): its own memory, or memory copied back later."""
        shape = as_rows(one.tensor.shape) if shape is None else tuple(shape)
        if one.buffer is not None:
            return self.kernels._viewed(one.buffer, one.tensor.view(shape))
        plain = one.tensor
        if not plain.is_contiguous():
            plain = torch.empty_like(one.tensor, memory_format=torch.contiguous_format)
            self._copies.append((one.tensor, plain))
        array = self.kernels._imported(_contiguous(plain, shape), written=True)
        self._exports.append((array, plain))
        return array

    def run(self, hook: Callable[..., Any], *arguments: Any) -> None:
        """Call a hook and convert a driver's errors. A tensor that the hook returns replaces its output argument."""
        try:
            result = hook(*arguments)
            for array, plain in self._exports:
                self.kernels._exported(array, plain)
        except PolyfleetError:
            raise
        except Exception as e:
            raise self.kernels._failure(e) from e
        self._returned = result if isinstance(result, Tensor) else None
        for out, plain in self._copies if self._returned is None else ():
            out.copy_(plain)

    def result(self, out: Operand) -> Any:
        """Return the result for the caller."""
        if self._returned is None:
            return out.returned(out.tensor)
        value = self._returned if self._returned.shape == out.tensor.shape else self._returned.view(out.tensor.shape)
        return out.returned(out.tensor.copy_(value) if out.is_callers_output else value)

    # Checks

    def _check_dtype(self, one: Operand, also: Sequence[torch.dtype]) -> None:
        actual, supported = one.tensor.dtype, self.kernels.dtypes
        first = self.inputs[0].tensor.dtype if self.inputs else actual
        if not self.inputs and actual not in supported:
            names = ", ".join(map(name_of, supported))
            raise UserError(f"{one.name} is in {name_of(actual)}", f"kernels {self.kernels.name!r} compute in {names}")
        if actual != first and actual not in also:
            others = "".join(f" or {name_of(dtype)}" for dtype in also if dtype != first)
            raise UserError(
                f"{one.name} is in {name_of(actual)}, {self.inputs[0].name} in {name_of(first)}",
                f"convert it to {name_of(first)}{others}",
            )

    def _check_device(self, one: Operand, value: Any) -> None:
        """Raise UserError if an array is on another device: arrays are never moved silently."""
        resident = isinstance(value, Resident)
        if resident and value.owner is not self.kernels:
            raise UserError(f"{one.name} is on the device of other kernels", "move it here with to_device()")
        if self.inputs and (self.inputs[0].buffer is not None) != resident:
            there = "on the device, " if resident else "in torch's memory, "
            raise UserError(f"{one.name} is {there}{self.inputs[0].name} is not", "move both with to_device()")
        if not resident and not self.kernels.takes(one.tensor.device):
            raise UserError(
                f"{one.name} is on {one.tensor.device}, the kernels {self.kernels.name!r} compute on "
                f"{self.kernels.device}",
                f"move it there: {one.name}.to({str(self.kernels.device)!r})",
            )

    def _callers_output(self, value: Any) -> Operand:
        if isinstance(value, np.ndarray) and not (
            value.flags.writeable and value.dtype.isnative and all(stride >= 0 for stride in value.strides)
        ):
            raise UserError("out cannot be written: it is read-only, reversed or byte-swapped", "pass np.empty_like(x)")
        if not isinstance(value, Tensor | Resident | np.ndarray):
            raise UserError(f"out is a {type(value).__name__}", "pass a torch tensor or a NumPy array")
        one = operand("out", value)
        one.back, one.is_callers_output = (lambda _: value), True
        return one

    def _check_overlap(self, out: Operand, may_be: Sequence[Operand]) -> None:
        if out.tensor.device != META and _overlaps_itself(out.tensor):
            raise UserError("several elements of out share memory", "pass out.contiguous()")
        for one in self.inputs:
            if one in may_be and _same(one, out):
                continue
            if _overlap(one, out):
                in_place = f" (it may be exactly {' or '.join(o.name for o in may_be)})" if may_be else ""
                raise UserError(f"out overlaps {one.name} in memory", f"pass separate memory{in_place}")


def shape_text(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def as_rows(shape: torch.Size) -> Sequence[int]:
    """Return [R, C]: all dimensions but the last merged into one."""
    return shape if len(shape) == 2 else (shape.numel() // shape[-1], shape[-1])


def _contiguous(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Make a tensor contiguous in this shape. Calls torch only if needed, since a call takes a microsecond."""
    plain = tensor if tensor.is_contiguous() else tensor.contiguous()
    return plain if plain.shape == shape else plain.view(tuple(shape))


def _same(a: Operand, b: Operand) -> bool:
    if a.buffer is not None or b.buffer is not None:
        return a.buffer is b.buffer
    x, y = a.tensor, b.tensor
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


def _overlap(a: Operand, b: Operand) -> bool:
    """Return whether the memory ranges of both, from first to last element, overlap. Interleaved arrays, which only
    fill each other's gaps, count as overlapping.
    """
    if a.buffer is not None or b.buffer is not None:
        return a.buffer is b.buffer
    (first, end), (other_first, other_end) = _extent(a.tensor), _extent(b.tensor)
    return first < other_end and other_first < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlaps_itself(tensor: Tensor) -> bool:
    """Return whether elements share memory: a stride is smaller than the extent of the dimensions inside it."""
    reach = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda one: one[1]):
        if size > 1 and stride < reach:
            return True
        reach = max(reach, (size - 1) * stride + reach)
    return False
