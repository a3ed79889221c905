"""From kinds, and from what discovery reads of a device, to the rows that describe them."""

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
    normalized_word,
    vendors,
)

SIZE = re.compile(r"\d+GB", re.IGNORECASE)
KEPT_BY_THE_DRIVER = 0.1
"""Of a card's memory, at most: what it tells is less than what it is sold with."""


def model(kind: str) -> DeviceModel | None:
    """The row of a kind in its own spelling; of the card for one of its MIG slices; None where nothing is written."""
    return models().get(_card(kind))


def _card(kind: str) -> str:
    return kind.partition("-MIG-")[0]


def same_family(kind: str) -> tuple[DeviceModel, ...]:
    """The kind's own row, else the rows of its model in other sizes; () for a model nobody lists."""
    if row := model(kind):
        return (row,)
    family, _, size = _card(kind).rpartition("-")
    return by_family().get(family if SIZE.fullmatch(size) else _card(kind), ())


def architecture_of(kind: str) -> str:
    """What all sizes of the model have; "" where nobody wrote it down, or they differ."""
    found = {row.architecture for row in same_family(kind)}
    return found.pop() if len(found) == 1 else ""


def architecture(backend: str, name: str = "") -> Architecture | None:
    """What is known of an architecture, else of every device of the back end; None where nothing is."""
    return architectures().get((backend, name)) or architectures().get((backend, ""))


def unified_memory(kind: str, name: str = "") -> bool:
    """Whether a device has no memory but its machine's: by its model, else by its architecture."""
    row = model(kind)
    if row is not None and row.unified_memory is not None:
        return row.unified_memory
    known = architecture(kind.partition(":")[0], name or (row.architecture if row else ""))
    return known is not None and known.unified_memory


def lossy_dtypes(torch_device: str, backend: str = "") -> dict[str, str]:
    """Dtypes that devices of a torch device type cannot hold, with the reason; with a back end also what its own
    devices cannot, which does not hold where another device emulates them.
    """
    return _notes("lost", torch_device, backend)


def preserved_dtypes(torch_device: str, backend: str) -> dict[str, str]:
    """Dtypes that are held there, and what is worth knowing of them."""
    return _notes("note", torch_device, backend)


def _notes(effect: str, torch_device: str, backend: str) -> dict[str, str]:
    notes = (note for note in dtype_notes() if (note.effect, note.torch_device) == (effect, torch_device))
    return {dtype: note.reason for note in notes if note.backend in ("", backend) for dtype in note.dtypes}


def has_native_dtype(backend: str, name: str, dtype: str) -> bool | None:
    """Whether devices of an architecture compute natively with a dtype (`bfloat16` or `torch.bfloat16`).

    None where nobody wrote it down.
    """
    known, word = architecture(backend, name), dtype.removeprefix("torch.")
    if backend in vendors() and word in lossy_dtypes(vendors()[backend].torch_device, backend):
        return False
    if known is None or word not in (*BASE, *FLOATS):
        return None
    return word in known.native


def instruction_sets(dtype: str) -> tuple[str, ...]:
    """Those of a CPU that compute with a dtype, as the kernel names them; () where all CPUs do, or none."""
    word, common = dtype.removeprefix("torch."), architecture("cpu")
    sets = (name for (of, name), row in architectures().items() if of == "cpu" and name and word in row.native)
    return () if common is not None and word in common.native else tuple(sets)


def tier(kind: str) -> str:
    """Of the kind's model, else what its back end's devices are at least; "" for a back end nobody lists."""
    backend = kind.partition(":")[0]
    known = next((row.tier for row in same_family(kind) if row.tier), "")
    return known or (vendors()[backend].default_tier if backend in vendors() else "")


def kubernetes_label(kind: str, count: int) -> KubernetesLabel | None:
    """What is known of Kubernetes' nodes with so many devices of that kind; None where nobody wrote it down."""
    return kubernetes_labels().get((kind, count)) or kubernetes_labels().get((kind, None))


def match_device(
    backend: str, *, name: str = "", memory_bytes: int | None = None, pci_id: str = ""
) -> DeviceModel | None:
    """The model of a device that discovery came upon, by its PCI id (`74a1`, or with what tells
    those of one id apart, a subsystem or a revision: `0027:004e`) or by
    what the vendor's tool calls it; the memory tells sizes apart. None for one nobody lists.
    """
    rows: tuple[DeviceModel, ...] = ()
    if pci_id:
        rows = _by_pci().get((backend, pci_id)) or _by_pci().get((backend, pci_id.partition(":")[0]), ())
    if name and not rows:
        rows = _by_name().get((backend, normalized_word(name)), ())
    return _of_size(rows, memory_bytes)


@cache
def by_family() -> dict[str, tuple[DeviceModel, ...]]:
    """Rows by back end and model, all sizes of it together."""
    result: dict[str, tuple[DeviceModel, ...]] = {}
    for row in models().values():
        result[row.family] = (*result.get(row.family, ()), row)
    return result


@cache
def _by_pci() -> dict[tuple[str, str], tuple[DeviceModel, ...]]:
    return _grouped((row, pci_id) for row in models().values() for pci_id in row.pci_ids)


@cache
def _by_name() -> dict[tuple[str, str], tuple[DeviceModel, ...]]:
    """What a tool calls a model counts more than what people call another."""
    told = _grouped((row, normalized_word(name)) for row in models().values() for name in row.tool_names)
    return (
        _grouped((row, normalized_word(name)) for row in models().values() for name in (row.model, *row.spellings))
        | told
    )


def _grouped(pairs: Iterable[tuple[DeviceModel, str]]) -> dict[tuple[str, str], tuple[DeviceModel, ...]]:
    result: dict[tuple[str, str], dict[str, DeviceModel]] = {}
    for row, word in pairs:
        result.setdefault((row.backend, word), {})[row.kind] = row
    return {key: tuple(rows.values()) for key, rows in result.items()}


def _of_size(rows: tuple[DeviceModel, ...], memory_bytes: int | None) -> DeviceModel | None:
    """A kind without a size is that of all cards of the name; of sizes, the smallest that holds what the card tells."""
    if len(rows) == 1 and (memory_bytes is None or not SIZE.search(rows[0].kind)):
        return rows[0]
    if memory_bytes is None:
        return None
    gib = memory_bytes / 2**30
    sold = [(row.memory_gb / row.devices_per_card, row.kind) for row in rows if row.memory_gb]
    fit = [kind for size, kind in sorted(sold) if (1 - KEPT_BY_THE_DRIVER) * size <= gib <= size]
    return models()[fit[0]] if fit else None
