"""Bytes of a tensor in a file of others, in logical order, for whoever writes them chunk by chunk.

What lies in order is read where it is. What does not (a transposed weight, every third row) is taken out of a mapping
of its span, a chunk's elements only: each page is in memory no longer than the kernel wants, and nothing is rebuilt.
"""

import math
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from workers.checkpoint.exchange.tensors import Reference
from workers.checkpoint.format.dtypes import DTYPES
from workers.checkpoint.format.manifest import DamagedCheckpoint
from workers.checkpoint.format.manifest_checks import open_regular


def in_order(found: Reference) -> bool:
    """Whether its elements lie one after another."""
    expected = 1
    for n, stride in zip(reversed(found.shape), reversed(found.strides), strict=True):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True


def count_of(found: Reference) -> int:
    return math.prod(found.shape)


def last_of(found: Reference) -> int:
    """The number of its last element in its storage."""
    return found.offset + sum((n - 1) * s for n, s in zip(found.shape, found.strides, strict=True))


class StridedSource:
    """Reads `found`, from several threads at once. What it maps is given back with its last byte."""

    def __init__(self, found: "Reference | np.ndarray[Any, Any]"):
        self._found = found
        self._lock = threading.Lock()
        self._laid: np.ndarray[Any, Any] | None = None
        self._left_bytes = 0 if isinstance(found, np.ndarray) else count_of(found) * DTYPES[found.dtype].bytes

    def read(self, start: int, stop: int, out: memoryview) -> None:
        """Bytes from `start` to `stop`. Raises DamagedCheckpoint where the file ends before."""
        if isinstance(self._found, np.ndarray):
            out[:] = self._found.reshape(-1).view(np.uint8).data[start:stop]
        elif in_order(self._found):
            self._read_at(self._found, start, out)
        else:
            self._gather(self._found, start, stop, out)
        if isinstance(self._found, Reference) and self._found.sign_bytes:
            _turn_signs(self._found, start, out)

    def _read_at(self, found: Reference, start: int, out: memoryview) -> None:
        begin, done = found.storage.offset + found.offset * DTYPES[found.dtype].bytes + start, 0
        descriptor = open_regular(Path(found.storage.file))
        try:
            while done < len(out):
                count = os.preadv(descriptor, [out[done:]], begin + done)
                if not count:
                    raise DamagedCheckpoint(f"{found.storage.file} ends while it is read")
                done += count
        finally:
            os.close(descriptor)

    def _gather(self, found: Reference, start: int, stop: int, out: memoryview) -> None:
        size = DTYPES[found.dtype].bytes
        with self._lock:
            laid = self._laid = self._mapped(found) if self._laid is None else self._laid
        first, last = start // size, -(-stop // size)
        if start % size or stop % size:  # a chunk may end within an element
            cells = np.empty(last - first, laid.dtype)
            _take(laid, first, last, cells)
            out[:] = cells.view(np.uint8).data[start - first * size : stop - first * size]
        else:
            _take(laid, first, last, np.frombuffer(out, laid.dtype))
        with self._lock:
            self._left_bytes -= stop - start
            if not self._left_bytes:
                self._laid = None

    def _mapped(self, found: Reference) -> "np.ndarray[Any, Any]":
        size = DTYPES[found.dtype].bytes
        begin, end = (found.storage.offset + at * size for at in (found.offset, last_of(found) + 1))
        page = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        descriptor = open_regular(Path(found.storage.file))
        try:
            if os.fstat(descriptor).st_size < end:
                raise DamagedCheckpoint(f"{found.storage.file} ends while it is read")
            held = mmap.mmap(descriptor, end - page, access=mmap.ACCESS_READ, offset=page)
        finally:
            os.close(descriptor)
        kind = np.dtype(f"V{size}" if size > 8 else f"u{size}")
        cells = np.frombuffer(held, kind, count=(end - begin) // size, offset=begin - page)
        strides = tuple(stride * size for stride in found.strides)
        return np.lib.stride_tricks.as_strided(cells, found.shape, strides, writeable=False)


def _turn_signs(found: Reference, start: int, out: memoryview) -> None:
    """Of the bytes from `start` on, so that they are the numbers which the conjugate and the negative bit stand for."""
    size, data = DTYPES[found.dtype].bytes, np.frombuffer(out, np.uint8)
    for byte in found.sign_bytes:
        data[(byte - start) % size :: size] ^= 0x80


def _take(laid: "np.ndarray[Any, Any]", start: int, stop: int, out: "np.ndarray[Any, Any]") -> None:
    """Elements from `start` to `stop` of `laid`, counted in logical order: part of a row, whole rows, part of one."""
    if laid.ndim <= 1:
        out[:] = laid.reshape(-1)[start:stop] if laid.ndim == 0 else laid[start:stop]
        return
    row = math.prod(laid.shape[1:])
    at = start
    while at < stop:
        index, inside = divmod(at, row)
        whole = (stop - at) // row
        if inside or not whole:
            count = min(row - inside, stop - at)
            _take(laid[index], inside, inside + count, out[at - start : at - start + count])
        else:
            count = whole * row
            out[at - start : at - start + count].reshape(whole, *laid.shape[1:])[...] = laid[index : index + whole]
        at += count
