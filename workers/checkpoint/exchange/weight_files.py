"""The files that hold a model's weights: one file or several with an index, of safetensors or of torch.save."""

from pathlib import Path
from typing import Any

from workers.checkpoint.exchange.entry_conversion import is_state_dict, read_value
from workers.checkpoint.exchange.imported_state import ImportedState
from workers.checkpoint.exchange.pickle_values import PickleDecoder
from workers.checkpoint.exchange.safetensors_files import (
    TensorInFile,
    check_index,
    files_in,
    files_of,
    index_of,
    read_header,
    read_metadata,
)
from workers.checkpoint.exchange.tensors import Reference, Storage
from workers.checkpoint.format.dtypes import DTYPES
from workers.checkpoint.format.message_text import first_names
from workers.errors import CheckpointError

SAFETENSORS_INDEX = "*.safetensors.index.json"
TORCH_INDEX = "*.bin.index.json"


def take_safetensors(found: ImportedState, source: Path, entry: str = "model", within: str = "") -> list[str]:
    """A file, or the files of a folder that belong to one model: their names, that of an index among them. `within` is
    what their names begin with where `source` is a part of what is imported, such as `unet/`."""
    found.ordered = False  # safetensors sorts its headers
    files, index = files_of(source), index_of(source, SAFETENSORS_INDEX) if source.is_dir() else None
    tensors: dict[str, Reference] = {}
    metadata: dict[str, str] = {}
    for path in files:
        size_bytes, held = read_header(path)
        for name, one in held.items():
            if name in tensors:
                raise CheckpointError(f"{path} holds {name}, which another file of {source} holds, too", "keep one")
            tensors[name] = _reference(path, name, one, size_bytes)
        metadata |= read_metadata(path)
    found.module(entry, tensors)
    name = index.name.removesuffix(".index.json") if index else files[0].name
    found.safetensors_file(f"{within}{name}", entry, metadata)
    return [path.name for path in files] + _checked(found, index, tensors)


def take_torch(found: ImportedState, path: Path, plain: PickleDecoder, entry: str = "model") -> list[str]:
    """The same of torch.save: a file, or the index of several."""
    if not path.name.endswith(".index.json"):
        value = read_value(path, plain)
        found.file(path.name, value)
        if not is_state_dict(value):
            raise CheckpointError(f"{path} is not the state dict of a model", "import the file alone")
        found.module(entry, value)
        return [path.name]
    tensors: dict[str, Any] = {}
    files = files_in(path)
    for file in files:
        tensors |= read_value(file, plain)
    found.file(path.name.removesuffix(".index.json"), tensors)
    found.module(entry, tensors)
    return [file.name for file in files] + _checked(found, path, tensors)


def _checked(found: ImportedState, index: Path | None, tensors: dict[str, Any]) -> list[str]:
    if index is None:
        return []
    if unnamed := check_index(index, tensors):
        found.notes.append(
            f"{index.name} does not name {len(unnamed)} tensors that its files hold: {first_names(unnamed)}"
        )
    return [index.name]


def _reference(path: Path, name: str, held: TensorInFile, size_bytes: int) -> Reference:
    """A tensor by itself in a file: two that claim the same bytes are no tie there, but a lie."""
    strides: list[int] = []
    count = 1
    for n in reversed(held.shape):
        strides.insert(0, count)
        count *= n
    there = Storage(str(path), held.offset, count * DTYPES[held.dtype].bytes, held.dtype, "cpu", f"{path}:{name}")
    if held.offset + there.bytes > size_bytes:
        raise CheckpointError(f"{path} is cut off: it has {size_bytes} bytes", "copy it again from its source")
    return Reference(there, held.dtype, 0, held.shape, tuple(strides))
