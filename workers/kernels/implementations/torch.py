"""torch's own operations, on any of its devices: the baseline for measuring other implementations.

Where torch rounds between two operations that are one here (the weight of an RMS norm, the gate of SwiGLU), this rounds
too, as a model without our kernels does. sdpa.py has torch's kernels for attention.
"""

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from cluster.errors import PolyfleetError, UserError, nearest
from workers.errors import KernelsFailed
from workers.kernels import formulas, sdpa
from workers.kernels.base import KernelBackend
from workers.kernels.device import as_device

Choice = Callable[[Tensor, Tensor, torch.dtype, bool], str]
"""Chooses the kernel for attention of q and k in a dtype, with or without gradients; "" is torch's own choice."""


class Kernels(KernelBackend):
    """Kernels of torch. `attention` is the only kernel of scaled_dot_product_attention that may compute it, `variant`
    the one that is tried first, and `choice` finds that one for each call. Without these torch chooses.
    """

    name = "torch"
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    own_gradients = frozenset({"attention"})

    def __init__(self, device: Any = None, *, attention: str = "", variant: str = "", choice: Choice = lambda *_: ""):
        super().__init__(device)
        if attention and attention not in sdpa.SDPA:
            raise UserError(f"unknown attention {attention!r}", nearest(attention, tuple(sdpa.SDPA)))
        self.attention_kernel, self.variant, self._choice = attention, variant, choice
        if variant:
            self.name, self.differs_in = f"torch:{variant}", "attention"

    @classmethod
    def unavailable_reason(cls) -> str:
        return ""

    def device_info(self) -> dict[str, Any]:
        device = str(self.device)
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
        elif self.device.type == "xpu":
            name = torch.xpu.get_device_name(self.device)
        else:
            name = platform.processor() or platform.machine()
        return {"device": device, "device_name": name, "driver": "torch", "version": torch.__version__}

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            if hasattr(module, "synchronize"):
                module.synchronize()

    def _device(self, device: Any) -> torch.device:
        """Return the device with its index: `cuda` is torch's current device."""
        target = as_device("cpu" if device is None else device)
        try:
            return torch.empty(0, device=target).device
        except (RuntimeError, AssertionError) as e:
            reason = str(e).splitlines()[0]
            raise UserError(f"torch cannot compute on {target}: {reason}", "name a device that this torch has") from e

    def _failure(self, error: Exception) -> PolyfleetError:
        if isinstance(error, torch.OutOfMemoryError):
            return KernelsFailed(self.name, str(error).splitlines()[0], "call it on fewer rows at a time")
        return super()._failure(error)

    def _matmul(self, a_BMK: Tensor, b_BKN: Tensor, out_BMN: Tensor, a_transposed: bool, b_transposed: bool) -> None:
        torch.bmm(a_BMK.mT if a_transposed else a_BMK, b_BKN.mT if b_transposed else b_BKN, out=out_BMN)

    def _matmul_vec(self, a_BMK: Tensor, x_BK: Tensor, out_BM: Tensor) -> None:
        torch.bmm(a_BMK, x_BK[..., None], out=out_BM[..., None])

    def _weighted_sum_rows(self, weights_BT: Tensor, rows_BTD: Tensor, out_BD: Tensor) -> None:
        torch.bmm(weights_BT[:, None], rows_BTD, out=out_BD[:, None])

    def _rmsnorm(
        self,
        x_RC: Tensor,
        weight_C: Tensor | None,
        out_RC: Tensor,
        eps: float,
        offset: float,
        round_before_weight: bool,
    ) -> Tensor:
        plain = weight_C is None or (not offset and weight_C.dtype == x_RC.dtype and not round_before_weight)
        if plain:
            return F.rms_norm(x_RC, x_RC.shape[1:], weight_C, eps)
        wide = formulas.wide(x_RC)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if round_before_weight:
            normed = normed.to(x_RC.dtype)
        assert weight_C is not None
        return (formulas.wide(normed) * (offset + formulas.wide(weight_C))).to(x_RC.dtype)

    def _layernorm(
        self, x_RC: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, out_RC: Tensor, eps: float
    ) -> Tensor:
        present = [one for one in (weight_C, bias_C) if one is not None]
        if all(one.dtype == x_RC.dtype for one in present):
            return F.layer_norm(x_RC, x_RC.shape[1:], weight_C, bias_C, eps)
        vectors = [None if one is None else formulas.wide(one) for one in (weight_C, bias_C)]
        return F.layer_norm(formulas.wide(x_RC), x_RC.shape[1:], vectors[0], vectors[1], eps).to(x_RC.dtype)

    def _softmax(self, x_RC: Tensor, out_RC: Tensor) -> Tensor:
        return x_RC.softmax(-1)

    def _silu(self, x_RC: Tensor, out_RC: Tensor) -> None:
        torch.ops.aten.silu.out(x_RC, out=out_RC)

    def _swiglu(self, gate_RC: Tensor, up_RC: Tensor, out_RC: Tensor) -> None:
        torch.mul(F.silu(gate_RC), up_RC, out=out_RC)

    def _rope(
        self, x_BTD: Tensor, cos_SP: Tensor, sin_SP: Tensor, out_BTD: Tensor, position: int, pairs: bool
    ) -> Tensor:
        rows = slice(position, position + x_BTD.shape[1])
        return formulas.rotated(x_BTD, cos_SP[rows], sin_SP[rows], pairs)

    def _scores(self, q_BHTD: Tensor, k_BGSD: Tensor, out_BHTS: Tensor, scale: float) -> None:
        batch, groups, many, width = k_BGSD.shape
        queries = q_BHTD.reshape(batch * groups, -1, width)
        keys = k_BGSD.reshape(batch * groups, many, width)
        scores = out_BHTS.view(batch * groups, -1, many)
        torch.baddbmm(scores, queries, keys.mT, beta=0, alpha=scale, out=scores)

    def _attention(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSE: Tensor,
        mask_BHTS: Tensor | None,
        out_BHTE: Tensor,
        lse_BHT: Tensor | None,
        scale: float,
        causal: bool,
    ) -> Tensor | None:
        if lse_BHT is not None:
            _attention_with_lse(q_BHTD, k_BGSD, v_BGSE, mask_BHTS, out_BHTE, lse_BHT, scale, causal)
            return None
        with self._kernel(q_BHTD, k_BGSD, False):
            return sdpa.attention(q_BHTD, k_BGSD, v_BGSE, mask_BHTS, scale, causal)

    def _attention_backward(
        self,
        g_BHTE: Tensor,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSE: Tensor,
        mask_BHTS: Tensor | None,
        out_BHTE: Tensor,
        lse_BHT: Tensor,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the forward again by the same kernel: torch's function hides what its gradient needs of it."""
        with torch.enable_grad(), self._kernel(q_BHTD, k_BGSD, True):
            q, k, v = (one.detach().requires_grad_() for one in (q_BHTD, k_BGSD, v_BGSE))
            grads = torch.autograd.grad(sdpa.attention(q, k, v, mask_BHTS, scale, causal), (q, k, v), g_BHTE)
        return grads[0], grads[1], grads[2]

    def attention_variant(self, q: Tensor, k: Tensor, dtype: torch.dtype, gradient: bool) -> str | None:
        return self.variant or self._choice(q, k, dtype, gradient)

    def _kernel(self, q: Tensor, k: Tensor, gradient: bool) -> AbstractContextManager[Any]:
        if self.attention_kernel:
            return sdpa.only(self.attention_kernel)
        return sdpa.prefer(self.attention_variant(q, k, q.dtype, gradient) or "")


def _attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> None:
    """Compute attention and the logarithm of the sums, which torch's function hides, one group of heads at a time."""
    groups = k.shape[1]
    per = q.shape[1] // groups
    for group in range(groups):
        heads = slice(group * per, (group + 1) * per)
        part = mask if mask is None or mask.shape[1] == 1 else mask[:, heads]
        scores = formulas.masked(formulas.wide(q[:, heads]) @ formulas.wide(k[:, group, None]).mT * scale, part, causal)
        sums = scores.logsumexp(-1)
        lse[:, heads] = sums
        weights = torch.where(scores == -torch.inf, 0.0, (scores - sums[..., None]).exp())
        out[:, heads] = (weights @ formulas.wide(v[:, group, None])).to(out.dtype)
