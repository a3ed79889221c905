"""Compiled library of the `cpu` kernels: its sources, flags and functions, and errors from their status."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cluster.errors import UserError
from workers import native
from workers.errors import KernelsUnavailable, NativeUnavailable

SOURCES = Path(__file__).parents[1] / "sources"
FILES = ("cpu_threads", "cpu_norms", "cpu_gates", "cpu_products", "cpu_attention")
FLAGS = ("-pthread", "-Wno-psabi")
"""Only inlined functions pass vectors, so the vector ABI, about which g++ warns, does not matter."""
SCALAR_FLAGS = ("-DPOLYFLEET_SCALAR", "-fno-tree-vectorize", "-fno-tree-slp-vectorize")

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MASK_DTYPES = {**DTYPES, torch.bool: 3}
_STATUS = {1: "out of memory", 2: "unsupported dtypes"}

# p pointer, n 64-bit count, i int, d double: as the functions of sources/cpu_*.cpp are declared.
_KINDS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "d": ctypes.c_double}
_ARGUMENTS = {
    "rmsnorm": "iippp nn dd ii",
    "layernorm": "iipppp nn d i",
    "softmax": "ipp nn i",
    "rmsnorm_backward": "ii ppppp nn dd i",
    "layernorm_backward": "ii ppppp i nn d i",
    "softmax_backward": "ippp nn i",
    "silu": "ipp n i",
    "swiglu": "ippp n i",
    "silu_backward": "ippp n i",
    "swiglu_backward": "ippppp n i",
    "rope": "ii pppp nnnnn ii",
    "matmul": "ippp nnnn ii d i",
    "matmul_vec": "ippp nn n i",
    "weighted_sum_rows": "ippp nnn i",
    "attention": "i pppppp nnnnnnn i nnnn d ii",
    "lanes": "",
    "threads_of_last_call": "",
}


class Compiled:
    """Functions of one build, as attributes without their prefix. They raise MemoryError when out of memory."""

    def __init__(self, loaded: ctypes.CDLL):
        self.path = Path(loaded._name)
        for name, letters in _ARGUMENTS.items():
            function = getattr(loaded, f"polyfleet_{name}")
            function.argtypes = [_KINDS[letter] for letter in letters.replace(" ", "")]
            function.restype = ctypes.c_int
            if letters:
                function.errcheck = _check_status
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(f"the library {self.path.name} has no function {name!r}")


def compiled(simd: bool) -> Compiled:
    """Return the library, built once per node and loaded once per process. Raises KernelsUnavailable."""
    try:
        return _bind_functions(_load(simd))
    except NativeUnavailable as e:
        raise KernelsUnavailable("cpu", e.reason, "install g++, or use kernels 'torch'") from e


def flags(simd: bool) -> tuple[str, ...]:
    return FLAGS if simd else (*FLAGS, *SCALAR_FLAGS)


def _load(simd: bool) -> ctypes.CDLL:
    name = "kernels" if simd else "kernels_scalar"
    return native.library(name, [SOURCES / f"{file}.cpp" for file in FILES], flags(simd))


@cache
def _bind_functions(loaded: ctypes.CDLL) -> Compiled:
    return Compiled(loaded)


def _check_status(status: int, function: Any, arguments: tuple[Any, ...]) -> int:
    if status == 1:
        raise MemoryError(_STATUS[status])
    if status:
        raise UserError(f"the compiled kernels failed: {_STATUS.get(status, status)}", "use kernels 'torch'")
    return status
