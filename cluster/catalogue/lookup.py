"""Look up the catalogue's rows for kinds, and for what discovery reads from a device."""

import re
from collections.abc import Iterable
from functools import cache

from cluster.catalogue.precision import FLOATS
from cluster.catalogue.tables import (
    BASE,
    Architecture,
    DeviceModel,
    KubernetesLabel,
    architectures,
    dtype_notes,
    kubernetes_labels,
    models,
    normalize_name,
    vendors,
)

SIZE = re.compile(r"\d+GB", re.IGNORECASE)
DRIVER_MEMORY_FRACTION = 0.1
"""Maximum fraction of a card's memory that the driver keeps: a card shows less than its nominal size."""
FLOPS = {"fp32": "fp32_tflops", "bf16": "bf16_tflops", "fp16": "fp16_tflops"}
SPEED_ERROR_FACTOR = 3.1
"""90 % of true ratios are within this factor of `speed_ratio` (benchmarks/estimates.py, NVIDIA's V100, P100, K80)."""


def model(kind: str) -> DeviceModel | None:
    """Return the row of a kind in the catalogue's spelling, or None. A MIG slice has the row of its card."""
    return models().get(_card(kind))


def _card(kind: str) -> str:
    return kind.partition("-MIG-")[0]


def same_family(kind: str) -> tuple[DeviceModel, ...]:
    """Return the kind's own row, else the rows of its model in other sizes; () for an unknown model."""
    if row := model(kind):
        return (row,)
    family, _, size = _card(kind).rpartition("-")
    return by_family().get(family if SIZE.fullmatch(size) else _card(kind), ())


def architecture_of(kind: str) -> str:
    """Return the architecture of all sizes of the model; "" if it is not documented, or they differ."""
    names = {row.architecture for row in same_family(kind)}
    return names.pop() if len(names) == 1 else ""


def architecture(backend: str, name: str = "") -> Architecture | None:
    """Return the row of an architecture, else that of all devices of the back end, else None."""
    return architectures().get((backend, name)) or architectures().get((backend, ""))


def unified_memory(kind: str, name: str = "") -> bool:
    """Return whether a device uses only its machine's memory: by its model, else by its architecture."""
    row = model(kind)
    if row is not None and row.unified_memory is not None:
        return row.unified_memory
    facts = architecture(kind.partition(":")[0], name or (row.architecture if row else ""))
    return facts is not None and facts.unified_memory


def lossy_dtypes(torch_device: str, backend: str = "") -> dict[str, str]:
    """Return the dtypes that devices of a torch device type cannot store, with the reason.

    With a back end, includes those that only its real devices cannot store; leave it out for emulated devices.
    """
    return _notes("lost", torch_device, backend)


def preserved_dtypes(torch_device: str, backend: str) -> dict[str, str]:
    """Return the dtypes that devices can store, but for which the catalogue has a note, with that note."""
    return _notes("note", torch_device, backend)


def _notes(effect: str, torch_device: str, backend: str) -> dict[str, str]:
    notes = (note for note in dtype_notes() if (note.effect, note.torch_device) == (effect, torch_device))
    return {dtype: note.reason for note in notes if note.backend in ("", backend) for dtype in note.dtypes}


def has_native_dtype(backend: str, name: str, dtype: str) -> bool | None:
    """Return whether devices of an architecture compute natively with a dtype; None if not documented.

    `dtype` is written `bfloat16` or `torch.bfloat16`.
    """
    facts, name_of_dtype = architecture(backend, name), dtype.removeprefix("torch.")
    if backend in vendors() and name_of_dtype in lossy_dtypes(vendors()[backend].torch_device, backend):
        return False
    if facts is None or name_of_dtype not in (*BASE, *FLOATS):
        return None
    return name_of_dtype in facts.native


def instruction_sets(dtype: str) -> tuple[str, ...]:
    """Return the CPU instruction sets, by the kernel's names, that compute with a dtype.

    () if all CPUs compute with it, or none.
    """
    dtype_name, common = dtype.removeprefix("torch."), architecture("cpu")
    sets = (
        name
        for (backend, name), row in architectures().items()
        if backend == "cpu" and name and dtype_name in row.native
    )
    return () if common is not None and dtype_name in common.native else tuple(sets)


def tier(kind: str) -> str:
    """Return the tier of the kind's model, else its back end's default; "" for an unknown back end."""
    backend = kind.partition(":")[0]
    own_tier = next((row.tier for row in same_family(kind) if row.tier), "")
    return own_tier or (vendors()[backend].default_tier if backend in vendors() else "")


