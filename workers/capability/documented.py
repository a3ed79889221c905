"""What is written of a kind of device, without opening one: the catalogue's rows as capabilities need them.

Imports the standard library only.
"""

from collections.abc import Mapping

from cluster import catalogue
from cluster.catalogue import Architecture, DeviceModel
from cluster.catalogue.precision import FP8_FN as FP8_FN
from cluster.catalogue.precision import FP8_FNUZ as FP8_FNUZ
from cluster.types import Scalar


def device_facts(kind: str) -> DeviceModel | None:
    """The row of a kind, of the card for one of its MIG slices; None where nothing is written."""
    return catalogue.model(kind)


def cited(keys: "tuple[str, ...]") -> str:
    """Where a row's facts stand: addresses, or titles of what has none."""
    found = (catalogue.sources()[key.rpartition("=")[2]] for key in dict.fromkeys(keys))
    return " ; ".join(dict.fromkeys(source.url or source.title for source in found))


def documented_dtypes(
    backend: str, kind: str, architecture: str = "", properties: "Mapping[str, Scalar] | None" = None
) -> tuple[str, ...]:
    """Names of dtypes that a device computes with natively, by its documents; () where nothing is known of it."""
    rows = rows_of(backend, architecture or catalogue.architecture_of(kind), properties)
    return tuple(sorted(frozenset().union(*(row.native for row in rows))))


def rows_of(
    backend: str, architecture: str, properties: "Mapping[str, Scalar] | None" = None
) -> tuple[Architecture, ...]:
    """The row of an architecture, and those of the instruction sets that a CPU has (`properties` that are True).

    Without units for it float16 is some 180 times slower than bfloat16 (measured on an AMD Zen 5).
    """
    known = catalogue.architecture(backend, architecture)
    sets = [name for name, value in (properties or {}).items() if value is True]
    extra = (catalogue.architectures().get((backend, name)) for name in sets)
    return tuple(row for row in (known, *extra) if row is not None)
