"""What a target lacks, and what a tensor becomes there: documented or measured facts, no probing, no torch.

Sources: torch_xla 2.8.1 on its CPU runtime, measured (complex128, fp8 flavours); pytorch#122602 (MPS has no float64);
vendors' dtype tables for TPU and Neuron. A device at hand is better asked: pass its `supported_dtypes` to `load`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from workers.checkpoint.dtypes import COMPLEX, FLOATS, FP8

_XLA = {
    "complex128": "XLA silently drops its imaginary part",
    "complex32": "torch_xla does not support the type",
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), "torch_xla does not support the type"),
    "float4_e2m1fn_x2": "torch_xla does not support the type",
}
_NO_COMPLEX = "complex numbers are not known to survive there"
_LACKS: dict[str, dict[str, str]] = {
    "tpu": {**_XLA, "float64": "a TPU has no float64 (XLA on the CPU keeps it)", "complex64": _NO_COMPLEX},
    "neuron": {**_XLA, "float64": "Neuron devices have no float64", "complex64": _NO_COMPLEX},
    "apple": {
        "float64": "MPS has no float64",
        "complex128": "MPS has no float64, so no complex128",
        **dict.fromkeys(FP8, "MPS has no fp8"),
    },
}
_OF_DEVICE_TYPE: dict[str, dict[str, str]] = {"xla": _XLA, "mps": _LACKS["apple"]}

NOTES: dict[str, dict[str, str]] = {
    "amd": {
        "float8_e4m3fn": "MI300 computes in e4m3fnuz, where the same bits mean half the value; they stay e4m3fn",
        "float8_e5m2": "MI300 computes in e5m2fnuz; they stay e5m2",
    },
    "nvidia": {
        "float8_e4m3fnuz": "NVIDIA computes in e4m3fn, where the same bits mean twice the value; they stay e4m3fnuz",
        "float8_e5m2fnuz": "NVIDIA computes in e5m2; they stay e5m2fnuz",
    },
    "intel": {"float64": "Arc GPUs have no float64 of their own"},
}
"""Kept, but worth knowing."""

_INSTEAD: dict[str, tuple[str, ...]] = {
    "float64": ("float32",),
    "float16": ("float32",),
    "bfloat16": ("float32",),
    **dict.fromkeys(FP8, ("bfloat16", "float32")),
}
"""First choice first. Complex and integers have no stand-in: half of their meaning would go."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a dtype on a target: `action` is keep, convert or refuse; `may_lose` where values can change."""

    action: str
    to: str
    reason: str = ""
    may_lose: bool = False


def lacking(backend: str, emulated: bool) -> Mapping[str, str]:
    """Dtypes a backend cannot hold, with the reason. `emulated`: XLA on the CPU instead of a TPU."""
    return _XLA if emulated and backend == "tpu" else _LACKS.get(backend, {})


def lacking_on(device_type: str) -> Mapping[str, str]:
    """The same for a torch device type, which does not tell a TPU from XLA on the CPU: only what fails on both."""
    return _OF_DEVICE_TYPE.get(device_type, {})


def lacking_beyond(supported: frozenset[str]) -> Mapping[str, str]:
    """The same for a device that was asked what it supports."""
    return {name: "the target does not support it" for name in (*FLOATS, *COMPLEX) if name not in supported}


def fate(dtype: str, lacks: Mapping[str, str]) -> Fate:
    if dtype not in lacks:
        return Fate("keep", dtype)
    to = next((name for name in _INSTEAD.get(dtype, ()) if name not in lacks), "")
    if to:
        return Fate("convert", to, lacks[dtype], may_lose=dtype == "float64")
    why = f"{lacks[dtype]}, and nothing there holds " + ("a complex number" if dtype in COMPLEX else "its values")
    return Fate("refuse", dtype, why)
