"""Contract of kernels: every operation, for arrays of any library, on one device; here, the gradients of operations.

A public method does the common work (shapes, dtypes, memory, strides, overlap); an implementation provides short hooks
that get contiguous arrays. Arrays may have more than 2³¹ elements: offsets are 64 bits wide.

Gradients are for torch tensors and NumPy arrays; dispatch/operators.py uses them for autograd. Their methods take the
gradient of the result, then the forward's arguments. Gradients have the dtypes of these arguments; sums over rows are
accumulated in float32 in a fixed order, without atomic additions, so that runs are bit-identical. Implementations
without their own kernel for one (`own_gradients`) use formulas.py.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cluster.errors import UserError
from workers.kernels import formulas
from workers.kernels.arrays import Operand, number
from workers.kernels.attention import Attention, attention_mask, attention_scale, heads_of
from workers.kernels.calls import Call, shape_text
from workers.kernels.products import Products
from workers.kernels.rows import Rows

OPERATIONS = (
    *("matmul", "matmul_vec", "weighted_sum_rows", "rmsnorm", "layernorm", "softmax", "silu", "swiglu", "apply_rope"),
    *("compute_attention_scores", "attention"),
)
"""Methods of KernelBackend that compute. Their backwards are below."""
Optional = Tensor | None


class KernelBackend(Products, Rows, Attention):
    """All operations on one device. The constructor raises KernelsUnavailable if the driver is missing, and UserError
    for a device that these kernels do not support. Gradients raise UserError for arrays whose shapes do not match, and
    for arrays in a driver's own memory.
    """

    own_gradients: ClassVar[frozenset[str]] = frozenset()

    def attention_variant(self, q: Tensor, k: Tensor, dtype: torch.dtype, gradient: bool) -> str | None:
        """Return the kernel to prefer if torch's function computes attention of q and k in `dtype`: a name in sdpa.py,
        or "" for torch's choice. None: it is computed otherwise. With `gradient`, the forward and its gradient are.
        """
        return None

    def rmsnorm_backward(
        self, grad: Any, x: Any, weight: Any = None, eps: float = 1e-6, *, offset: float = 0.0
    ) -> tuple[Any, Any]:
        """Return gradients of x and weight (None without one). Rounding before the weight does not affect them."""
        call, rows, g = self._take_with_grad("x", x, grad)
        scale = call.vector("weight", weight, rows.tensor.shape[-1])
        eps, offset = number("eps", eps, least=0.0), number("offset", offset)
        if not rows.tensor.numel():
            return _zero_gradients(rows, scale)
        grads = self._compute(call, self._rmsnorm_backward, _rows(g), _rows(rows), _vector(scale), eps, offset)
        return _as_callers_arrays((rows, scale), grads)

    def layernorm_backward(
        self, grad: Any, x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> tuple[Any, Any, Any]:
        """Return gradients of x, weight and bias; None for a weight or bias that is None."""
        call, rows, g = self._take_with_grad("x", x, grad)
        columns = rows.tensor.shape[-1]
        scale, shift = call.vector("weight", weight, columns), call.vector("bias", bias, columns)
        eps = number("eps", eps, least=0.0)
        if not rows.tensor.numel():
            return _zero_gradients(rows, scale, shift)
        grads = self._compute(
            call, self._layernorm_backward, _rows(g), _rows(rows), _vector(scale), shift is not None, eps
        )
        return _as_callers_arrays((rows, scale, shift), grads)

    def softmax_backward(self, grad: Any, y: Any) -> Any:
        """Return the gradient of x, computed from the forward's result y."""
        return self._each_backward("y", y, grad, self._softmax_backward)

    def silu_backward(self, grad: Any, x: Any) -> Any:
        return self._each_backward("x", x, grad, self._silu_backward)

    def swiglu_backward(self, grad: Any, gate: Any, up: Any) -> tuple[Any, Any]:
        """Return the gradients of gate and up."""
        call, gates, g = self._take_with_grad("gate", gate, grad)
        ups = call.take("up", up, 1)
        if ups.tensor.shape != gates.tensor.shape:
            raise UserError(
                f"gate has shape {shape_text(gates.tensor)}, up {shape_text(ups.tensor)}", "pass two of one shape"
            )
        if not gates.tensor.numel():
            return _zero_gradients(gates, ups)
        return _as_callers_arrays(
            (gates, ups), self._compute(call, self._swiglu_backward, _rows(g), _rows(gates), _rows(ups))
        )

    def apply_rope_backward(self, grad: Any, cos: Any, sin: Any, *, position: int = 0, layout: str = "halves") -> Any:
        """Return the gradient of x, by the reverse rotation. The tables have no gradient."""
        return self.apply_rope(grad, cos, -sin, position=position, layout=layout)

    def matmul_backward(self, grad: Any, a: Any, b: Any) -> tuple[Any, Any]:
        """Return gradients of a and b with the leading dimensions of `grad`: sum those that were broadcast."""
        return self.matmul(grad, _transposed(b)), self.matmul(_transposed(a), grad)

    def attention_backward(
        self,
        grad: Any,
        q: Any,
        k: Any,
        v: Any,
        result: Any,
        lse: Any,
        *,
        scale: float | None = None,
        mask: Any = None,
        causal: bool = False,
    ) -> tuple[Any, Any, Any]:
        """Return gradients of q, k and v, from the results of `attention(…, return_lse=True)`. A mask has none."""
        call = Call(self)
        queries, keys, values = call.take("q", q, 2), call.take("k", k, 2), call.take("v", v, 2)
        batch, heads, groups = heads_of(queries, keys)
        g, forward_result = call.take("grad", grad, 2), call.take("result", result, 2)
        sums = call.take("lse", lse, 1, (torch.float32,))
        (length, width), (many, wide) = queries.tensor.shape[-2:], values.tensor.shape[-2:]
        full_shape = torch.Size((*queries.tensor.shape[:-1], wide))
        for one, shape in (
            (g, full_shape),
            (forward_result, full_shape),
            (sums, full_shape[:-1]),
            (values, (*keys.tensor.shape[:-1], wide)),
        ):
            _require_shape(one, shape)
        mask_operand = attention_mask(call, mask, queries, many) if mask is not None else None
        if not full_shape.numel() or not many:
            return _zero_gradients(queries, keys, values)
        shape_q, shape_k = (batch, heads, length), (batch, groups, many)
        grads = self._compute(
            call,
            self._attention_backward,
            _as(g, (*shape_q, wide)),
            _as(queries, (*shape_q, width)),
            _as(keys, (*shape_k, width)),
            _as(values, (*shape_k, wide)),
            None if mask_operand is None else mask_operand.tensor.contiguous(),
            _as(forward_result, (*shape_q, wide)),
            _as(sums, shape_q),
            attention_scale(scale, width),
            bool(causal),
        )
        return _as_callers_arrays((queries, keys, values), grads)

    def _each_backward(self, name: str, value: Any, grad: Any, hook: Any) -> Any:
        call, rows, g = self._take_with_grad(name, value, grad)
        if not rows.tensor.numel():
            return _zero_gradients(rows)[0]
        return _as_callers_arrays((rows,), (self._compute(call, hook, _rows(g), _rows(rows)),))[0]

    def _take_with_grad(self, name: str, value: Any, grad: Any) -> tuple[Call, Operand, Operand]:
        call = Call(self)
        one, g = call.take(name, value, 1), call.take("grad", grad, 1)
        _require_shape(g, one.tensor.shape)
        return call, one, g

    def _compute(self, call: Call, hook: Any, *arguments: Any) -> Any:
        if any(one.buffer is not None for one in call.inputs):
            raise UserError(
                "gradients are computed only for torch tensors and NumPy arrays", "convert the arrays with to_host()"
            )
        results: list[Any] = []
        call.run(lambda: results.append(hook(*arguments)))
        return results[0]

    # Hooks get contiguous tensors with at least one row and column, and return new ones; sums may be in float32.

    def _rmsnorm_backward(
        self, g_RC: Tensor, x_RC: Tensor, weight_C: Optional, eps: float, offset: float
    ) -> tuple[Tensor, Optional]:
        return formulas.rmsnorm(g_RC, x_RC, weight_C, eps, offset)

    def _layernorm_backward(
        self, g_RC: Tensor, x_RC: Tensor, weight_C: Optional, with_bias: bool, eps: float
    ) -> tuple[Tensor, Optional, Optional]:
        return formulas.layernorm(g_RC, x_RC, weight_C, with_bias, eps)

    def _softmax_backward(self, g_RC: Tensor, y_RC: Tensor) -> Tensor:
        return formulas.softmax(g_RC, y_RC)

    def _silu_backward(self, g_RC: Tensor, x_RC: Tensor) -> Tensor:
        return formulas.silu(g_RC, x_RC)

    def _swiglu_backward(self, g_RC: Tensor, gate_RC: Tensor, up_RC: Tensor) -> tuple[Tensor, Tensor]:
        return formulas.swiglu(g_RC, gate_RC, up_RC)

    def _attention_backward(
        self,
        g_BHTE: Tensor,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSE: Tensor,
        mask_BHTS: Optional,
        out_BHTE: Tensor,
        lse_BHT: Tensor,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return formulas.attention(g_BHTE, q_BHTD, k_BGSD, v_BGSE, mask_BHTS, out_BHTE, lse_BHT, scale, causal)


def _rows(one: Operand) -> Tensor:
    return one.tensor.contiguous().view(-1, one.tensor.shape[-1])


def _vector(one: Operand | None) -> Optional:
    return None if one is None else one.tensor.contiguous()


def _as(one: Operand, shape: Sequence[int]) -> Tensor:
    return one.tensor.contiguous().view(tuple(shape))


def _zero_gradients(*of: Operand | None) -> tuple[Any, ...]:
    return _as_callers_arrays(of, [None if one is None else torch.zeros_like(one.tensor) for one in of])


def _as_callers_arrays(of: Sequence[Operand | None], grads: Sequence[Optional]) -> tuple[Any, ...]:
    """Convert gradients to the shapes, dtypes and libraries of the caller's arrays."""
    return tuple(
        None if one is None or grad is None else one.returned(grad.to(one.tensor.dtype).view(one.tensor.shape))
        for one, grad in zip(of, grads, strict=True)
    )


def _require_shape(one: Operand, shape: Sequence[int]) -> None:
    if one.tensor.shape != torch.Size(shape):
        raise UserError(f"{one.name} has shape {shape_text(one.tensor)}", f"pass {list(shape)}")


def _transposed(value: Any) -> Any:
    return value.swapaxes(-1, -2)
