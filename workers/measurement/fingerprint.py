"""Hashes of weights and inputs, to check that two machines compute the same thing."""

import hashlib
from typing import Any

import torch
import xxhash
from torch import nn

from workers.devices.backends.device_transfer import tensors_of


def weights_sha256(model: nn.Module) -> str:
    """Hash names, dtypes, shapes and bits of the state dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        _add(digest, tensor)
    return digest.hexdigest()


def inputs_sha256(value: Any) -> str:
    """Hash dtypes, shapes and bits of all tensors in nested data."""
    digest = hashlib.sha256()
    for tensor in tensors_of(value):
        _add(digest, tensor)
    return digest.hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """Hash one tensor's dtype, shape and bits, to detect whether a call changed it.

    For a layout without plain bits (sparse, quantised, nested), return torch's counter of in-place changes instead.
    """
    digest = xxhash.xxh3_128()
    try:
        _add(digest, tensor)
    except (RuntimeError, NotImplementedError, TypeError):
        return f"version {tensor._version}"
    return digest.hexdigest()


def _add(digest: Any, tensor: torch.Tensor) -> None:
    digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy())
