"""safetensors files of others: headers read and believed only as far as the file bears them out."""

import json
import math
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import sandbox
from cluster.untrusted_files import UnreadableFile, read_json
from workers.checkpoint.format.dtypes import DTYPES
from workers.checkpoint.format.links import real
from workers.checkpoint.format.manifest_checks import open_regular
from workers.checkpoint.format.message_text import first_names
from workers.errors import CheckpointError

LARGEST_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
MOST_TENSORS = 500_000
"""In one file."""
LARGEST_INDEX_BYTES = 64 << 20
"""The largest published ones have 10 MB."""
_DTYPES = {d.safetensors: d.name for d in DTYPES.values() if d.safetensors} | {
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "C64": "complex64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """A tensor in a file: `offset` counts from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> tuple[int, dict[str, TensorInFile]]:
    """The file's size and its tensors. Raises CheckpointError for anything that is not a whole safetensors file."""
    with os.fdopen(open_regular(path), "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        head = file.read(8)
        header_bytes = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 < header_bytes <= min(size_bytes - 8, LARGEST_HEADER_BYTES):
            raise CheckpointError(f"{path} is no safetensors file, or is cut off", "copy it again from its source")
        sandbox.raise_limits(metadata_bytes=header_bytes)
        return size_bytes, parse_header(file.read(header_bytes), str(path))


def parse_header(text: bytes, where: str) -> dict[str, TensorInFile]:
    """The tensors that a header tells; they may still lie beyond the end of the file. Raises CheckpointError."""
    try:
        if text.count(b"{") > MOST_TENSORS + 2 or text.count(b",") > 20 * MOST_TENSORS:
            raise ValueError(f"more than {MOST_TENSORS} tensors")
        header = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_no_constant)
        if type(header) is not dict:
            raise ValueError("it is no object")
        return {name: _held(told, 8 + len(text)) for name, told in header.items() if name != "__metadata__"}
    except (ValueError, RecursionError) as e:
        raise CheckpointError(
            f"{where} has a header that is not valid: {e!s:.200}", "check that it is a safetensors file"
        ) from None


def _held(told: Any, data: int) -> TensorInFile:
    if type(told) is not dict or not {"dtype", "shape", "data_offsets"} <= told.keys():
        raise ValueError("a tensor has dtype, shape and data_offsets")
    dtype, shape, offsets = told["dtype"], told["shape"], told["data_offsets"]
    if type(dtype) is not str or dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype if type(dtype) is str else type(dtype).__name__:.40}")
    numbers = (*shape, *offsets) if type(shape) is type(offsets) is list and len(offsets) == 2 else (-1,)
    if len(numbers) > 66 or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
        raise ValueError("shape and data_offsets are lists of whole numbers")
    held, size_bytes = TensorInFile(_DTYPES[dtype], tuple(shape), data + offsets[0]), offsets[1] - offsets[0]
    count = math.prod(shape)
    if count * DTYPES[held.dtype].bytes != size_bytes:
        raise ValueError(f"{count} {held.dtype} in {size_bytes} bytes")
    return held


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice")
    return made


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word[:20]} is no whole number")


def read_metadata(path: Path) -> dict[str, str]:
    """The texts that a file's header has beside its tensors. `read_header` has checked the file."""
    with os.fdopen(open_regular(path), "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    told = header.get("__metadata__")
    return {key: value for key, value in told.items() if type(value) is str} if type(told) is dict else {}


def files_of(source: Path) -> list[Path]:
    """The file itself, or those of a folder: as its index lists them, else all there are. Names never leave it."""
    if source.is_file():
        return [source]
    index = index_of(source, "*.safetensors.index.json")
    return files_in(index) if index else sorted(source.glob("*.safetensors"))


def index_of(folder: Path, pattern: str) -> Path | None:
    indices = sorted(folder.glob(pattern))
    return indices[0] if len(indices) == 1 else None


def files_in(index: Path) -> list[Path]:
    """The files that an index names, each once. Raises CheckpointError."""
    names = sorted(set(weight_map(index).values()))
    if bad := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{index} names {bad[0]!r}", "an index names files beside it")
    return [index.parent / name for name in names]


def weight_map(index: Path) -> dict[str, str]:
    """Name of a tensor -> the file that holds it, as an index says. Raises CheckpointError."""
    os.close(open_regular(index))
    sandbox.raise_limits(metadata_bytes=min(index.stat().st_size, LARGEST_INDEX_BYTES))
    try:
        told = read_json(real(index), LARGEST_INDEX_BYTES, deepest=8)
    except UnreadableFile as e:
        raise CheckpointError(e.message, "an index maps names of tensors to files") from None
    places = told.get("weight_map") if isinstance(told, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} is no index: it has no weight_map", "it maps names of tensors to files")
    return places


def check_index(index: Path, tensors: Collection[str]) -> list[str]:
    """Tensors of the files that the index does not name. Raises CheckpointError where it names some that no file holds:
    the files are of another revision than the index."""
    places = weight_map(index)
    if missing := [name for name in places if name not in tensors]:
        files = sorted({places[name] for name in missing})
        raise CheckpointError(
            f"{index.name} names {len(missing)} of {len(places)} tensors that no file holds: {first_names(missing)}"
            f" (expected in {first_names(files)})",
            "copy the folder again from its source: index and files are of different revisions",
        )
    return [name for name in tensors if name not in places]
