"""What a kind of device is known to have, beside its dtypes: matrix units, fp8, shared memory per block."""

import re
from collections.abc import Sequence

from cluster.vocabulary import Device, Scalar

# Bytes one block may ask for, by compute capability. Source: NVIDIA's CUDA C++ programming guide, "technical
# specifications per compute capability".
SHARED_KIB = {
    **{50: 48, 52: 48, 53: 48, 60: 48, 61: 48, 62: 48, 70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99},
    **{90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99},
}
# MFMA of the CDNA series and WMMA of RDNA 3 and 4. Source: AMD's matrix core documentation.
AMD_MATRIX = re.compile(r"gfx(908|90a|94\d|950|11\d\d|12\d\d)")


def traits(device: Device, dtypes: Sequence[str]) -> dict[str, Scalar]:
    """`fp8_supported`, `matrix_cores`, NVIDIA's `shared_memory_per_block_bytes`; what nobody knows is left out."""
    found: dict[str, Scalar] = {}
    if dtypes:
        found["fp8_supported"] = any(name.startswith("float8") for name in dtypes)
    matrix = _matrix_cores(device)
    if matrix is not None:
        found["matrix_cores"] = matrix
    capability = _capability(device)
    if device.backend == "nvidia" and capability in SHARED_KIB:
        found["shared_memory_per_block_bytes"] = SHARED_KIB[capability] << 10
    return found


def _matrix_cores(device: Device) -> bool | None:
    """None where nothing is written of it."""
    if device.backend == "nvidia":
        return _capability(device) >= 70 if device.architecture else None
    if device.backend == "amd":
        return bool(AMD_MATRIX.fullmatch(device.architecture)) if device.architecture else None
    if device.backend == "cpu":
        return bool(device.properties.get("amx_tile"))
    if device.backend == "intel":
        return True if re.match(r"intel:(Max|Flex|Arc|Gaudi)", device.kind) else None
    return True if device.backend in ("tpu", "neuron") and not device.emulated else None


def _capability(device: Device) -> int:
    """`sm_90` -> 90; 0 where it is not known."""
    digits = device.architecture.removeprefix("sm_")
    return int(digits) if digits.isdigit() else 0
