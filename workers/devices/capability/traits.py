"""Catalogue facts about a device other than dtypes: matrix units, fp8, shared memory per block."""

from collections.abc import Sequence

from cluster.types import Device, Scalar
from workers.devices.capability.documented import rows_of


def traits(device: Device, dtypes: Sequence[str]) -> dict[str, Scalar]:
    """Return `fp8_supported`, `matrix_cores` and `shared_memory_per_block_bytes`, without those that are unknown."""
    facts: dict[str, Scalar] = {}
    if dtypes:
        facts["fp8_supported"] = fp8_supported(dtypes)
    rows = rows_of(device.backend, device.architecture, device.properties)
    units = {row.matrix_units for row in rows} - {None}
    if units and not device.emulated:
        facts["matrix_cores"] = True in units
    for row in rows:
        if row.shared_memory_per_block_bytes:
            facts["shared_memory_per_block_bytes"] = row.shared_memory_per_block_bytes
    return facts


def fp8_supported(dtypes: Sequence[str]) -> bool:
    return any(name.startswith("float8") for name in dtypes)
