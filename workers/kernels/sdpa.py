"""torch's scaled_dot_product_attention: which of its kernels computes a call, and the masks of this contract.

torch has up to four kernels for it (NAMES in the registry), of which a device and a shape have some. Until one has been
measured to be faster, torch's own order decides, which is fixed in torch's code. A call's gradient is computed by the
kernel that computed the call.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_IS_ALLOWED: dict[str, Callable[[], bool]] = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}
"""Whether this process may use a kernel: a back end's option `attention` can turn others off, also on the CPU."""


def only(name: str) -> AbstractContextManager[Any]:
    """Allow one kernel. torch raises RuntimeError for a call that this kernel cannot compute."""
    return sdpa_kernel([SDPA[name]])


def prefer(name: str) -> AbstractContextManager[Any]:
    """Try this kernel first, and others for calls that it cannot compute. "" leaves torch's order.

    A kernel that the process may not use is not preferred. `math` computes every call, so it needs no others; they are
    turned off, because torch's order on the CPU cannot be changed.
    """
    if not name:
        return nullcontext()
    others = [one for one in SDPA if one != name]
    if not torch.compiler.is_compiling():  # a compiler cannot trace these functions
        if not _IS_ALLOWED[name]():
            return nullcontext()
        others = [one for one in others if _IS_ALLOWED[one]()]
    order = [SDPA[name]] if name == "math" else [SDPA[name], *(SDPA[one] for one in others)]
    return sdpa_kernel(order, set_priority=True)


@cache
def usable(device: torch.device) -> tuple[str, ...]:
    """Return the kernels that can compute a small attention on the device."""
    return tuple(name for name in SDPA if _computes(name, device))


def _computes(name: str, device: torch.device) -> bool:
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch warns about each kernel that it cannot use
        try:
            query = torch.zeros(1, 1, 16, 64, device=device, dtype=dtype)
            with only(name):
                F.scaled_dot_product_attention(query, query, query)
        except (RuntimeError, NotImplementedError):
            return False
    return True


def attention(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, mask: Tensor | None, scale: float | None, causal: bool
) -> Tensor:
    """Attention as in attention.py, with gradients: `causal` counts from the end, a token that sees nothing gets zeros.

    torch's kernels differ for such a token, also in gradients. It sees all tokens here, and its result is then 0.
    """
    query_tokens, key_tokens = q_BHTD.shape[2], k_BGSD.shape[2]
    options: dict[str, Any] = {"scale": scale}
    if q_BHTD.shape[1] != k_BGSD.shape[1]:  # a branch, because torch refuses the symbolic truth of a dynamic shape
        options["enable_gqa"] = True
    if causal and mask is None and query_tokens == key_tokens:
        return F.scaled_dot_product_attention(q_BHTD, k_BGSD, v_BGSE, is_causal=True, **options)
    visible = _combined_mask(mask, query_tokens, key_tokens, causal, q_BHTD)
    if visible is None:
        return F.scaled_dot_product_attention(q_BHTD, k_BGSD, v_BGSE, **options)
    is_bool = visible.dtype == torch.bool
    blind = (~visible if is_bool else visible == -torch.inf).all(-1, keepdim=True)
    visible = visible | blind if is_bool else visible.masked_fill(blind, 0.0)
    return F.scaled_dot_product_attention(q_BHTD, k_BGSD, v_BGSE, visible, **options).masked_fill(blind, 0.0)


def _combined_mask(
    mask: Tensor | None, query_tokens: int, key_tokens: int, causal: bool, like: Tensor
) -> Tensor | None:
    """Combine the mask and causality to one mask for torch: bool, or additive in the dtype of q."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(like.dtype)
    if not causal:
        return mask
    corner = torch.ones(query_tokens, key_tokens, dtype=torch.bool, device=like.device).tril(key_tokens - query_tokens)
    if mask is None:
        return corner
    return mask & corner if mask.dtype == torch.bool else mask.masked_fill(~corner, -torch.inf)
