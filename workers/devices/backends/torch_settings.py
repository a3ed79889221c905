"""Process-wide settings of torch. Each function passes `later` a function that restores the old value."""

import os
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cluster.errors import UserError

Later = Callable[..., Any]

# Kernels of scaled_dot_product_attention. Their flags are in torch.backends.cuda and apply to CPU kernels too.
SDPA = ("flash", "mem_efficient", "cudnn", "math")
ALLOWED = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn", "math": "math"}


def attention(choice: str, later: Later, device: torch.device) -> None:
    """Allow one attention kernel only; `auto` lets torch choose, `measured` orders the kernels by stored measurements.

    Raises UserError if the device lacks the kernel.
    """
    if choice == "auto":
        return
    if choice == "measured":
        _order_attention(later, device)
        return
    switch: Any = torch.backends.cuda
    for name in SDPA:
        was_enabled, change = getattr(switch, f"{name}_sdp_enabled")(), getattr(switch, f"enable_{name}_sdp")
        later(change, was_enabled)
        change(name == ALLOWED[choice])
    if not _attention_works(device):
        message = f"attention is {choice!r}, but torch {torch.__version__} has no such kernel for {device}"
        raise UserError(message, "use 'auto' or 'math'")


def _order_attention(later: Later, device: torch.device) -> None:
    """Let torch try the fastest kernel first. Without measurements, its own order stays.

    Kernels slower than `math` are turned off: `math` computes every call, and torch's order on the CPU is fixed.
    """
    names = import_module("workers.kernels.dispatch.attention_choice").measured_order(device)
    if not names:
        return
    kernels = [getattr(SDPBackend, f"{name.upper()}{'' if name == 'math' else '_ATTENTION'}") for name in names]
    order = sdpa_kernel(kernels[: names.index("math") + 1], set_priority=True)
    order.__enter__()
    later(order.__exit__, None, None, None)


def _attention_works(device: torch.device) -> bool:
    """Return whether the allowed kernels can compute a small attention. If not, the user's calls would fail too."""
    query = torch.zeros(1, 1, 16, 64, device=device, dtype=torch.float16 if device.type == "cuda" else torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about each kernel that it cannot use
        try:
            torch.nn.functional.scaled_dot_product_attention(query, query, query)
        except RuntimeError:
            return False
    return True


def tf32(allowed: bool | None, later: Later) -> None:
    """Allow TF32 in float32 matrix products and convolutions; None leaves torch's setting.

    Newer torch replaces allow_tf32 by fp32_precision and refuses a mix of both.
    """
    if allowed is None:
        return
    for owner in (torch.backends.cuda.matmul, getattr(torch.backends.cudnn, "conv", torch.backends.cudnn)):
        has_fp32_precision = hasattr(owner, "fp32_precision")
        name, value = (
            ("fp32_precision", "tf32" if allowed else "ieee") if has_fp32_precision else ("allow_tf32", allowed)
        )
        later(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def variable(name: str, value: str | None, later: Later) -> None:
    """Set an environment variable that a vendor's runtime reads; None leaves it unchanged."""
    if value is None:
        return
    old_value = os.environ.get(name)
    later(os.environ.pop, name, None) if old_value is None else later(os.environ.__setitem__, name, old_value)
    os.environ[name] = value
