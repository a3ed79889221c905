"""safetensors files of others: headers read and believed only as far as the file bears them out."""

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.checkpoint.format.checks import open_regular
from workers.checkpoint.format.dtypes import DTYPES
from workers.errors import CheckpointError

LARGEST_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
_DTYPES = {d.safetensors: d.name for d in DTYPES.values() if d.safetensors} | {
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "C64": "complex64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor in a file: `offset` counts from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> tuple[int, dict[str, Held]]:
    """The file's size and its tensors. Raises CheckpointError for anything that is not a whole safetensors file."""
    with os.fdopen(open_regular(path), "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        head = file.read(8)
        header_bytes = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 < header_bytes <= min(size_bytes - 8, LARGEST_HEADER_BYTES):
            raise CheckpointError(f"{path} is no safetensors file, or is cut off", "copy it again from its source")
        try:
            header = json.loads(file.read(header_bytes))
            tensors = {name: _held(told, 8 + header_bytes) for name, told in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise CheckpointError(
                f"{path} has a header that says nothing sensible: {e}", "is it safetensors?"
            ) from None
    return size_bytes, tensors


def _held(told: dict[str, Any], data: int) -> Held:
    if told["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {told['dtype']}")
    start, stop = told["data_offsets"]
    held = Held(_DTYPES[told["dtype"]], tuple(int(n) for n in told["shape"]), data + int(start))
    count = 1
    for n in held.shape:
        count *= n
    if min((0, start, *held.shape)) < 0 or count * DTYPES[held.dtype].bytes != stop - start:
        raise ValueError(f"{count} {held.dtype} in {stop - start} bytes")
    return held


def files_of(source: Path) -> list[Path]:
    """The file itself, or those of a folder: as its index lists them, else all there are. Names never leave it."""
    if source.is_file():
        return [source]
    indices = sorted(source.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        try:
            names = sorted(set(json.loads(indices[0].read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as e:
            raise CheckpointError(f"{indices[0]} is no index: {e!r}", "it maps names of tensors to files") from None
        if bad := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
            raise CheckpointError(f"{indices[0]} names {bad[0]!r}", "an index names files beside it")
        return [source / name for name in names]
    return sorted(source.glob("*.safetensors"))
