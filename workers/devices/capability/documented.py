"""Documented facts about a kind of device, from the catalogue, without opening a device.

Imports the standard library only.
"""

from collections.abc import Mapping

from cluster import catalogue
from cluster.catalogue import Architecture, DeviceModel
from cluster.catalogue.precision import FP8_FN as FP8_FN
from cluster.catalogue.precision import FP8_FNUZ as FP8_FNUZ
from cluster.types import Scalar


def device_facts(kind: str) -> DeviceModel | None:
    """Return the catalogue's row of a kind (for a MIG slice: of its GPU), None if it has none."""
    return catalogue.model(kind)


def citation(keys: "tuple[str, ...]") -> str:
    """Return the sources of a row's facts: URLs, or titles of sources without a URL."""
    sources = (catalogue.sources()[key.rpartition("=")[2]] for key in dict.fromkeys(keys))
    return " ; ".join(dict.fromkeys(source.url or source.title for source in sources))


def documented_dtypes(
    backend: str, kind: str, architecture: str = "", properties: "Mapping[str, Scalar] | None" = None
) -> tuple[str, ...]:
    """Return the names of dtypes with which a device computes natively, as documented; () for an unknown device."""
    rows = rows_of(backend, architecture or catalogue.architecture_of(kind), properties)
    return tuple(sorted(frozenset().union(*(row.native for row in rows))))


def rows_of(
    backend: str, architecture: str, properties: "Mapping[str, Scalar] | None" = None
) -> tuple[Architecture, ...]:
    """Return the rows of an architecture and of the instruction sets that a CPU has (`properties` that are True).

    Without hardware units float16 is about 180 times slower than bfloat16 (measured on an AMD Zen 5).
    """
    row_of_architecture = catalogue.architecture(backend, architecture)
    instruction_sets = [name for name, value in (properties or {}).items() if value is True]
    extra = (catalogue.architectures().get((backend, name)) for name in instruction_sets)
    return tuple(row for row in (row_of_architecture, *extra) if row is not None)
