"""Dtypes that a target does not support, and what a tensor is converted to there. No torch, no probing.

What a device type cannot store is in the catalogue's dtypes.csv; what it computes with is in
workers.models.validation.matrix. Where the device is available, pass the `supported_dtypes` it reports to `load`
instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster import catalogue
from cluster.catalogue import EMULATED
from cluster.catalogue.precision import FP8_FN, FP8_FNUZ
from workers.checkpoint.format.dtypes import COMPLEX, FLOATS, FP8
from workers.checkpoint.format.manifest import TensorEntry
from workers.models.validation.matrix import capabilities

_REPLACEMENTS: dict[str, tuple[str, ...]] = {
    "float64": ("float32",),
    "float16": ("bfloat16", "float32"),
    "bfloat16": ("float16", "float32"),
    **dict.fromkeys(FP8, ("bfloat16", "float16", "float32")),
}
"""Replacements, preferred first: the same size, as models are run on such devices. Optimizer state is converted to
float32. Complex numbers and integers have no replacement, because half of their meaning would be lost.
"""

_MAY_LOSE = {("float64", "float32"), ("float16", "bfloat16"), ("bfloat16", "float16")}


@dataclass(frozen=True, slots=True)
class DtypeDecision:
    """How a load treats a dtype on a target: `action` is keep, convert or refuse; `may_lose` if values can change."""

    action: str
    to: str
    reason: str = ""
    may_lose: bool = False


def unsupported_dtypes(kind: str) -> Mapping[str, str]:
    """Dtypes that a kind does not compute with natively, with the reason. Undocumented ones are not included.

    Raises UserError for an unknown back end, naming the nearest.
    """
    backend, _, model = kind.partition(":")
    vendor = catalogue.vendor(backend)
    if model == EMULATED:
        return catalogue.lossy_dtypes(vendor.torch_device)
    documented = capabilities(f"{vendor.backend}:{model}" if model else vendor.backend)
    missing = {
        dtype: f"{value.value} on {documented.kind} ({value.source})"
        for dtype, value in documented.dtypes.items()
        if value.value in ("absent", "emulated")
    }
    return {**missing, **catalogue.lossy_dtypes(vendor.torch_device, vendor.backend)}


def unsupported_on_device(device_type: str) -> Mapping[str, str]:
    """Dtypes that a torch device type does not support. TPU and XLA on the CPU share one: what fails on both."""
    return catalogue.lossy_dtypes(device_type)


def unsupported_except(supported: frozenset[str]) -> Mapping[str, str]:
    """Floating and complex dtypes that a device did not report as supported, with the reason."""
    return {name: "the target does not support it" for name in (*FLOATS, *COMPLEX) if name not in supported}


def notes(kind: str) -> Mapping[str, str]:
    """Notes on dtypes that a kind keeps, above all on fp8 of the other flavour."""
    backend, _, model = kind.partition(":")
    vendor = catalogue.vendor(backend)
    lines = {} if model == EMULATED else catalogue.preserved_dtypes(vendor.torch_device, vendor.backend)
    flavour = _flavour(vendor.backend, model)
    if not flavour:
        return lines
    other, factor = (FP8_FN, "half") if flavour == "fnuz" else (FP8_FNUZ, "twice")
    for dtype in other:
        own = _other_flavour(dtype)
        lines[dtype] = f"{kind} computes in {own}, where the same bits mean {factor} the value; they stay {dtype}"
    return lines


def _flavour(backend: str, model: str) -> str:
    """Fp8 flavour of a model's architecture, or the one all of a back end share; else ""."""
    architecture = catalogue.architecture_of(f"{backend}:{model}") if model else ""
    rows = (
        row
        for (row_backend, name), row in catalogue.architectures().items()
        if row_backend == backend and architecture in ("", name)
    )
    flavours = {row.fp8_flavour for row in rows} - {"none", ""}
    return flavours.pop() if len(flavours) == 1 else ""


def decide_dtype(tensor: TensorEntry, dtype: str, unsupported: Mapping[str, str]) -> DtypeDecision:
    """Decide whether `tensor`, requested as `dtype`, stays as it is, is converted or is refused."""
    if dtype not in unsupported:
        return DtypeDecision("keep", dtype)
    flavour = _other_flavour(dtype) if tensor.scale else ""
    if flavour and flavour not in unsupported:
        return DtypeDecision(
            "convert", flavour, f"{unsupported[dtype]}; its scale compensates for the flavour", may_lose=True
        )
    choices = _REPLACEMENTS.get(dtype, ())
    if tensor.role in ("optimizer", "master"):
        choices = tuple(name for name in choices if name == "float32")
    to = next((name for name in choices if name not in unsupported), "")
    if to:
        return DtypeDecision("convert", to, unsupported[dtype], may_lose=(dtype, to) in _MAY_LOSE)
    reason = f"{unsupported[dtype]}, and no dtype there can represent " + (
        "a complex number" if dtype in COMPLEX else "its values"
    )
    return DtypeDecision("refuse", dtype, reason)


def _other_flavour(dtype: str) -> str:
    if dtype not in FP8 or dtype == "float8_e8m0fnu":
        return ""
    stem = dtype.removesuffix("fnuz").removesuffix("fn")
    if dtype.endswith("fnuz"):
        return f"{stem}fn" if stem.endswith("e4m3") else stem
    return f"{stem}fnuz"
