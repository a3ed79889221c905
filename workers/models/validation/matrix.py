"""Capabilities of a kind of device, each value with its origin (probed, documented, unknown) and source."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cluster import catalogue
from cluster.catalogue import EMULATED, Architecture, backend_name
from cluster.catalogue.precision import FLOATS as FLOATS
from cluster.errors import UserError
from workers.devices.capability.documented import citation

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend

PROBED, DOCUMENTED, UNKNOWN = "probed", "documented", "unknown"


@dataclass(frozen=True, slots=True)
class CapabilityValue:
    """A value, its label `probed`, `documented` or `unknown` (the value is then None), and its source."""

    value: Any
    label: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of a kind of device.

    `dtypes` has for each floating dtype `native`, `emulated` (computed by conversion or at a fraction of the speed) or
    `absent`. `fp8_flavour` is `fn` (NVIDIA and OCP), `fnuz` (MI300: the same bits mean half the value) or `none`.
    """

    kind: str
    dtypes: dict[str, CapabilityValue]
    custom_kernels: CapabilityValue
    flash_attention: CapabilityValue
    fp8_flavour: CapabilityValue
    xla: CapabilityValue
    dynamic_shapes: CapabilityValue
    collectives: CapabilityValue
    compile: CapabilityValue

    def native(self, dtype: str) -> bool | None:
        """Return whether the device computes natively with `dtype`, None if unknown."""
        support = self.dtypes.get(dtype)
        return None if support is None or support.label == UNKNOWN else support.value == "native"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def capabilities(kind: str, backend: "BaseBackend | None" = None) -> Capabilities:
    """Return the capabilities of a device kind (`nvidia:H100-80GB`, `tpu:v5e`, `cpu`) or of a backend's name or alias.

    With a `backend`, which must be on such a device, its probes override the documented values; they run once per kind
    and set of library versions, and are then read from POLYFLEET_HOME. Raises UserError for an unknown backend, naming
    the nearest.
    """
    if not isinstance(kind, str):
        raise UserError(f"kind is a {type(kind).__name__}", "give a string such as 'nvidia:H100-80GB'")
    if backend is not None and not hasattr(backend, "get_device_info"):
        raise UserError(f"backend is a {type(backend).__name__}", "give a backend from workers.get_backend")
    name = backend_name(kind.partition(":")[0])
    canonical_kind = name + (f":{kind.partition(':')[2]}" if ":" in kind else "")
    documented = _documented(name, canonical_kind)
    if backend is None:
        return documented
    from workers.models.validation.probes import apply_probes

    return apply_probes(documented, backend)


def _documented(backend: str, kind: str) -> Capabilities:
    source = citation(catalogue.vendor(backend).sources)
    architecture = catalogue.architecture(backend, catalogue.architecture_of(kind))
    values = {name: _documented_value(value, source) for name, value in catalogue.features(kind).items()}
    values["fp8_flavour"] = _documented_value(
        values["fp8_flavour"].value, citation(architecture.sources) if architecture else ""
    )
    return Capabilities(kind=kind, dtypes=_dtypes(backend, architecture), **values)


def _documented_value(value: Any, source: str) -> CapabilityValue:
    return CapabilityValue(None, UNKNOWN) if value is None else CapabilityValue(value, DOCUMENTED, source)


def _dtypes(backend: str, architecture: Architecture | None) -> dict[str, CapabilityValue]:
    """Return the support of each dtype. Only float32 is certain for a kind without documented architecture."""
    source = citation(architecture.sources) if architecture else ""
    documented = (
        {name: CapabilityValue(_support_level(name, architecture), DOCUMENTED, source) for name in FLOATS}
        if architecture
        else {}
    )
    varying = _varying_dtypes(backend) if architecture and not architecture.architecture else frozenset()
    native = CapabilityValue("native", DOCUMENTED, source or citation(catalogue.vendor(backend).sources))
    values = {
        name: CapabilityValue(None, UNKNOWN)
        if name in varying
        else documented.get(name, CapabilityValue(None, UNKNOWN))
        for name in FLOATS
    }
    return values | {"float32": native}


def _support_level(dtype: str, architecture: Architecture) -> str:
    """Return `native`, `emulated` (computed by conversion or at a fraction of the speed) or `absent`."""
    return "native" if dtype in architecture.native else "emulated" if dtype in architecture.emulated else "absent"


def _varying_dtypes(backend: str) -> frozenset[str]:
    """Return the dtypes that only some architectures of a backend support natively.

    They are unknown for a kind without a model, and for `cpu`, which does not name the instruction sets.
    """
    rows = {
        name: row for (vendor, name), row in catalogue.architectures().items() if vendor == backend and name != EMULATED
    }
    return frozenset().union(*(row.native for row in rows.values())) - rows[""].native
