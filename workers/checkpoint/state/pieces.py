"""Tensors where they are, seen as bytes in logical order: any range of them, without a copy of the whole.

A contiguous tensor on the CPU is its own bytes. Others are brought over in the ranges that are asked for; those of XLA
in batches, since each transfer waits for the device.
"""

import threading
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from workers.checkpoint.disk.buffers import copy_bytes
from workers.checkpoint.disk.layout import TensorPiece
from workers.checkpoint.format.dtypes import DTYPES, dtype_name
from workers.checkpoint.state import bits, xla

BATCH_BYTES = 256 << 20
"""Of XLA tensors brought to the host together."""


def piece(key: str, tensor: torch.Tensor) -> TensorPiece:
    """To be written under `key`. The tensor is looked at when its bytes are asked for, not now."""
    dtype = DTYPES[dtype_name(tensor.dtype)]
    shape = tuple(tensor.shape) if dtype.safetensors else (tensor.nbytes,)
    data = bits.movable(tensor)
    plain = partial(bits.byte_view, data) if data.device.type == "cpu" and data.is_contiguous() else None
    return TensorPiece(key, dtype.code, shape, tensor.nbytes, dtype.bytes, partial(read, data), plain)


def read(tensor: torch.Tensor, start: int, stop: int, out: memoryview) -> None:
    """Bytes `start` to `stop` of `tensor` in logical order into `out`."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        copy_bytes(out, bits.byte_view(tensor)[start:stop])
        return
    size = tensor.element_size()
    part = elements(tensor, start // size, -(-stop // size))
    target = torch.from_numpy(np.frombuffer(out, np.uint8)).view(tensor.dtype)
    target.copy_(part)


def elements(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements `start` to `stop` in logical order as one dimension; copies no more than those."""
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
    """Tensors of XLA that travel together, when the first byte of any is asked for, and are freed after the last."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._waiting = tensors
        self._here: dict[str, torch.Tensor] = {}
        self._left = {key: tensor.nbytes for key, tensor in tensors.items()}
        self._lock = threading.Lock()

    def pieces(self) -> Iterable[TensorPiece]:
        for key, tensor in self._waiting.copy().items():
            yield replace(piece(key, tensor), read=partial(self._read, key))

    def _read(self, key: str, start: int, stop: int, out: memoryview) -> None:
        with self._lock:
            if self._waiting:
                moved = xla.to_cpu(list(self._waiting.values()))
                self._here = {k: bits.movable(t) for k, t in zip(self._waiting, moved, strict=True)}
                self._waiting = {}
            tensor = self._here[key]
        read(tensor, start, stop, out)
        with self._lock:
            self._left[key] -= stop - start
            if not self._left[key]:
                del self._here[key]


def pieces(tensors: dict[str, torch.Tensor]) -> list[TensorPiece]:
    """One for each, in order; XLA's share transfers."""
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
    lazy = {found.key: found for b in batches for found in b.pieces()}
    return [lazy.get(key) or piece(key, tensor) for key, tensor in tensors.items()]
