"""Read any byte range of tensors on any device in logical order, without copying all of them.

A contiguous CPU tensor is read without a copy. Others are copied to the host range by range; XLA tensors in batches,
because each transfer waits for the device.
"""

import threading
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from workers.checkpoint.conversion import bits
from workers.checkpoint.disk.layout import TensorPiece
from workers.checkpoint.format.dtypes import DTYPES, dtype_name
from workers.checkpoint.tensors import xla

BATCH_BYTES = 256 << 20
"""Bytes of XLA tensors that are copied to the host together."""


def piece(key: str, tensor: torch.Tensor) -> TensorPiece:
    """Return the tensor to be written under `key`. It is read when its bytes are requested, not now."""
    dtype = DTYPES[dtype_name(tensor.dtype)]
    shape = tuple(tensor.shape) if dtype.safetensors else (tensor.nbytes,)
    data = bits.as_integers(tensor)
    plain = partial(bits.byte_view, data) if data.device.type == "cpu" and data.is_contiguous() else None
    return TensorPiece(key, dtype.code, shape, tensor.nbytes, dtype.bytes, partial(read, data), plain)


def read(tensor: torch.Tensor, start: int, stop: int, out: memoryview) -> None:
    """Copy bytes `start` to `stop` of `tensor`, in logical order, into `out`."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        _copy_bytes(out, bits.byte_view(tensor)[start:stop])
        return
    size = tensor.element_size()
    part = elements(tensor, start // size, -(-stop // size))
    target = torch.from_numpy(np.frombuffer(out, np.uint8)).view(tensor.dtype)
    target.copy_(part)


def elements(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return elements `start` to `stop` in logical order as one dimension; copies no more than those."""
    if tensor.dim() <= 1 or tensor.is_contiguous():
        return tensor.reshape(-1)[start:stop]
    row = tensor[0].numel()
    first, last = start // row, -(-stop // row)
    if last - first == 1:
        return elements(tensor[first], start - first * row, stop - first * row)
    edges = [start, *(r * row for r in range(first + 1, last) if r in (first + 1, last - 1)), stop]
    return torch.cat([_rows(tensor, row, a, b) for a, b in pairwise(edges) if a < b])


def _rows(tensor: torch.Tensor, row: int, start: int, stop: int) -> torch.Tensor:
    if start % row == 0 and stop % row == 0:
        return tensor[start // row : stop // row].reshape(-1)
    return elements(tensor[start // row], start % row, start % row + stop - start)


class XlaBatch:
    """XLA tensors that are copied together on first access, and are freed after their last byte was read."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._pending = tensors
        self._on_host: dict[str, torch.Tensor] = {}
        self._remaining_bytes = {key: tensor.nbytes for key, tensor in tensors.items()}
        self._lock = threading.Lock()

    def pieces(self) -> Iterable[TensorPiece]:
        for key, tensor in self._pending.copy().items():
            yield replace(piece(key, tensor), read=partial(self._read, key))

    def _read(self, key: str, start: int, stop: int, out: memoryview) -> None:
        with self._lock:
            if self._pending:
                moved = xla.to_cpu(list(self._pending.values()))
                self._on_host = {k: bits.as_integers(t) for k, t in zip(self._pending, moved, strict=True)}
                self._pending = {}
            tensor = self._on_host[key]
        read(tensor, start, stop, out)
        with self._lock:
            self._remaining_bytes[key] -= stop - start
            if not self._remaining_bytes[key]:
                del self._on_host[key]


def pieces(tensors: dict[str, torch.Tensor]) -> list[TensorPiece]:
    """Return a piece for each tensor, in order; XLA tensors share transfers."""
    batches: list[XlaBatch] = []
    batch: dict[str, torch.Tensor] = {}
    size_bytes = 0
    for key, tensor in tensors.items():
        if tensor.device.type == "xla" and tensor.nbytes:
            if batch and size_bytes + tensor.nbytes > BATCH_BYTES:
                batches.append(XlaBatch(batch))
                batch, size_bytes = {}, 0
            batch[key] = tensor.detach()
            size_bytes += tensor.nbytes
    batches += [XlaBatch(batch)] if batch else []
    lazy = {xla_piece.key: xla_piece for b in batches for xla_piece in b.pieces()}
    return [lazy.get(key) or piece(key, tensor) for key, tensor in tensors.items()]


def _copy_bytes(out: memoryview, data: Any) -> None:
    """Like `out[:] = data`, but without holding the GIL, so that other threads run."""
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8))
