"""What a device is known to have, beside its dtypes: matrix units, fp8, shared memory per block, by the catalogue."""

from collections.abc import Sequence

from cluster.types import Device, Scalar
from workers.capability.documented import rows_of


def traits(device: Device, dtypes: Sequence[str]) -> dict[str, Scalar]:
    """`fp8_supported`, `matrix_cores`, `shared_memory_per_block_bytes`; what nobody knows is left out."""
    found: dict[str, Scalar] = {}
    if dtypes:
        found["fp8_supported"] = fp8_supported(dtypes)
    rows = rows_of(device.backend, device.architecture, device.properties)
    units = {row.matrix_units for row in rows} - {None}
    if units and not device.emulated:
        found["matrix_cores"] = True in units
    for row in rows:
        if row.shared_memory_per_block_bytes:
            found["shared_memory_per_block_bytes"] = row.shared_memory_per_block_bytes
    return found


def fp8_supported(dtypes: Sequence[str]) -> bool:
    return any(name.startswith("float8") for name in dtypes)
