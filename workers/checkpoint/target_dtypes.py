"""What a target lacks, and what a tensor becomes there: documented or probed facts, no probing here, no torch.

What cannot be held stands in the catalogue's dtypes.csv, what is computed with in workers.capability. A device at hand
is better asked: pass its `supported_dtypes` to `load`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster import catalogue
from cluster.catalogue import EMULATED
from cluster.catalogue.precision import FP8_FN, FP8_FNUZ
from workers.capability.matrix import capabilities
from workers.checkpoint.format.dtypes import COMPLEX, FLOATS, FP8
from workers.checkpoint.format.manifest import TensorEntry

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
class DtypeDecision:
    """What becomes of a dtype on a target: `action` is keep, convert or refuse; `may_lose` where values can change."""

    action: str
    to: str
    reason: str = ""
    may_lose: bool = False


def unsupported_dtypes(kind: str) -> Mapping[str, str]:
    """Dtypes a kind does not compute with natively, with the reason. What nobody knows is not among them.

    Raises UserError for an unknown back end, naming the nearest.
    """
    backend, _, model = kind.partition(":")
    vendor = catalogue.vendor(backend)
    if model == EMULATED:
        return catalogue.lossy_dtypes(vendor.torch_device)
    known = capabilities(f"{vendor.backend}:{model}" if model else vendor.backend)
    found = {
        dtype: f"{told.value} on {known.kind} ({told.source})"
        for dtype, told in known.dtypes.items()
        if told.value in ("absent", "emulated")
    }
    return {**found, **catalogue.lossy_dtypes(vendor.torch_device, vendor.backend)}


def unsupported_on_device(device_type: str) -> Mapping[str, str]:
    """The same for a torch device type, which does not tell a TPU from XLA on the CPU: only what fails on both."""
    return catalogue.lossy_dtypes(device_type)


def unsupported_except(supported: frozenset[str]) -> Mapping[str, str]:
    """The same for a device that was asked what it supports."""
    return {name: "the target does not support it" for name in (*FLOATS, *COMPLEX) if name not in supported}


def notes(kind: str) -> Mapping[str, str]:
    """Of dtypes that a kind keeps, what is worth knowing: above all fp8 of the other flavour."""
    backend, _, model = kind.partition(":")
    vendor = catalogue.vendor(backend)
    told = {} if model == EMULATED else catalogue.preserved_dtypes(vendor.torch_device, vendor.backend)
    flavour = _flavour(vendor.backend, model)
    if not flavour:
        return told
    other, factor = (FP8_FN, "half") if flavour == "fnuz" else (FP8_FNUZ, "twice")
    for dtype in other:
        own = _other_flavour(dtype)
        told[dtype] = f"{kind} computes in {own}, where the same bits mean {factor} the value; they stay {dtype}"
    return told


def _flavour(backend: str, model: str) -> str:
    """Of the model's architecture; of a back end alone, that of all its architectures that have one and the same."""
    own = catalogue.architecture_of(f"{backend}:{model}") if model else ""
    rows = (row for (of, name), row in catalogue.architectures().items() if of == backend and own in ("", name))
    flavours = {row.fp8_flavour for row in rows} - {"none", ""}
    return flavours.pop() if len(flavours) == 1 else ""


def decide_dtype(tensor: TensorEntry, dtype: str, lacks: Mapping[str, str]) -> DtypeDecision:
    """Of `tensor`, where it is wanted as `dtype`."""
    if dtype not in lacks:
        return DtypeDecision("keep", dtype)
    flavour = _other_flavour(dtype) if tensor.scale else ""
    if flavour and flavour not in lacks:
        return DtypeDecision("convert", flavour, f"{lacks[dtype]}; its scale makes up for the flavour", may_lose=True)
    choices = _INSTEAD.get(dtype, ())
    if tensor.role in ("optimizer", "master"):
        choices = tuple(name for name in choices if name == "float32")
    to = next((name for name in choices if name not in lacks), "")
    if to:
        return DtypeDecision("convert", to, lacks[dtype], may_lose=(dtype, to) in _LOSES)
    why = f"{lacks[dtype]}, and nothing there holds " + ("a complex number" if dtype in COMPLEX else "its values")
    return DtypeDecision("refuse", dtype, why)


def _other_flavour(dtype: str) -> str:
    if dtype not in FP8 or dtype == "float8_e8m0fnu":
        return ""
    stem = dtype.removesuffix("fnuz").removesuffix("fn")
    if dtype.endswith("fnuz"):
        return f"{stem}fn" if stem.endswith("e4m3") else stem
    return f"{stem}fnuz"
