"""The rows of the catalogue, each table read once, on first use: ours, then those of installed distributions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from cluster.catalogue import plugins
from cluster.catalogue.precision import FLOATS, INTEGERS
from cluster.catalogue.rows import OURS, CatalogueFile
from cluster.errors import nearest

HERE = Path(__file__).parent
_NOT_COUNTED = str.maketrans("", "", "-_. ")


def normalized_word(word: str) -> str:
    """A word without case, `-`, `_`, `.` and spaces: two that fold alike are one."""
    return word.translate(_NOT_COUNTED).lower()


BASE = frozenset({*INTEGERS, "float32"})
"""Every device computes with these."""


@dataclass(frozen=True, slots=True)
class Vendor:
    """A back end. `visibility` is the variable that limits a process to some devices, `device_order` what makes the
    vendor's runtime count them as discovery does, `variables` the prefixes of its own variables, `interface_variables`
    those that take the name of a network interface, `torch_build` the toolkit that torch must be built for, or else one
    of `packages` be installed.

    On Kubernetes, `kubernetes_resource` is what the device plugin counts, `kubernetes_selector` the label that tells
    nodes of a model (its value is in kubernetes.csv, or behind a `=` where it is the same for all), `kubernetes_taint`
    what keeps other pods off.
    """

    backend: str
    title: str
    torch_device: str
    ray_resource: str
    aliases: tuple[str, ...] = ()
    visibility: str = ""
    device_order: tuple[str, ...] = ()
    environment: str = ""
    variables: tuple[str, ...] = ()
    interface_variables: tuple[str, ...] = ()
    dispatch_key: str = ""
    default_tier: str = "other-gpu"
    kernels: str = ""
    flash_attention: bool | None = None
    dynamic_shapes: str = ""
    collectives: str = ""
    compiler: str = ""
    torch_build: str = ""
    packages: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    kubernetes_resource: str = ""
    kubernetes_selector: str = ""
    kubernetes_taint: str = ""
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ArchitectureRow:
    """As the file has it: integers and float32, which all devices have, are left out."""

    backend: str
    architecture: str = ""
    title: str = ""
    native: tuple[str, ...] = ()
    emulated: tuple[str, ...] = ()
    fp8_flavour: str = ""
    matrix_units: bool | None = None
    shared_memory_per_block_kib: float | None = None
    integrated: bool | None = None
    unified_memory: bool | None = None
    notes: str = ""
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Architecture:
    """Of the `FLOATS`, what is neither in `native` nor `emulated` is absent: it may be stored, not computed with.

    `integrated` graphics are part of a CPU, and torch's wheels hold no code for them. Devices with `unified_memory`
    have none but their machine's.
    """

    backend: str
    architecture: str
    title: str
    native: frozenset[str]
    emulated: frozenset[str]
    fp8_flavour: str
    matrix_units: bool | None
    shared_memory_per_block_bytes: int | None
    integrated: bool
    unified_memory: bool
    notes: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A kind and its published figures of one card, dense. `memory_gib` stands where discovery cannot ask the device.

    `unified_memory` stands where a model differs in that from others of its architecture. `unavailable` is why nothing
    computes on it yet. A source is a key of the whole row, or `column=key`.
    """

    kind: str
    model: str
    spellings: tuple[str, ...] = ()
    tool_names: tuple[str, ...] = ()
    pci_ids: tuple[str, ...] = ()
    architecture: str = ""
    tier: str = ""
    devices_per_card: int = 1
    cores_per_card: int | None = None
    memory_gb: float | None = None
    memory_gib: float | None = None
    unified_memory: bool | None = None
    memory_bandwidth_gbs: float | None = None
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    tf32_tflops: float | None = None
    fp32_tflops: float | None = None
    fp64_tflops: float | None = None
    fp8_tflops: float | None = None
    int8_tops: float | None = None
    power_w: float | None = None
    measured_bf16_tflops: float | None = None
    unavailable: str = ""
    notes: str = ""
    sources: tuple[str, ...] = ()

    @property
    def backend(self) -> str:
        return self.kind.partition(":")[0]

    @property
    def family(self) -> str:
        """The pattern that takes the model in every size."""
        return f"{self.backend}:{self.model}"

    @property
    def memory_per_device_bytes(self) -> int | None:
        """As torch sees one device."""
        whole = self.memory_gib * 2**30 if self.memory_gib else self.memory_gb and self.memory_gb * 1e9
        return int(whole / self.devices_per_card) if whole else None


@dataclass(frozen=True, slots=True)
class Citation:
    key: str
    title: str
    url: str = ""
    read: str = ""


@dataclass(frozen=True, slots=True)
class DtypeNote:
    """What becomes of dtypes on the devices of a `torch_device`, or of one `backend` of it that is not emulated:
    `lost` (they cannot be held) or `note` (they are kept, but).
    """

    torch_device: str
    effect: str
    reason: str
    dtypes: tuple[str, ...]
    backend: str = ""
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KubernetesLabel:
    """Value of the vendor's `kubernetes_selector` on nodes that have such devices, or `count` of them.

    `topology` is the smallest slice, `slice_devices` what each node of one of several nodes has.
    """

    kind: str
    label: str
    count: int | None = None
    topology: str = ""
    slice_devices: int | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tier:
    tier: str
    title: str