def kubernetes_label(kind: str, count: int) -> KubernetesLabel | None:
    """Return the Kubernetes label of nodes with `count` devices of that kind, or None."""
    return kubernetes_labels().get((kind, count)) or kubernetes_labels().get((kind, None))


def match_device(
    backend: str, *, name: str = "", memory_bytes: int | None = None, pci_id: str = ""
) -> DeviceModel | None:
    """Return the model of a discovered device, by its PCI id or its name in the vendor's tool, or None.

    A PCI id is `74a1`, or has a subsystem or a revision to distinguish devices of one id: `0027:004e`. The memory
    distinguishes sizes.
    """
    rows: tuple[DeviceModel, ...] = ()
    if pci_id:
        rows = _by_pci().get((backend, pci_id)) or _by_pci().get((backend, pci_id.partition(":")[0]), ())
    if name and not rows:
        rows = _by_name().get((backend, normalize_name(name)), ())
    return _choose_by_memory(rows, memory_bytes)


@cache
def by_family() -> dict[str, tuple[DeviceModel, ...]]:
    """Return the rows by back end and model, with all sizes of a model together."""
    result: dict[str, tuple[DeviceModel, ...]] = {}
    for row in models().values():
        result[row.family] = (*result.get(row.family, ()), row)
    return result


@cache
def _by_pci() -> dict[tuple[str, str], tuple[DeviceModel, ...]]:
    return _grouped((row, pci_id) for row in models().values() for pci_id in row.pci_ids)


@cache
def _by_name() -> dict[tuple[str, str], tuple[DeviceModel, ...]]:
    """Return the rows by back end and name. A tool's name of a model precedes another model's spelling."""
    by_tool_name = _grouped((row, normalize_name(name)) for row in models().values() for name in row.tool_names)
    return (
        _grouped((row, normalize_name(name)) for row in models().values() for name in (row.model, *row.spellings))
        | by_tool_name
    )


def _grouped(pairs: Iterable[tuple[DeviceModel, str]]) -> dict[tuple[str, str], tuple[DeviceModel, ...]]:
    result: dict[tuple[str, str], dict[str, DeviceModel]] = {}
    for row, spelling in pairs:
        result.setdefault((row.backend, spelling), {})[row.kind] = row
    return {key: tuple(rows.values()) for key, rows in result.items()}


def _choose_by_memory(rows: tuple[DeviceModel, ...], memory_bytes: int | None) -> DeviceModel | None:
    """Choose a row by a card's visible memory: the smallest size that is large enough for it.

    A kind without a size is that of all cards of the name.
    """
    if len(rows) == 1 and (memory_bytes is None or not SIZE.search(rows[0].kind)):
        return rows[0]
    if memory_bytes is None:
        return None
    gib = memory_bytes / 2**30
    sold = [(row.memory_gb / row.devices_per_card, row.kind) for row in rows if row.memory_gb]
    fit = [kind for size, kind in sorted(sold) if (1 - DRIVER_MEMORY_FRACTION) * size <= gib <= size]
    return models()[fit[0]] if fit else None


def speed_ratio(kind: str, other: str, precision: str) -> float | None:
    """Return the speed of a device of `kind` relative to `other`, None for kinds of different vendors (untested).

    It is the geometric mean of the ratios of memory bandwidth and, if documented for both, arithmetic of that
    precision.
    """
    fast, slow = model(kind), model(other)
    if fast is None or slow is None or fast.backend != slow.backend:
        return None
    return figures_ratio(_figures(fast, precision), _figures(slow, precision))


def figures_ratio(fast: tuple[float, float], slow: tuple[float, float]) -> float | None:
    """Return the ratio of two devices, each as (bandwidth, arithmetic) with 0 for unknown; None without bandwidths."""
    if not (fast[0] and slow[0]):
        return None
    ratios = [fast[0] / slow[0]] + ([fast[1] / slow[1]] if fast[1] and slow[1] else [])
    return float((ratios[0] * ratios[-1]) ** 0.5)


def _figures(row: DeviceModel, precision: str) -> tuple[float, float]:
    flops = getattr(row, FLOPS[precision]) if precision in FLOPS else None
    return (row.memory_bandwidth_gbs or 0.0) / row.devices_per_card, (flops or 0.0) / row.devices_per_card
