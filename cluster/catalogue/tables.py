"""Tables of the catalogue, each read once, on first use: ours, then those of installed distributions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from cluster.catalogue import plugins
from cluster.catalogue.precision import FLOATS, INTEGERS
from cluster.catalogue.rows import OWN_DISTRIBUTION, CatalogueFile
from cluster.errors import nearest

HERE = Path(__file__).parent
_IGNORED_CHARACTERS = str.maketrans("", "", "-_. ")


def normalize_name(name: str) -> str:
    """Return a name in lower case without `-`, `_`, `.` and spaces, for comparisons."""
    return name.translate(_IGNORED_CHARACTERS).lower()


BASE = frozenset({*INTEGERS, "float32"})
"""Dtypes with which every device computes."""


@dataclass(frozen=True, slots=True)
class Vendor:
    """A back end.

    `visibility` is the variable that limits a process to some devices, `device_order` the settings that make the
    vendor's runtime count devices as discovery does, `variables` the prefixes of the vendor's own variables,
    `interface_variables` those whose value is the name of a network interface. `torch_build` is the toolkit that torch
    must be built for, unless one of `packages` is installed.

    On Kubernetes, `kubernetes_resource` is the resource of the device plugin, `kubernetes_selector` the label of a
    model's nodes (its value is in kubernetes.csv, or behind a `=` if all have the same), `kubernetes_taint` the taint
    that keeps other pods away.
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
    """A row of the file, without integers and float32, which all devices have."""

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
    """Facts of an architecture.

    Devices can store, but not compute with, those of `FLOATS` that are neither `native` nor `emulated`. `integrated`
    graphics are part of a CPU, and torch's wheels contain no code for them. Devices with `unified_memory` use only
    their machine's memory.
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
    """A kind and the published figures of one card, without sparsity.

    `memory_gib` is set if discovery cannot read the memory from the device, `unified_memory` if a model differs from
    its architecture in that. `unavailable` is the reason why no back end computes on it yet. A source is a key for the
    complete row, or `column=key`.
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
        """The pattern that matches the model in every size."""
        return f"{self.backend}:{self.model}"

    @property
    def memory_per_device_bytes(self) -> int | None:
        """Memory of one device as torch counts devices, or None."""
        card_bytes = self.memory_gib * 2**30 if self.memory_gib else self.memory_gb and self.memory_gb * 1e9
        return int(card_bytes / self.devices_per_card) if card_bytes else None


@dataclass(frozen=True, slots=True)
class Citation:
    key: str
    title: str
    url: str = ""
    read: str = ""


@dataclass(frozen=True, slots=True)
class DtypeNote:
    """Effect on dtypes that are stored on devices of a `torch_device`, or of one real `backend` of it.

    `effect` is `lost` (the devices cannot store them) or `note` (they can, with the restriction in `reason`).
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

    `topology` is the smallest slice, `slice_devices` the devices per node of a slice with several nodes.
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


def _all_rows(name: str, cls: type[Row]) -> "Iterator[tuple[CatalogueFile, int, Row]]":
    """Yield (file, line, row) of our file, then of every distribution that has such a file."""
    for folder, distribution in ((HERE, OWN_DISTRIBUTION), *plugins.folders()):
        file = CatalogueFile(folder / name, distribution)
        if file.path.is_file():
            yield from ((file, line, row) for line, row in file.rows(cls))


@cache
def builtin_vendors() -> Mapping[str, Vendor]:
    """Return our own vendors. Faster than `vendors`, which searches other distributions."""
    return MappingProxyType({row.backend: row for row in builtin_rows("vendors.csv", Vendor)})


@cache
def vendors() -> Mapping[str, Vendor]:
    """Return all vendors by back end, ours first.

    Raises UserError for another distribution's row that is invalid or reuses a name.
    """
    by_backend: dict[str, Vendor] = {}
    titles_by_name: dict[str, str] = {}
    for file, line, row in _all_rows("vendors.csv", Vendor):
        for field, name in (("backend", row.backend), *(("aliases", alias) for alias in row.aliases)):
            if name in titles_by_name:
                raise file.error(line, field, f"{name!r} belongs to {titles_by_name[name]}", "choose another name")
            titles_by_name[name] = row.title
        _check_choice(file, line, "default_tier", row.default_tier, list(tiers()))
        by_backend[row.backend] = row
    return MappingProxyType(by_backend)


@cache
def tiers() -> Mapping[str, str]:
    """Return the titles by tier, best first."""
    return MappingProxyType({row.tier: row.title for row in builtin_rows("tiers.csv", Tier)})


@cache
def architectures() -> Mapping[tuple[str, str], Architecture]:
    """Return the rows by back end and architecture.

    The architecture "" has the facts of all devices of the back end.
    """
    by_key: dict[tuple[str, str], Architecture] = {}
    for file, line, row in _all_rows("architectures.csv", ArchitectureRow):
        _check_own_backend(file, line, "backend", row.backend)
        if (row.backend, row.architecture) in by_key:
            raise file.error(line, "architecture", f"{row.architecture!r} has a row already", "keep one of them")
        for field in ("native", "emulated"):
            for dtype in getattr(row, field):
                _check_choice(file, line, field, dtype, [*FLOATS, *INTEGERS])
        by_key[row.backend, row.architecture] = _architecture(row)
    return MappingProxyType(by_key)


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
    """Return our own models. Faster than `models`, which searches other distributions."""
    return MappingProxyType({row.kind: row for row in builtin_rows("models.csv", DeviceModel)})


@cache
def models() -> Mapping[str, DeviceModel]:
    """Return all models by kind, in the order of the files."""
    by_kind: dict[str, DeviceModel] = {}
    for file, line, row in _all_rows("models.csv", DeviceModel):
        _check_own_backend(file, line, "kind", row.backend)
        if row.kind in by_kind:
            raise file.error(line, "kind", f"{row.kind!r} has a row already", "keep one of them")
        if row.tier:
            _check_choice(file, line, "tier", row.tier, list(tiers()))
        if row.architecture and (row.backend, row.architecture) not in architectures():
            own_names = [name for backend, name in architectures() if backend == row.backend]
            _check_choice(file, line, "architecture", row.architecture, own_names)
        by_kind[row.kind] = row
    return MappingProxyType(by_kind)


@cache
def sources() -> Mapping[str, Citation]:
    return MappingProxyType({row.key: row for _, _, row in _all_rows("sources.csv", Citation)})


@cache
def dtype_notes() -> tuple[DtypeNote, ...]:
    return tuple(row for _, _, row in _all_rows("dtypes.csv", DtypeNote))


@cache
def kubernetes_labels() -> Mapping[tuple[str, int | None], KubernetesLabel]:
    """Return the labels by kind and count; a count of None means any count."""
    rows = (row for _, _, row in _all_rows("kubernetes.csv", KubernetesLabel))
    return MappingProxyType({(row.kind, row.count): row for row in rows})


def _check_own_backend(file: CatalogueFile, line: int, field: str, backend: str) -> None:
    """Raise UserError if a distribution describes a vendor that is not its own."""
    if file.distribution == OWN_DISTRIBUTION and backend in builtin_vendors():
        return
    own_backends = [
        row.backend for _, row in CatalogueFile(file.path.with_name("vendors.csv"), file.distribution).rows(Vendor)
    ]
    _check_choice(file, line, field, backend, own_backends)


def _check_choice(file: CatalogueFile, line: int, field: str, value: str, valid: list[str]) -> None:
    if value not in valid:
        raise file.error(line, field, f"unknown {value!r}", nearest(value, valid))