Row = TypeVar("Row")


@cache
def builtin_rows(name: str, cls: type[Row]) -> "tuple[Row, ...]":
    return tuple(row for _, row in CatalogueFile(HERE / name).rows(cls))


def _everywhere(name: str, cls: type[Row]) -> "Iterator[tuple[CatalogueFile, int, Row]]":
    """(file, line, row) of ours, then of every distribution that has such a file."""
    for folder, distribution in ((HERE, OURS), *plugins.folders()):
        file = CatalogueFile(folder / name, distribution)
        if file.path.is_file():
            yield from ((file, line, row) for line, row in file.rows(cls))


@cache
def builtin_vendors() -> Mapping[str, Vendor]:
    """Without those of other distributions, for who must not wait until they are looked for."""
    return MappingProxyType({row.backend: row for row in builtin_rows("vendors.csv", Vendor)})


@cache
def vendors() -> Mapping[str, Vendor]:
    """By back end; ours first. Raises UserError for a row from outside that is wrong or takes a name of another."""
    found: dict[str, Vendor] = {}
    taken: dict[str, str] = {}
    for file, line, row in _everywhere("vendors.csv", Vendor):
        for field, word in (("backend", row.backend), *(("aliases", alias) for alias in row.aliases)):
            if word in taken:
                raise file.wrong(line, field, f"{word!r} belongs to {taken[word]}", "choose another name")
            taken[word] = row.title
        _known(file, line, "default_tier", row.default_tier, list(tiers()))
        found[row.backend] = row
    return MappingProxyType(found)


@cache
def tiers() -> Mapping[str, str]:
    """Tier and title, best first."""
    return MappingProxyType({row.tier: row.title for row in builtin_rows("tiers.csv", Tier)})


@cache
def architectures() -> Mapping[tuple[str, str], Architecture]:
    """By back end and architecture; the architecture "" is what all devices of the back end have."""
    found: dict[tuple[str, str], Architecture] = {}
    for file, line, row in _everywhere("architectures.csv", ArchitectureRow):
        _own_backend(file, line, "backend", row.backend)
        if (row.backend, row.architecture) in found:
            raise file.wrong(line, "architecture", f"{row.architecture!r} has a row already", "keep one of them")
        for field in ("native", "emulated"):
            for word in getattr(row, field):
                _known(file, line, field, word, [*FLOATS, *INTEGERS])
        found[row.backend, row.architecture] = _architecture(row)
    return MappingProxyType(found)


def _architecture(row: ArchitectureRow) -> Architecture:
    shared_kib = row.shared_memory_per_block_kib
    return Architecture(
        backend=row.backend,
        architecture=row.architecture,
        title=row.title,
        native=BASE | set(row.native),
        emulated=frozenset(row.emulated),
        fp8_flavour=row.fp8_flavour,
        matrix_units=row.matrix_units,
        shared_memory_per_block_bytes=int(shared_kib * 1024) if shared_kib else None,
        integrated=bool(row.integrated),
        unified_memory=bool(row.unified_memory),
        notes=row.notes,
        sources=row.sources,
    )


@cache
def builtin_models() -> Mapping[str, DeviceModel]:
    """Without those of other distributions, as `own_vendors`."""
    return MappingProxyType({row.kind: row for row in builtin_rows("models.csv", DeviceModel)})


@cache
def models() -> Mapping[str, DeviceModel]:
    """By kind, in the order of the files."""
    found: dict[str, DeviceModel] = {}
    for file, line, row in _everywhere("models.csv", DeviceModel):
        _own_backend(file, line, "kind", row.backend)
        if row.kind in found:
            raise file.wrong(line, "kind", f"{row.kind!r} has a row already", "keep one of them")
        if row.tier:
            _known(file, line, "tier", row.tier, list(tiers()))
        if row.architecture and (row.backend, row.architecture) not in architectures():
            own_names = [name for backend, name in architectures() if backend == row.backend]
            _known(file, line, "architecture", row.architecture, own_names)
        found[row.kind] = row
    return MappingProxyType(found)


@cache
def sources() -> Mapping[str, Citation]:
    return MappingProxyType({row.key: row for _, _, row in _everywhere("sources.csv", Citation)})


@cache
def dtype_notes() -> tuple[DtypeNote, ...]:
    return tuple(row for _, _, row in _everywhere("dtypes.csv", DtypeNote))


@cache
def kubernetes_labels() -> Mapping[tuple[str, int | None], KubernetesLabel]:
    """By kind and count; None: of any count."""
    rows = (row for _, _, row in _everywhere("kubernetes.csv", KubernetesLabel))
    return MappingProxyType({(row.kind, row.count): row for row in rows})


def _own_backend(file: CatalogueFile, line: int, field: str, backend: str) -> None:
    """A distribution describes its own vendors only."""
    if file.distribution == OURS and backend in builtin_vendors():
        return
    theirs = [
        row.backend for _, row in CatalogueFile(file.path.with_name("vendors.csv"), file.distribution).rows(Vendor)
    ]
    _known(file, line, field, backend, theirs)


def _known(file: CatalogueFile, line: int, field: str, word: str, valid: list[str]) -> None:
    if word not in valid:
        raise file.wrong(line, field, f"unknown {word!r}", nearest(word, valid))
