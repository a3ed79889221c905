"""Read safetensors files from other sources. Headers are untrusted and checked against the file."""

import json
import math
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.input import sandbox
from cluster.input.untrusted_files import UnreadableFile, read_json
from workers.checkpoint.format.dtypes import DTYPES
from workers.checkpoint.format.links import resolve_links
from workers.checkpoint.format.manifest_checks import open_regular
from workers.checkpoint.format.message_text import first_names
from workers.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit."""
MAX_TENSORS = 500_000
"""Maximum number of tensors in one file."""
MAX_INDEX_BYTES = 64 << 20
"""Maximum size of an index. The largest published ones have 10 MB."""
_DTYPES = {d.safetensors: d.name for d in DTYPES.values() if d.safetensors} | {
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "C64": "complex64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """A tensor in a file: `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> tuple[int, dict[str, TensorInFile]]:
    """Return the file's size and its tensors. Raises CheckpointError unless it is a complete safetensors file."""
    with os.fdopen(open_regular(path), "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        head = file.read(8)
        header_bytes = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 < header_bytes <= min(size_bytes - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is not a complete safetensors file", "copy it again from its source")
        sandbox.raise_limits(metadata_bytes=header_bytes)
        return size_bytes, parse_header(file.read(header_bytes), str(path))


def parse_header(text: bytes, source: str) -> dict[str, TensorInFile]:
    """Return the tensors in a header; they may still be beyond the end of the file. Raises CheckpointError."""
    try:
        if text.count(b"{") > MAX_TENSORS + 2 or text.count(b",") > 20 * MAX_TENSORS:
            raise ValueError(f"more than {MAX_TENSORS} tensors")
        header = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_refuse_constant
        )
        if type(header) is not dict:
            raise ValueError("it is not a JSON object")
        return {name: _parse_tensor(fields, 8 + len(text)) for name, fields in header.items() if name != "__metadata__"}
    except (ValueError, RecursionError) as e:
        raise CheckpointError(
            f"{source} has a header that is not valid: {e!s:.200}", "check that it is a safetensors file"
        ) from None


def _parse_tensor(fields: Any, data: int) -> TensorInFile:
    if type(fields) is not dict or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise ValueError("a tensor lacks dtype, shape or data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if type(dtype) is not str or dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype if type(dtype) is str else type(dtype).__name__:.40}")
    numbers = (*shape, *offsets) if type(shape) is type(offsets) is list and len(offsets) == 2 else (-1,)
    if len(numbers) > 66 or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
        raise ValueError("shape and data_offsets are not lists of integers")
    tensor, size_bytes = TensorInFile(_DTYPES[dtype], tuple(shape), data + offsets[0]), offsets[1] - offsets[0]
    count = math.prod(shape)
    if count * DTYPES[tensor.dtype].bytes != size_bytes:
        raise ValueError(f"{count} {tensor.dtype} in {size_bytes} bytes")
    return tensor


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) != len(pairs):
        raise ValueError("a name occurs twice")
    return items


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant[:20]} is not an integer")


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata in a file's header. `read_header` must have checked the file."""
    with os.fdopen(open_regular(path), "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    metadata = header.get("__metadata__")
    return {key: value for key, value in metadata.items() if type(value) is str} if type(metadata) is dict else {}


def files_of(source: Path) -> list[Path]:
    """Return the file itself, or the files of a folder: those its index lists, else all. None is outside of it."""
    if source.is_file():
        return [source]
    index = index_of(source, "*.safetensors.index.json")
    return files_in(index) if index else sorted(source.glob("*.safetensors"))


def index_of(folder: Path, pattern: str) -> Path | None:
    indices = sorted(folder.glob(pattern))
    return indices[0] if len(indices) == 1 else None


def files_in(index: Path) -> list[Path]:
    """Return the files that an index names, each once. Raises CheckpointError."""
    names = sorted(set(weight_map(index).values()))
    if invalid := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{index} names {invalid[0]!r}", "an index may only name files in its own folder")
    return [index.parent / name for name in names]


def weight_map(index: Path) -> dict[str, str]:
    """Map each tensor's name to its file, as an index says. Raises CheckpointError."""
    os.close(open_regular(index))
    sandbox.raise_limits(metadata_bytes=min(index.stat().st_size, MAX_INDEX_BYTES))
    try:
        index_data = read_json(resolve_links(index), MAX_INDEX_BYTES, max_depth=8)
    except UnreadableFile as e:
        raise CheckpointError(e.message, "check that it maps names of tensors to files") from None
    files = index_data.get("weight_map") if isinstance(index_data, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise CheckpointError(
            f"{index} is not an index: it has no weight_map", "check that it maps names of tensors to files"
        )
    return files


def check_index(index: Path, tensors: Collection[str]) -> list[str]:
    """Return tensors of the files that the index does not name.
    Raises CheckpointError if it names tensors that no file has: index and files are of different revisions.
    """
    files_by_tensor = weight_map(index)
    if missing := [name for name in files_by_tensor if name not in tensors]:
        files = sorted({files_by_tensor[name] for name in missing})
        raise CheckpointError(
            f"{index.name} names {len(missing)} of {len(files_by_tensor)} tensors that no file has:"
            f" {first_names(missing)} (expected in {first_names(files)})",
            "copy the folder again from its source: index and files are of different revisions",
        )
    return [name for name in tensors if name not in files_by_tensor]
