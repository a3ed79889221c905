"""Refuse to save a checkpoint whose parameters or optimizer state are NaN."""

import torch

from workers.checkpoint.format.dtypes import FLOATS
from workers.checkpoint.saving.saver import PreparedSave
from workers.errors import NonFiniteValue

ROLES = ("parameter", "optimizer", "master")
"""Roles to check. Buffers may contain anything: masks are infinite, and uninitialized memory is arbitrary."""
CHECKED_DTYPES = (*FLOATS, "complex64", "complex128")
PIECE_BYTES = 16 << 20


def check_no_nan(prepared: PreparedSave) -> None:
    """Check the copy in memory. Raises NonFiniteValue for the first parameter or optimizer state with NaN."""
    if prepared.arena is None:
        return
    for layout in prepared.layouts:
        for piece, offset in zip(layout.pieces, layout.offsets, strict=True):
            entry = prepared.tensors[piece.key]
            if entry.role in ROLES and entry.dtype in CHECKED_DTYPES and piece.bytes:
                data = prepared.arena.piece(layout, offset, piece.bytes)
                if _has_nan(data, getattr(torch, entry.dtype)):
                    raise NonFiniteValue(
                        f"{entry.role} {piece.key} of the checkpoint contains NaN", prepared.manifest.step
                    )


def _has_nan(data: memoryview, dtype: torch.dtype) -> bool:
    """Check for NaN, first by the sum, which is faster. Infinities of both signs also add up to NaN."""
    tensor = torch.frombuffer(data, dtype=dtype)
    for part in torch.split(tensor, PIECE_BYTES // dtype.itemsize):
        values = part.float() if dtype.itemsize == 1 else part
        if torch.isnan(values.sum()) and torch.isnan(values).any():
            return True
    return False
