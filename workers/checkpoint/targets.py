"""What a target lacks, and what a tensor becomes there: documented or probed facts, no probing here, no torch.

Sources: torch_xla 2.8.1 on its CPU runtime, measured (complex128, fp8 flavours); pytorch#122602 (MPS has no float64);
workers.capability for models of devices. A device at hand is better asked: pass its `supported_dtypes` to `load`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.accelerators import EMULATED, backend_name
from workers.capability.matrix import capabilities
from workers.checkpoint.format.dtypes import COMPLEX, FLOATS, FP8
from workers.checkpoint.format.manifest import TensorEntry

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
    "float16": ("bfloat16", "float32"),
    "bfloat16": ("float16", "float32"),
    **dict.fromkeys(FP8, ("bfloat16", "float16", "float32")),
}
"""First choice first: of the same size, as people run models there; a state that an optimizer sums up goes to float32.
Complex and integers have no stand-in: half of their meaning would go."""

_LOSES = {("float64", "float32"), ("float16", "bfloat16"), ("bfloat16", "float16")}


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a dtype on a target: `action` is keep, convert or refuse; `may_lose` where values can change."""

    action: str
    to: str
    reason: str = ""
    may_lose: bool = False


def lacking(kind: str) -> Mapping[str, str]:
    """Dtypes a kind does not compute with natively, with the reason. What nobody knows is not among them.

    Raises UserError for an unknown back end, naming the nearest.
    """
    backend, _, model = kind.partition(":")
    name = backend_name(backend)
    if name == "tpu" and model == EMULATED:
        return _XLA
    known = capabilities(f"{name}:{model}" if model else name)
    found = {
        dtype: f"{told.value} on {known.kind} ({told.source})"
        for dtype, told in known.dtypes.items()
        if told.value in ("absent", "emulated")
    }
    return {**found, **_LACKS.get(name, {})}


def lacking_on(device_type: str) -> Mapping[str, str]:
    """The same for a torch device type, which does not tell a TPU from XLA on the CPU: only what fails on both."""
    return _OF_DEVICE_TYPE.get(device_type, {})


def lacking_beyond(supported: frozenset[str]) -> Mapping[str, str]:
    """The same for a device that was asked what it supports."""
    return {name: "the target does not support it" for name in (*FLOATS, *COMPLEX) if name not in supported}


def fate(tensor: TensorEntry, dtype: str, lacks: Mapping[str, str]) -> Fate:
    """Of `tensor`, where it is wanted as `dtype`."""
    if dtype not in lacks:
        return Fate("keep", dtype)
    flavour = _other_flavour(dtype) if tensor.scale else ""
    if flavour and flavour not in lacks:
        return Fate("convert", flavour, f"{lacks[dtype]}; its scale makes up for the flavour", may_lose=True)
    choices = _INSTEAD.get(dtype, ())
    if tensor.role in ("optimizer", "master"):
        choices = tuple(name for name in choices if name == "float32")
    to = next((name for name in choices if name not in lacks), "")
    if to:
        return Fate("convert", to, lacks[dtype], may_lose=(dtype, to) in _LOSES)
    why = f"{lacks[dtype]}, and nothing there holds " + ("a complex number" if dtype in COMPLEX else "its values")
    return Fate("refuse", dtype, why)


def _other_flavour(dtype: str) -> str:
    if dtype not in FP8 or dtype == "float8_e8m0fnu":
        return ""
    stem = dtype.removesuffix("fnuz").removesuffix("fn")
    if dtype.endswith("fnuz"):
        return f"{stem}fn" if stem.endswith("e4m3") else stem
    return f"{stem}fnuz"
