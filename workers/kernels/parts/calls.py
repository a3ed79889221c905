"""One call of an operation: its arrays are taken, checked and laid out here, so that hooks get contiguous arrays
only.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cluster.errors import PolyfleetError, UserError
from workers.backends.parts.precision import name_of
from workers.kernels.parts.arrays import META, Operand, Resident, operand

if TYPE_CHECKING:
    from workers.kernels.parts.device import Device


class Call:
    """Arrays are taken in the order of the parameters: the first says the dtype, and what type the answer has."""

    __slots__ = ("_answer", "_copies", "_exports", "kernels", "taken")

    def __init__(self, kernels: "Device"):
        self.kernels = kernels
        self.taken: list[Operand] = []
        self._answer: Tensor | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._exports: list[tuple[Any, Tensor]] = []

    # What is given

    def take(self, name: str, value: Any, dims: int, also: Sequence[torch.dtype] = ()) -> Operand:
        """An input of at least `dims` dimensions, in the dtype of the first or one of `also`. Raises UserError."""
        one = operand(name, value)
        tensor = one.tensor
        if tensor.dim() < dims:
            raise UserError(f"{name} has {tensor.dim()} dimensions", f"give at least {dims}: {shape_told(tensor)}")
        self._require_dtype(one, also)
        self._require_here(one, value)
        self.taken.append(one)
        return one

    def vector(self, name: str, value: Any, length: int) -> Operand | None:
        """A weight or bias [length], in the dtype of the first or in float32."""
        if value is None:
            return None
        one = self.take(name, value, 1, (torch.float32,))
        if one.tensor.shape != (length,):
            raise UserError(f"{name} has shape {shape_told(one.tensor)}", f"give [{length}], as the rows have columns")
        return one

    def output(
        self, value: Any, shape: Sequence[int], may_be: Sequence[Operand] = (), dtype: torch.dtype | None = None
    ) -> Operand:
        """Where a result goes: new memory, or `value`, which may be exactly one of `may_be` and else overlaps
        nothing.
        """
        first = self.taken[0]
        wanted = torch.Size(shape), dtype or first.tensor.dtype
        if value is None:
            if first.buffer is not None:
                made = self.kernels._empty(*wanted)
                return Operand("out", made.like, made.buffer, lambda _: made)
            return Operand("out", torch.empty(wanted[0], dtype=wanted[1], device=first.tensor.device), None, first.back)
        one = self._given_output(value)
        if (one.tensor.shape, one.tensor.dtype) != wanted:
            asked = f"{list(wanted[0])} in {name_of(wanted[1])}"
            raise UserError(
                f"out has shape {shape_told(one.tensor)} in {name_of(one.tensor.dtype)}", f"give {asked}, or none"
            )
        self._require_here(one, value)
        self._require_apart(one, may_be)
        return one

    def like(self, value: Any, one: Operand, may_be: Sequence[Operand]) -> Operand:
        """An output with the shape and dtype of the first array."""
        if value is None and one.buffer is None:
            made = torch.empty_like(one.tensor, memory_format=torch.contiguous_format)
            return Operand("out", made, None, one.back)
        return self.output(value, one.tensor.shape, may_be)

    # What hooks get

    def array(self, one: Operand | None, shape: Sequence[int]) -> Any:
        """An input, contiguous, in this shape."""
        if one is None:
            return None
        if one.buffer is not None:
            return self.kernels._viewed(one.buffer, one.tensor.view(tuple(shape)))
        return self.kernels._imported(_laid_out(one.tensor, shape))

    def rows(self, one: Operand) -> Any:
        return self.array(one, as_rows(one.tensor.shape))

    def written(self, one: Operand, shape: Sequence[int] | None = None) -> Any:
        """An output, contiguous, in this shape (None: its rows): its own memory, or some that is copied there at the
        end.
        """
        shape = as_rows(one.tensor.shape) if shape is None else tuple(shape)
        if one.buffer is not None:
            return self.kernels._viewed(one.buffer, one.tensor.view(shape))
        plain = one.tensor
        if not plain.is_contiguous():
            plain = torch.empty_like(one.tensor, memory_format=torch.contiguous_format)
            self._copies.append((one.tensor, plain))
        array = self.kernels._imported(_laid_out(plain, shape), written=True)
        self._exports.append((array, plain))
        return array

    def run(self, hook: Callable[..., Any], *arguments: Any) -> None:
        """Errors of a driver become ours. A hook that answers with a tensor has filled that one, not its argument."""
        try:
            answer = hook(*arguments)
            for array, plain in self._exports:
                self.kernels._exported(array, plain)
        except PolyfleetError:
            raise
        except Exception as e:
            raise self.kernels._failure(e) from e
        self._answer = answer if isinstance(answer, Tensor) else None
        for out, plain in self._copies if self._answer is None else ():
            out.copy_(plain)

    def result(self, out: Operand) -> Any:
        """What the caller gets."""
        if self._answer is None:
            return out.returned(out.tensor)
        found = self._answer if self._answer.shape == out.tensor.shape else self._answer.view(out.tensor.shape)
        return out.returned(out.tensor.copy_(found) if out.given else found)

    # Checks

    def _require_dtype(self, one: Operand, also: Sequence[torch.dtype]) -> None:
        have, known = one.tensor.dtype, self.kernels.dtypes
        first = self.taken[0].tensor.dtype if self.taken else have
        if not self.taken and have not in known:
            words = ", ".join(map(name_of, known))
            raise UserError(f"{one.name} is in {name_of(have)}", f"kernels {self.kernels.name!r} compute in {words}")
        if have != first and have not in also:
            others = "".join(f" or {name_of(dtype)}" for dtype in also if dtype != first)
            raise UserError(
                f"{one.name} is in {name_of(have)}, {self.taken[0].name} in {name_of(first)}",
                f"convert it to {name_of(first)}{others}",
            )

    def _require_here(self, one: Operand, value: Any) -> None:
        """Nothing is moved between devices without a word."""
        resident = isinstance(value, Resident)
        if resident and value.owner is not self.kernels:
            raise UserError(f"{one.name} lies on the device of other kernels", "move it here with to_device()")
        if self.taken and (self.taken[0].buffer is not None) != resident:
            there = "on the device, " if resident else "in torch's memory, "
            raise UserError(f"{one.name} is {there}{self.taken[0].name} is not", "move both with to_device()")
        if not resident and not self.kernels.takes(one.tensor.device):
            raise UserError(
                f"{one.name} is on {one.tensor.device}, the kernels {self.kernels.name!r} compute on "
                f"{self.kernels.device}",
                f"move it there: {one.name}.to({str(self.kernels.device)!r})",
            )

    def _given_output(self, value: Any) -> Operand:
        if isinstance(value, np.ndarray) and not (
            value.flags.writeable and value.dtype.isnative and all(stride >= 0 for stride in value.strides)
        ):
            raise UserError("out cannot be written: it is read-only, reversed or byte-swapped", "give np.empty_like(x)")
        if not isinstance(value, Tensor | Resident | np.ndarray):
            raise UserError(f"out is a {type(value).__name__}", "give a torch tensor or a NumPy array")
        one = operand("out", value)
        one.back, one.given = (lambda _: value), True
        return one

    def _require_apart(self, out: Operand, may_be: Sequence[Operand]) -> None:
        if out.tensor.device != META and _overlaps_itself(out.tensor):
            raise UserError("out has several elements in one place", "give out.contiguous()")
        for one in self.taken:
            if one in may_be and _same(one, out):
                continue
            if _overlap(one, out):
                in_place = f" (it may be exactly {' or '.join(o.name for o in may_be)})" if may_be else ""
                raise UserError(f"out overlaps {one.name} in memory", f"give memory of its own{in_place}")


def shape_told(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def as_rows(shape: torch.Size) -> Sequence[int]:
    """[R, C]: all dimensions but the last as one."""
    return shape if len(shape) == 2 else (shape.numel() // shape[-1], shape[-1])


def _laid_out(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Contiguous, in this shape. What is so already is not looked at by torch again, which takes a microsecond."""
    plain = tensor if tensor.is_contiguous() else tensor.contiguous()
    return plain if plain.shape == shape else plain.view(tuple(shape))


def _same(a: Operand, b: Operand) -> bool:
    if a.buffer is not None or b.buffer is not None:
        return a.buffer is b.buffer
    x, y = a.tensor, b.tensor
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


def _overlap(a: Operand, b: Operand) -> bool:
    """Whether the memory from first to last element of both meets. Between them may be gaps that the other fills: such
    interleaved arrays are refused too.
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
    """Dense, or with gaps: no stride is smaller than what the dimensions inside it reach."""
    reach = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda one: one[1]):
        if size > 1 and stride < reach:
            return True
        reach = max(reach, (size - 1) * stride + reach)
    return False
