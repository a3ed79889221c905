"""capabilities(kind): what a kind of device can do, each value with how it is known and where from."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cluster import catalogue
from cluster.catalogue import EMULATED, Architecture, backend_name
from cluster.catalogue.precision import FLOATS as FLOATS
from cluster.errors import UserError
from workers.capability.documented import cited

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend

PROBED, DOCUMENTED, UNKNOWN = "probed", "documented", "unknown"


@dataclass(frozen=True, slots=True)
class CapabilityValue:
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
    dtypes: dict[str, CapabilityValue]
    custom_kernels: CapabilityValue
    flash_attention: CapabilityValue
    fp8_flavour: CapabilityValue
    xla: CapabilityValue
    dynamic_shapes: CapabilityValue
    collectives: CapabilityValue
    compile: CapabilityValue

    def native(self, dtype: str) -> bool | None:
        """None where it is unknown."""
        found = self.dtypes.get(dtype)
        return None if found is None or found.label == UNKNOWN else found.value == "native"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


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
    from workers.capability.probes import apply_probes

    return apply_probes(known, backend)


def _documented(backend: str, kind: str) -> Capabilities:
    source = cited(catalogue.vendor(backend).sources)
    known = catalogue.architecture(backend, catalogue.architecture_of(kind))
    told = {name: _told(value, source) for name, value in catalogue.features(kind).items()}
    told["fp8_flavour"] = _told(told["fp8_flavour"].value, cited(known.sources) if known else "")
    return Capabilities(kind=kind, dtypes=_dtypes(backend, kind, known), **told)


def _told(value: Any, source: str) -> CapabilityValue:
    return CapabilityValue(None, UNKNOWN) if value is None else CapabilityValue(value, DOCUMENTED, source)


def _dtypes(backend: str, kind: str, known: Architecture | None) -> dict[str, CapabilityValue]:
    """Unknown but float32 where nobody wrote down what all devices of the kind compute with."""
    source = cited(known.sources) if known else ""
    found = {name: CapabilityValue(_how(name, known), DOCUMENTED, source) for name in FLOATS} if known else {}
    unknown = _differing(backend) if known and not known.architecture else frozenset()
    plain = CapabilityValue("native", DOCUMENTED, source or cited(catalogue.vendor(backend).sources))
    others = {
        name: CapabilityValue(None, UNKNOWN) if name in unknown else found.get(name, CapabilityValue(None, UNKNOWN))
        for name in FLOATS
    }
    return others | {"float32": plain}


def _how(dtype: str, known: Architecture) -> str:
    """`native`, `emulated` (converted, or a fraction of the speed) or `absent`."""
    return "native" if dtype in known.native else "emulated" if dtype in known.emulated else "absent"


def _differing(backend: str) -> frozenset[str]:
    """What some architectures of a back end compute with and not all: of its name alone, or of `cpu`, which does not
    tell the instruction sets, it is not known.
    """
    rows = {name: row for (of, name), row in catalogue.architectures().items() if of == backend and name != EMULATED}
    return frozenset().union(*(row.native for row in rows.values())) - rows[""].native
