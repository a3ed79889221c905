"""Read the bytes of a tensor in an imported file in logical order, to write them chunk by chunk.

Contiguous tensors are read directly. Others (a transposed weight, every third row) are read through a mapping of their
span, only the elements of a chunk at a time: the kernel can drop each page again, and no copy is built.
"""

import math
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from workers.checkpoint.exchange.pickles.tensors import Reference
from workers.checkpoint.format.dtypes import DTYPES
from workers.checkpoint.format.manifest import DamagedCheckpoint
from workers.checkpoint.format.manifest_checks import open_regular


def is_contiguous(reference: Reference) -> bool:
    """Check whether the elements are contiguous and in order."""
    expected = 1
    for n, stride in zip(reversed(reference.shape), reversed(reference.strides), strict=True):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True


def element_count(reference: Reference) -> int:
    return math.prod(reference.shape)


def last_index(reference: Reference) -> int:
    """Return the index of the last element in its storage."""
    return reference.offset + sum((n - 1) * s for n, s in zip(reference.shape, reference.strides, strict=True))


class StridedSource:
    """Read a tensor, from several threads at once. Its mapping is released after its last byte was read."""

    def __init__(self, source: "Reference | np.ndarray[Any, Any]"):
        self._source = source
        self._lock = threading.Lock()
        self._view: np.ndarray[Any, Any] | None = None
        self._left_bytes = 0 if isinstance(source, np.ndarray) else element_count(source) * DTYPES[source.dtype].bytes

    def read(self, start: int, stop: int, out: memoryview) -> None:
        """Copy bytes `start` to `stop` into `out`. Raises DamagedCheckpoint if the file ends before."""
        if isinstance(self._source, np.ndarray):
            out[:] = self._source.reshape(-1).view(np.uint8).data[start:stop]
        elif is_contiguous(self._source):
            self._read_at(self._source, start, out)
        else:
            self._gather(self._source, start, stop, out)
        if isinstance(self._source, Reference) and self._source.sign_bytes:
            _flip_signs(self._source, start, out)

    def _read_at(self, reference: Reference, start: int, out: memoryview) -> None:
        begin, done = reference.storage.offset + reference.offset * DTYPES[reference.dtype].bytes + start, 0
        descriptor = open_regular(Path(reference.storage.file))
        try:
            while done < len(out):
                count = os.preadv(descriptor, [out[done:]], begin + done)
                if not count:
                    raise DamagedCheckpoint(f"{reference.storage.file} ends while it is read")
                done += count
        finally:
            os.close(descriptor)

    def _gather(self, reference: Reference, start: int, stop: int, out: memoryview) -> None:
        size = DTYPES[reference.dtype].bytes
        with self._lock:
            view = self._view = self._map_view(reference) if self._view is None else self._view
        first, last = start // size, -(-stop // size)
        if start % size or stop % size:  # a chunk may start or end within an element
            elements = np.empty(last - first, view.dtype)
            _copy_elements(view, first, last, elements)
            out[:] = elements.view(np.uint8).data[start - first * size : stop - first * size]
        else:
            _copy_elements(view, first, last, np.frombuffer(out, view.dtype))
        with self._lock:
            self._left_bytes -= stop - start
            if not self._left_bytes:
                self._view = None

    def _map_view(self, reference: Reference) -> "np.ndarray[Any, Any]":
        size = DTYPES[reference.dtype].bytes
        begin, end = (
            reference.storage.offset + index * size for index in (reference.offset, last_index(reference) + 1)
        )
        page = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        descriptor = open_regular(Path(reference.storage.file))
        try:
            if os.fstat(descriptor).st_size < end:
                raise DamagedCheckpoint(f"{reference.storage.file} ends while it is read")
            mapping = mmap.mmap(descriptor, end - page, access=mmap.ACCESS_READ, offset=page)
        finally:
            os.close(descriptor)
        kind = np.dtype(f"V{size}" if size > 8 else f"u{size}")
        elements = np.frombuffer(mapping, kind, count=(end - begin) // size, offset=begin - page)
        strides = tuple(stride * size for stride in reference.strides)
        return np.lib.stride_tricks.as_strided(elements, reference.shape, strides, writeable=False)


def _flip_signs(reference: Reference, start: int, out: memoryview) -> None:
    """Flip the signs that the conjugate and negative bits stand for, in the bytes from `start` on."""
    size, data = DTYPES[reference.dtype].bytes, np.frombuffer(out, np.uint8)
    for byte in reference.sign_bytes:
        data[(byte - start) % size :: size] ^= 0x80


def _copy_elements(view: "np.ndarray[Any, Any]", start: int, stop: int, out: "np.ndarray[Any, Any]") -> None:
    """Copy elements `start` to `stop` in logical order: end of a row, full rows, start of a row."""
    if view.ndim <= 1:
        out[:] = view.reshape(-1)[start:stop] if view.ndim == 0 else view[start:stop]
        return
    row = math.prod(view.shape[1:])
    position = start
    while position < stop:
        index, offset = divmod(position, row)
        rows = (stop - position) // row
        if offset or not rows:
            count = min(row - offset, stop - position)
            _copy_elements(view[index], offset, offset + count, out[position - start : position - start + count])
        else:
            count = rows * row
            out[position - start : position - start + count].reshape(rows, *view.shape[1:])[...] = view[
                index : index + rows
            ]
        position += count
