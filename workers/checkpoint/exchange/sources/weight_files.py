"""Import a model's weights: one file or several with an index, of safetensors or torch.save.

Checkpoints that only their own library can merge are refused, with the command that converts them. Source:
deepspeed/runtime/engine.py (_get_ckpt_name, _get_zero_ckpt_name) and zero_to_fp32.py, which it copies beside its
checkpoints; megatron/training/checkpointing.py (get_checkpoint_name).
"""

from pathlib import Path
from typing import Any

from workers.checkpoint.exchange.pickles.pickle_values import PickleDecoder
from workers.checkpoint.exchange.pickles.tensors import Reference, Storage
from workers.checkpoint.exchange.sources.entry_conversion import is_state_dict, read_value
from workers.checkpoint.exchange.sources.imported_state import ImportedState
from workers.checkpoint.exchange.sources.safetensors_files import (
    TensorInFile,
    check_index,
    files_in,
    files_of,
    index_of,
    read_header,
    read_metadata,
)
from workers.checkpoint.format.dtypes import DTYPES
from workers.checkpoint.format.message_text import first_names
from workers.errors import CheckpointError

SAFETENSORS_INDEX = "*.safetensors.index.json"
TORCH_INDEX = "*.bin.index.json"
DEEPSPEED = ("*mp_rank_*_states.pt", "layer_*-model_*-model_states.pt")
MEGATRON = ("model_optim_rng.pt", "model_rng.pt")
MERGE = "`python zero_to_fp32.py . weights --safe_serialization`"
PARTITIONS = f"partitions of a DeepSpeed checkpoint; {MERGE} writes their weights"


def import_safetensors(state: ImportedState, source: Path, entry: str = "model", prefix: str = "") -> list[str]:
    """Import a file, or a folder's files of one model; return their names and that of an index.
    `prefix` is put before their names if `source` is a part of what is imported, such as `unet/`.
    """
    state.ordered = False  # safetensors sorts its headers
    files, index = files_of(source), index_of(source, SAFETENSORS_INDEX) if source.is_dir() else None
    tensors: dict[str, Reference] = {}
    metadata: dict[str, str] = {}
    for path in files:
        size_bytes, tensors_in_file = read_header(path)
        for name, tensor in tensors_in_file.items():
            if name in tensors:
                raise CheckpointError(
                    f"{path} has {name}, which is also in another file of {source}", "keep one of them"
                )
            tensors[name] = _reference(path, name, tensor, size_bytes)
        metadata |= read_metadata(path)
    state.module(entry, tensors)
    name = index.name.removesuffix(".index.json") if index else files[0].name
    state.safetensors_file(f"{prefix}{name}", entry, metadata)
    return [path.name for path in files] + _check_index_names(state, index, tensors)


def import_torch(state: ImportedState, path: Path, plain: PickleDecoder, entry: str = "model") -> list[str]:
    """Import weights of torch.save: a file, or the index of several; return the names of the files."""
    if not path.name.endswith(".index.json"):
        value = read_value(path, plain)
        state.file(path.name, value)
        if not is_state_dict(value):
            raise CheckpointError(f"{path} is not the state dict of a model", "import the file alone")
        state.module(entry, value)
        return [path.name]
    tensors: dict[str, Any] = {}
    files = files_in(path)
    for file in files:
        tensors |= read_value(file, plain)
    state.file(path.name.removesuffix(".index.json"), tensors)
    state.module(entry, tensors)
    return [file.name for file in files] + _check_index_names(state, path, tensors)


def _check_index_names(state: ImportedState, index: Path | None, tensors: dict[str, Any]) -> list[str]:
    if index is None:
        return []
    if unnamed := check_index(index, tensors):
        state.notes.append(
            f"{index.name} does not name {len(unnamed)} tensors that its files have: {first_names(unnamed)}"
        )
    return [index.name]


def _reference(path: Path, name: str, tensor: TensorInFile, size_bytes: int) -> Reference:
    """Refer to a tensor with its own storage: two tensors with the same bytes are an error, not a tie."""
    strides: list[int] = []
    count = 1
    for n in reversed(tensor.shape):
        strides.insert(0, count)
        count *= n
    storage = Storage(
        str(path), tensor.offset, count * DTYPES[tensor.dtype].bytes, tensor.dtype, "cpu", f"{path}:{name}"
    )
    if tensor.offset + storage.bytes > size_bytes:
        raise CheckpointError(f"{path} is cut off: it has {size_bytes} bytes", "copy it again from its source")
    return Reference(storage, tensor.dtype, 0, tensor.shape, tuple(strides))


def has_partitions(folder: Path) -> bool:
    """Check whether partitions of a DeepSpeed checkpoint are in the folder itself."""
    return any(any(folder.glob(pattern)) for pattern in DEEPSPEED)


def check_not_partitioned(source: Path) -> None:
    """Raise CheckpointError if such parts are in the folder or in a folder directly below it."""
    folders = [source, *sorted(path for path in source.iterdir() if path.is_dir() and not path.is_symlink())]
    if any(map(has_partitions, folders)):
        raise CheckpointError(
            f"{source} is a DeepSpeed checkpoint; its partitions can only be merged by DeepSpeed",
            f"run {MERGE} in the folder that contains this script, then import the folder `weights`",
        )
    parts = sorted(part for folder in folders for name in MEGATRON for part in folder.glob(f"mp_rank_*/{name}"))
    if parts:
        raise CheckpointError(
            f"{source} is a Megatron checkpoint in its old format, in {len(parts)} part{'s' * (len(parts) > 1)}",
            "save it again with `--ckpt-format torch_dist` and import its folder `iter_…`, or import one part with "
            f"`--skip-unsupported`: {parts[0]}",
        )
