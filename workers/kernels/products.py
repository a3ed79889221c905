"""Products of matrices and vectors, batched over leading dimensions.

Letters of shapes: M, N, K of a product; B batch; T weighted rows, D their width.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cluster.errors import UserError
from workers.kernels.arrays import Operand
from workers.kernels.calls import Call, shape_text
from workers.kernels.device import KernelDevice


class Products(KernelDevice):
    """Leading dimensions broadcast as in torch.matmul; results have the first array's dtype. Methods raise as Rows."""

    def matmul(self, a: Any, b: Any, *, out: Any = None) -> Any:
        """a [B…, M, K] times b [B…, K, N]. The transpose of a contiguous matrix is not copied."""
        call = Call(self)
        left, right = call.take("a", a, 2), call.take("b", b, 2)
        (rows, depth), columns = left.tensor.shape[-2:], right.tensor.shape[-1]
        _require_equal(left, -1, right, -2)
        batch = _batch(left, right, 2, 2)
        filled = call.output(out, (*batch, rows, columns))
        if filled.tensor.numel():
            a_transposed, b_transposed = _is_transposed(left), _is_transposed(right)
            if right.tensor.dim() == 2 and not a_transposed:  # one matrix for the batch: make it one product
                rows, batch = rows * batch.numel(), torch.Size()
            size = batch.numel()
            arrays = (
                call.array(
                    _expand(left, batch, 2, a_transposed), (size, depth, rows) if a_transposed else (size, rows, depth)
                ),
                call.array(
                    _expand(right, batch, 2, b_transposed),
                    (size, columns, depth) if b_transposed else (size, depth, columns),
                ),
                call.written(filled, (size, rows, columns)),
            )
            call.run(self._matmul, *arrays, a_transposed, b_transposed)
        return call.result(filled)

    def matmul_vec(self, a: Any, x: Any, *, out: Any = None) -> Any:
        """a [B…, M, K] times x [B…, K]: [B…, M]. A single vector or matrix is broadcast."""
        call = Call(self)
        left, right = call.take("a", a, 2), call.take("x", x, 1)
        rows, depth = left.tensor.shape[-2:]
        _require_equal(left, -1, right, -1)
        batch = _batch(left, right, 2, 1)
        filled = call.output(out, (*batch, rows))
        if filled.tensor.numel():
            if right.tensor.dim() == 1:
                rows, batch = rows * batch.numel(), torch.Size()
            size = batch.numel()
            array_a = call.array(_expand(left, batch, 2), (size, rows, depth))
            array_x = call.array(_expand(right, batch, 1), (size, depth))
            call.run(self._matmul_vec, array_a, array_x, call.written(filled, (size, rows)))
        return call.result(filled)

    def weighted_sum_rows(self, weights: Any, rows: Any, *, out: Any = None) -> Any:
        """Σ weights[t] · rows[t]: weights [B…, T], rows [B…, T, D], result [B…, D]."""
        call = Call(self)
        left, right = call.take("weights", weights, 1), call.take("rows", rows, 2)
        length, width = right.tensor.shape[-2:]
        _require_equal(left, -1, right, -2)
        batch = _batch(left, right, 1, 2)
        filled = call.output(out, (*batch, width))
        if filled.tensor.numel():
            size = batch.numel()
            array_w = call.array(_expand(left, batch, 1), (size, length))
            array_r = call.array(_expand(right, batch, 2), (size, length, width))
            call.run(self._weighted_sum_rows, array_w, array_r, call.written(filled, (size, width)))
        return call.result(filled)

    # Hooks get contiguous arrays and fill `out`. Only K or T may be 0; the results are then 0.

    @abstractmethod
    def _matmul(self, a_BMK: Any, b_BKN: Any, out_BMN: Any, a_transposed: bool, b_transposed: bool) -> Tensor | None:
        """`a_transposed`: the first array is [B, K, M]. `b_transposed`: the second is [B, N, K]."""

    @abstractmethod
    def _matmul_vec(self, a_BMK: Any, x_BK: Any, out_BM: Any) -> Tensor | None: ...

    @abstractmethod
    def _weighted_sum_rows(self, weights_BT: Any, rows_BTD: Any, out_BD: Any) -> Tensor | None: ...


def _require_equal(a: Operand, of_a: int, b: Operand, of_b: int) -> None:
    if a.tensor.shape[of_a] != b.tensor.shape[of_b]:
        shapes = f"{a.name} has shape {shape_text(a.tensor)}, {b.name} {shape_text(b.tensor)}"
        remedy = f"dimension {of_a} of {a.name} and {of_b} of {b.name} must be equal"
        raise UserError(shapes, remedy)


def _batch(a: Operand, b: Operand, dims_a: int, dims_b: int) -> torch.Size:
    """Return the leading dimensions of the result."""
    try:
        return torch.Size(torch.broadcast_shapes(a.tensor.shape[:-dims_a], b.tensor.shape[:-dims_b]))  # type: ignore[no-untyped-call]
    except RuntimeError:
        shapes = f"{a.name} has shape {shape_text(a.tensor)}, {b.name} {shape_text(b.tensor)}"
        raise UserError(shapes, "leading dimensions must be equal, or 1") from None


def _expand(one: Operand, batch: Sequence[int], dims: int, transposed: bool = False) -> Operand:
    """Expand to the leading dimensions of the result (if any), transposed as it is in memory."""
    own = one.tensor.shape[:-dims]
    if one.buffer is not None:
        if own != torch.Size(batch) and len(batch):
            shapes = f"{one.name} has leading dimensions {list(own)}, the result {list(batch)}"
            raise UserError(shapes, f"expand {one.name} to them")
        return one
    tensor = one.tensor.mT if transposed else one.tensor
    if own != torch.Size(batch) and len(batch):
        tensor = tensor.expand(*batch, *tensor.shape[-dims:])
    return Operand(one.name, tensor)


def _is_transposed(one: Operand) -> bool:
    return one.buffer is None and not one.tensor.is_contiguous() and one.tensor.mT.is_contiguous()
