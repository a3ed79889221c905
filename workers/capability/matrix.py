"""capabilities(kind): what a kind of device can do, each value with how it is known and where from."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cluster.accelerators import EMULATED, backend_name
from cluster.errors import UserError
from workers.capability.facts import FNUZ_ARCHITECTURES, FP8_FN, FP8_FNUZ, device_facts, documented_dtypes

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend

PROBED, DOCUMENTED, UNKNOWN = "probed", "documented", "unknown"
FLOATS = ("float32", "bfloat16", "float16", "float64", "complex64", "complex128", *FP8_FN, *FP8_FNUZ)
# From the kind to what tells dtypes apart, where a kind is asked for without a device: compute capability and gfx.
ARCHITECTURES = {
    "nvidia:V100": "sm_70", "nvidia:T4": "sm_75", "nvidia:A100": "sm_80", "nvidia:A10": "sm_86", "nvidia:A30": "sm_80",
    "nvidia:A40": "sm_86", "nvidia:RTX-30": "sm_86", "nvidia:RTX-40": "sm_89", "nvidia:L4": "sm_89",
    "nvidia:H100": "sm_90", "nvidia:H200": "sm_90", "nvidia:GH200": "sm_90", "nvidia:B200": "sm_100",
    "nvidia:GB200": "sm_100", "amd:MI210": "gfx90a", "amd:MI250": "gfx90a", "amd:MI300": "gfx942",
    "amd:MI308": "gfx942", "amd:MI325": "gfx942", "amd:MI350": "gfx950", "amd:MI355": "gfx950",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Known:
    """A value, `probed` on a device, `documented`, or `unknown` (then None), and the source."""

    value: Any
    label: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """`dtypes` says for each floating dtype `native`, `emulated` (computed with at a fraction of the speed, or by
    conversion) or `absent`. `fp8_flavour` is `fn` (NVIDIA's and OCP's), `fnuz` (MI300: the same bits mean half the
    value) or `none`.
    """

    kind: str
    dtypes: dict[str, Known]
    custom_kernels: Known
    flash_attention: Known
    fp8_flavour: Known
    xla: Known
    dynamic_shapes: Known
    collectives: Known
    compile: Known

    def native(self, dtype: str) -> bool | None:
        """None where it is unknown."""
        found = self.dtypes.get(dtype)
        return None if found is None or found.label == UNKNOWN else found.value == "native"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Backend:
    """What is documented of all devices of one back end."""

    kernels: str
    flash: bool | None
    dynamic: str
    collectives: str
    compiler: str


OF = {
    "nvidia": _Backend("CUDA, Triton", True, "yes", "nccl", "inductor (Triton)"),
    "amd": _Backend("HIP, Triton", True, "yes", "nccl (RCCL)", "inductor (Triton)"),
    "tpu": _Backend("Pallas", True, "no: each new shape is compiled anew", "xla", "openxla"),
    "intel": _Backend("SYCL, Triton", True, "yes", "xccl", "inductor (Triton)"),
    "neuron": _Backend("NKI", True, "no: each new shape is compiled anew", "xla", "neuronx-cc"),
    "apple": _Backend("Metal", None, "yes", "gloo (through the host)", "inductor (prototype)"),
    "cpu": _Backend("C++", True, "yes", "gloo", "inductor (C++)"),
}
SOURCES = {
    "nvidia": "PyTorch's documentation; NVIDIA's CUDA programming guide",
    "amd": "PyTorch's documentation; AMD's ROCm documentation",
    "tpu": "PyTorch/XLA's documentation",
    "intel": "PyTorch's documentation of XPU",
    "neuron": "AWS Neuron's documentation",
    "apple": "PyTorch's documentation of MPS",
    "cpu": "PyTorch's documentation",
}


def capabilities(kind: str, backend: "BaseBackend | None" = None) -> Capabilities:
    """Of a kind as devices spell it (`nvidia:H100-80GB`, `tpu:v5e`, `cpu`) or of a back end by name or alias.

    With a `backend`, which must be on such a device, what its probes found overrules the documents; the probes run once
    per kind and set of library versions and are then read from POLYFLEET_HOME. Raises UserError for an unknown back
    end, naming the nearest.
    """
    if not isinstance(kind, str):
        raise UserError(f"{type(kind).__name__} is no kind", "give one as a string, as in 'nvidia:H100-80GB'")
    if backend is not None and not hasattr(backend, "get_device_info"):
        raise UserError(f"backend is a {type(backend).__name__}", "give what workers.get_backend returns")
    name = backend_name(kind.partition(":")[0])
    asked = name + (f":{kind.partition(':')[2]}" if ":" in kind else "")
    known = _documented(name, asked)
    if backend is None:
        return known
    from workers.capability.probes import overruled

    return overruled(known, backend)


def architecture_of(kind: str) -> str:
    """The longest listed kind that begins this one decides: `nvidia:A100-80GB` is an A100, not an A10."""
    found = [listed for listed in ARCHITECTURES if kind.startswith(listed)]
    return ARCHITECTURES[max(found, key=len)] if found else ""


def _documented(backend: str, kind: str) -> Capabilities:
    facts, all_of = SOURCES[backend], OF[backend]
    emulated = kind == f"tpu:{EMULATED}"
    return Capabilities(
        kind=kind,
        dtypes=_dtypes(backend, kind),
        custom_kernels=Known("none: they are for TPUs" if emulated else all_of.kernels, DOCUMENTED, facts),
        flash_attention=_told(False if emulated else all_of.flash, facts),
        fp8_flavour=_flavour(backend, kind),
        xla=Known(backend in ("tpu", "neuron"), DOCUMENTED, facts),
        dynamic_shapes=Known(all_of.dynamic, DOCUMENTED, facts),
        collectives=Known("gloo" if emulated else all_of.collectives, DOCUMENTED, facts),
        compile=Known(all_of.compiler, DOCUMENTED, facts),
    )


def _told(value: bool | None, source: str) -> Known:
    return Known(None, UNKNOWN) if value is None else Known(value, DOCUMENTED, source)


def _dtypes(backend: str, kind: str) -> dict[str, Known]:
    """A bare back end, or a model nobody lists, has unknown dtypes but float32: its devices differ."""
    architecture = architecture_of(kind)
    specific = bool(architecture) or (backend not in ("nvidia", "amd") and (":" in kind or backend in ("cpu", "apple")))
    if not specific:
        return {name: Known("native" if name == "float32" else None, DOCUMENTED if name == "float32" else UNKNOWN)
                for name in FLOATS}  # fmt: skip
    native = documented_dtypes(backend, kind, architecture)
    row = device_facts(kind)
    source = row.source if row else SOURCES[backend]
    found = {name: Known("native" if name in native else "absent", DOCUMENTED, source) for name in FLOATS}
    return found | {name: Known(None, UNKNOWN) for name in UNKNOWN_WITHOUT_A_DEVICE.get(backend, ())} | _emulated(kind)


# By instruction set, which a kind `cpu` does not tell.
UNKNOWN_WITHOUT_A_DEVICE = {"cpu": ("bfloat16", "float16")}


def _emulated(kind: str) -> dict[str, Known]:
    """What torch computes by conversion, or at a fraction of the speed, on devices without units for it."""
    source = "NVIDIA's CUDA programming guide; torch computes it in float32"
    if kind.startswith(("nvidia:V100", "nvidia:T4")):
        return {"bfloat16": Known("emulated", DOCUMENTED, source)}
    return {}


def _flavour(backend: str, kind: str) -> Known:
    architecture, source = architecture_of(kind), SOURCES[backend]
    if backend in ("nvidia", "amd") and not architecture:
        return Known(None, UNKNOWN)
    if architecture in FNUZ_ARCHITECTURES:
        return Known("fnuz", DOCUMENTED, "ROCm's table of data types")
    native = documented_dtypes(backend, kind, architecture)
    return Known("fn" if "float8_e4m3fn" in native else "none", DOCUMENTED, source)
