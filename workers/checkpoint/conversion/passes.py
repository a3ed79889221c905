"""Compiled code that reads, hashes, converts and compares stored bytes in one pass.

Its source is workers/native/sources/checkpoint.cpp. Without a compiler everything here is None, and xxhash and torch do
the same, with the same results.
"""

import ctypes
import errno
import os
from pathlib import Path
from typing import Any, Self

import numpy as np

from workers import native
from workers.checkpoint.conversion.load_report import ConversionLoss
from workers.checkpoint.format.manifest import DamagedCheckpoint
from workers.errors import NativeUnavailable

MIN_BYTES = 32 << 20
"""Minimum size of a checkpoint for which code is built or loaded: building takes some seconds, once per node."""
CODES = {"float64": 0, "float32": 1, "bfloat16": 2, "float16": 3}
SHORT_BYTES = 240
"""XXH3 hashes inputs up to this length by other rules, which are not compiled."""

_loaded: "list[Passes]" = []


class Passes:
    """The compiled functions. All release the GIL; none keeps a pointer after it returns."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        pointer, size = ctypes.c_void_p, ctypes.c_uint64
        library.polyfleet_hash_bytes.restype = ctypes.c_int64
        library.polyfleet_hash_begin.argtypes = [pointer]
        library.polyfleet_hash_update.argtypes = [pointer, pointer, size]
        library.polyfleet_hash_digest.argtypes = [pointer, pointer]
        library.polyfleet_copy.argtypes = [pointer, pointer, size, pointer]
        library.polyfleet_convert.argtypes = [pointer, pointer, size, ctypes.c_int32, ctypes.c_int32, pointer]
        library.polyfleet_maps.argtypes = [ctypes.c_int32, ctypes.c_int64, size]
        library.polyfleet_pass.argtypes = [
            *(ctypes.c_int32, ctypes.c_int64, size, pointer),
            *(ctypes.c_int32, ctypes.c_int32, pointer, pointer, pointer),
        ]
        library.polyfleet_pass.restype = ctypes.c_int64
        self._hash_bytes = library.polyfleet_hash_bytes()

    def digest(self) -> "Digest":
        """Start an XXH3-128 hash. The hashed bytes must be more than SHORT_BYTES in total."""
        memory = ctypes.create_string_buffer(self._hash_bytes)
        self._library.polyfleet_hash_begin(memory)
        return Digest(self._library, memory)

    def run(
        self,
        path: Path,
        descriptor: int,
        offset: int,
        size_bytes: int,
        digest: "Digest | None" = None,
        out: memoryview | None = None,
        dtypes: tuple[str, str] | None = None,
        count: bool = False,
    ) -> ConversionLoss:
        """Read part of a file, hash it into `digest` and copy it into `out`, converted if `dtypes` is (from, to).
        Return what the conversion changed if `count` is set. Raises DamagedCheckpoint if the file ends too early or
        cannot be read.
        """
        source, target = (CODES[name] for name in dtypes) if dtypes else (-1, -1)
        change, position = _Change(), ctypes.c_int64(offset)
        code = self._library.polyfleet_pass(
            *(descriptor, offset, size_bytes, digest.memory if digest else None),
            *(source, target, None if out is None else address(out)),
            *(ctypes.byref(change) if count else None, ctypes.byref(position)),
        )
        if code == 1:
            raise DamagedCheckpoint(
                f"{path} ends at byte {position.value} while it was being read: the file was truncated"
            )
        if code:
            reason = os.strerror(-code) if -code in errno.errorcode else f"error {-code}"
            raise DamagedCheckpoint(f"{path} cannot be read at byte {position.value}: {reason}")
        return change.as_loss()

    def maps(self, descriptor: int, offset: int, size_bytes: int) -> bool:
        """Check whether part of a file can be read by mapping it; if not, `run` uses read calls."""
        return bool(self._library.polyfleet_maps(descriptor, offset, size_bytes))

    def convert(self, source: int, target: int, count: int, dtypes: tuple[str, str], compare: bool) -> ConversionLoss:
        """Convert `count` values between two memory addresses; with `target` 0 only compare."""
        change = _Change()
        codes = CODES[dtypes[0]], CODES[dtypes[1]]
        self._library.polyfleet_convert(
            source, target or None, count, *codes, ctypes.byref(change) if compare else None
        )
        return change.as_loss()


class Digest:
    """A hash like xxhash.xxh3_128, for more than SHORT_BYTES in total."""

    def __init__(self, library: ctypes.CDLL, memory: "ctypes.Array[ctypes.c_char]"):
        self._library, self.memory = library, memory

    def update(self, data: "bytes | memoryview") -> None:
        self._library.polyfleet_hash_update(self.memory, address(data), len(data))

    def copy(self, out: memoryview, data: memoryview) -> None:
        """Copy `data` into `out` and hash it in the same pass."""
        self._library.polyfleet_copy(address(data), address(out), len(out), self.memory)

    def hexdigest(self) -> str:
        out = ctypes.create_string_buffer(16)
        self._library.polyfleet_hash_digest(self.memory, out)
        return out.raw.hex()


class _Change(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("values", "new_inf", "new_nan")),
        *((name, ctypes.c_double) for name in ("most", "most_relative")),
    )

    def as_loss(self: Self) -> ConversionLoss:
        return ConversionLoss(self.values, self.new_inf, self.new_nan, self.most, self.most_relative)


def address(data: Any) -> int:
    """Return the memory address of bytes; the caller must keep them alive."""
    return int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else 0


def compiled_passes(size_bytes: int, build: bool = True) -> Passes | None:
    """Return the passes, or None below MIN_BYTES or if native code is unavailable.
    Without `build`, only code that an earlier load on this node has built is used: a save does not wait for a compiler.
    """
    if size_bytes < MIN_BYTES:
        return None
    try:
        library = native.library("checkpoint", flags=("-ffp-contract=off",), build=build)
    except NativeUnavailable:
        return None
    if not _loaded:
        _loaded.append(Passes(library))
    return _loaded[0]


def loaded_passes() -> Passes | None:
    """Return the passes if this process has loaded them before, else None. Never builds anything."""
    return _loaded[0] if _loaded and not native.disabled_reason() else None
