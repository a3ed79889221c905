"""Process-wide switches of torch, each set with the way back: `later` gets the function that undoes it."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from cluster.errors import UserError

Later = Callable[..., Any]

# Kernels of scaled_dot_product_attention. The flags live under torch.backends.cuda, and CPU kernels heed them too.
SDPA = ("flash", "mem_efficient", "cudnn", "math")
ALLOWED = {"flash": ("flash",), "efficient": ("mem_efficient",), "math": ("math",)}


def attention(choice: str, later: Later, device: torch.device) -> None:
    """Allow one kernel of attention only; `auto` leaves torch to choose. Raises UserError where the device lacks it."""
    if choice == "auto":
        return
    switch: Any = torch.backends.cuda
    for name in SDPA:
        before, change = getattr(switch, f"{name}_sdp_enabled")(), getattr(switch, f"enable_{name}_sdp")
        later(change, before)
        change(name in ALLOWED[choice])
    if not _attends(device):
        said = f"attention is {choice!r}, and torch {torch.__version__} has no such kernel for {device}"
        raise UserError(said, "use 'auto' or 'math'")


def _attends(device: torch.device) -> bool:
    """Whether a small attention can be computed with what is allowed now. If not, each of the user's would fail."""
    query = torch.zeros(1, 1, 16, 64, device=device, dtype=torch.float16 if device.type == "cuda" else torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each kernel that it does not take
        try:
            torch.nn.functional.scaled_dot_product_attention(query, query, query)
        except RuntimeError:
            return False
    return True


def tf32(allowed: bool | None, later: Later) -> None:
    """TF32 for products and convolutions in float32. Newer torch has fp32_precision in the place of allow_tf32, and
    refuses a mix of both.
    """
    if allowed is None:
        return
    for owner in (torch.backends.cuda.matmul, getattr(torch.backends.cudnn, "conv", torch.backends.cudnn)):
        new = hasattr(owner, "fp32_precision")
        name, value = ("fp32_precision", "tf32" if allowed else "ieee") if new else ("allow_tf32", allowed)
        later(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def variable(name: str, value: str | None, later: Later) -> None:
    """An environment variable that a vendor's runtime reads; None leaves it as it is."""
    if value is None:
        return
    before = os.environ.get(name)
    later(os.environ.pop, name, None) if before is None else later(os.environ.__setitem__, name, before)
    os.environ[name] = value
