"""Memory that is reused: the first touch of a page costs ten times what copying it does."""

import mmap
from typing import Any

import numpy as np


def aligned(size_bytes: int) -> memoryview:
    """Anonymous memory that begins at a page, as O_DIRECT wants it."""
    return memoryview(mmap.mmap(-1, max(size_bytes, 1)))


def copy_bytes(out: memoryview, data: Any) -> None:
    """Like `out[:] = data`, without holding Python's lock: other threads go on."""
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8))
