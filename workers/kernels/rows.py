"""Operations on single rows: norms, softmax, gates and rotary embedding.

Letters of shapes: R rows, C columns; B batch (all dimensions before those named), T tokens, D width of a head, P
pairs of values that rotate together, at most D / 2. Sums are accumulated in float32 for every dtype, and each result
is rounded once.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from cluster.errors import UserError, nearest
from workers.kernels.arrays import count, number
from workers.kernels.calls import Call, shape_text
from workers.kernels.device import KernelDevice

LAYOUTS = ("halves", "pairs")


class Rows(KernelDevice):
    """The last dimension is the row; results have the shape and dtype of the first array. Methods raise UserError for
    arrays that do not match each other, KernelsFailed for errors of the driver.
    """

    def rmsnorm(
        self,
        x: Any,
        weight: Any = None,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        round_before_weight: bool = False,
        out: Any = None,
    ) -> Any:
        """x / sqrt(mean(x²) + eps) · (offset + weight), where `weight` [C] may be in float32 for a shorter x.

        Llama's checkpoints need `round_before_weight`: the normed row is rounded to x's dtype before the product with
        the weight, which is rounded again. Gemma's need `offset` 1. `out` may be x.
        """
        call = Call(self)
        rows = call.take("x", x, 1)
        scale = call.vector("weight", weight, rows.tensor.shape[-1])
        filled = call.like(out, rows, (rows,))
        eps, offset = number("eps", eps, least=0.0), number("offset", offset)
        if rows.tensor.numel():
            weights = call.array(scale, (-1,))
            call.run(
                self._rmsnorm, call.rows(rows), weights, call.written(filled), eps, offset, bool(round_before_weight)
            )
        return call.result(filled)

    def layernorm(self, x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *, out: Any = None) -> Any:
        """(x - mean(x)) / sqrt(var(x) + eps) · weight + bias, with the variance over C, as torch. `out` may be x."""
        call = Call(self)
        rows = call.take("x", x, 1)
        columns = rows.tensor.shape[-1]
        scale, shift = call.vector("weight", weight, columns), call.vector("bias", bias, columns)
        filled = call.like(out, rows, (rows,))
        eps = number("eps", eps, least=0.0)
        if rows.tensor.numel():
            vectors = call.array(scale, (-1,)), call.array(shift, (-1,))
            call.run(self._layernorm, call.rows(rows), *vectors, call.written(filled), eps)
        return call.result(filled)

    def softmax(self, x: Any, *, out: Any = None) -> Any:
        """exp(x - max(x)) / its sum. A row that is all -inf becomes NaN, as in torch. `out` may be x."""
        return self._each("x", x, out, self._softmax)

    def silu(self, x: Any, *, out: Any = None) -> Any:
        """x · sigmoid(x). `out` may be x."""
        return self._each("x", x, out, self._silu)

    def swiglu(self, gate: Any, up: Any, *, out: Any = None) -> Any:
        """silu(gate) · up. `out` may be either."""
        call = Call(self)
        gates = call.take("gate", gate, 1)
        ups = call.take("up", up, 1)
        if gates.tensor.shape != ups.tensor.shape:
            raise UserError(
                f"gate has shape {shape_text(gates.tensor)}, up {shape_text(ups.tensor)}", "pass two of one shape"
            )
        filled = call.like(out, gates, (gates, ups))
        if gates.tensor.numel():
            call.run(self._swiglu, call.rows(gates), call.rows(ups), call.written(filled))
        return call.result(filled)

    def apply_rope(
        self, x: Any, cos: Any, sin: Any, *, position: int = 0, layout: str = "halves", out: Any = None
    ) -> Any:
        """Rotary position embedding of x [B…, T, D]; token t is rotated by row `position` + t of `cos`, `sin` [·, P].

        `layout` "halves" (NeoX, Llama in transformers) pairs value i with i + P, "pairs" (GPT-J, Llama as published) 2i
        with 2i + 1. If 2P < D, only the first 2P values of a token rotate. `cos` and `sin` may be in float32. `out`
        may be x.
        """
        call = Call(self)
        tokens = call.take("x", x, 2)
        length, width = tokens.tensor.shape[-2:]
        tables = [call.take(name, value, 2, (torch.float32,)) for name, value in (("cos", cos), ("sin", sin))]
        _require_tables(tables[0].tensor, tables[1].tensor, position := count("position", position), length, width)
        if layout not in LAYOUTS:
            raise UserError(f"unknown layout {layout!r}", nearest(str(layout), LAYOUTS))
        filled = call.like(out, tokens, (tokens,))
        if tokens.tensor.numel():
            shape = (-1, length, width)
            table_arrays = [call.array(one, one.tensor.shape) for one in tables]
            call.run(
                self._rope,
                call.array(tokens, shape),
                *table_arrays,
                call.written(filled, shape),
                position,
                layout == "pairs",
            )
        return call.result(filled)

    def _each(self, name: str, value: Any, out: Any, hook: Any) -> Any:
        call = Call(self)
        rows = call.take(name, value, 1)
        filled = call.like(out, rows, (rows,))
        if rows.tensor.numel():
            call.run(hook, call.rows(rows), call.written(filled))
        return call.result(filled)

    # Hooks get contiguous arrays with at least one row and one column; `out` may be an input. They fill it, or
    # return a new tensor instead.

    @abstractmethod
    def _rmsnorm(
        self, x_RC: Any, weight_C: Any, out_RC: Any, eps: float, offset: float, round_before_weight: bool
    ) -> Tensor | None:
        """`weight_C` may be None; `offset` is then ignored."""

    @abstractmethod
    def _layernorm(self, x_RC: Any, weight_C: Any, bias_C: Any, out_RC: Any, eps: float) -> Tensor | None:
        """Either of `weight_C` and `bias_C` may be None."""

    @abstractmethod
    def _softmax(self, x_RC: Any, out_RC: Any) -> Tensor | None: ...

    @abstractmethod
    def _silu(self, x_RC: Any, out_RC: Any) -> Tensor | None: ...

    @abstractmethod
    def _swiglu(self, gate_RC: Any, up_RC: Any, out_RC: Any) -> Tensor | None: ...

    @abstractmethod
    def _rope(self, x_BTD: Any, cos_SP: Any, sin_SP: Any, out_BTD: Any, position: int, pairs: bool) -> Tensor | None:
        """Row `position` + t of the tables rotates token t."""


def _require_tables(cos: Any, sin: Any, position: int, length: int, width: int) -> None:
    if cos.dim() != 2 or cos.shape != sin.shape or cos.dtype != sin.dtype:
        shapes = f"{shape_text(cos)} {cos.dtype} and {shape_text(sin)} {sin.dtype}"
        raise UserError(f"cos and sin have shapes {shapes}", "pass two tables [positions, pairs] of one dtype")
    positions, pairs = cos.shape
    if not 1 <= pairs <= width // 2:
        raise UserError(f"cos has {pairs} columns, x {width} values per token", f"pass 1 to {width // 2} columns")
    if position + length > positions:
        raise UserError(
            f"cos has {positions} rows; {length} tokens from position {position} need {position + length}",
            "make the tables longer",
        )
