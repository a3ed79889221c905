"""Export checkpoints to other formats. Tensors are mapped from the shards: nothing is read twice or stays in memory."""

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cluster.errors import UserError, nearest
from workers.checkpoint.conversion import bits
from workers.checkpoint.disk.files import Files, write_file
from workers.checkpoint.disk.layout import Layout, TensorPiece, lay_out
from workers.checkpoint.disk.writer import write_shards
from workers.checkpoint.exchange.exported_value import ExportedValues
from workers.checkpoint.exchange.library_folders import WrittenFiles, save_value, write_folder
from workers.checkpoint.exchange.sources.formats import FORMATS
from workers.checkpoint.format import tree
from workers.checkpoint.format.dtypes import DTYPES
from workers.checkpoint.format.manifest import DamagedCheckpoint, extra_states
from workers.checkpoint.format.message_text import first_names
from workers.checkpoint.loading.lazy_reader import OpenCheckpoint, open_checkpoint
from workers.checkpoint.tensors.tensor_fill import read_elements
from workers.errors import CheckpointError

SHARD_BYTES = 5_000_000_000
"""Maximum shard size, as in Hugging Face's libraries."""
Progress = Callable[[int, int], None]


def export_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    format: str = "safetensors",  # noqa: A002
    entry: str = "",
    progress: Progress | None = None,
    follow_links: bool = True,
) -> dict[str, Any]:
    """Write checkpoint `source` to `target`, which must not exist, in the format of another tool.
    Returns {"path", "format", "tensors", "files", "notes"}; "tensors" is the number of tensors written.

    "safetensors": a folder with one module's tensors and an index, as Hugging Face lays them out, or a single file if
    `target` ends in .safetensors; `entry` chooses the module if there are several. "torch": one file for torch.load.
    "dcp": a folder for torch.distributed.checkpoint. "accelerate", "trainer": a folder as save_state or the Trainer
    writes it. An imported checkpoint is exported as it was: keys, their order, types. Every byte is verified first.
    `follow_links`: files of `source` may be links.
    """
    writers = {"safetensors": _export_safetensors, "torch": _export_torch, "dcp": _export_dcp}
    writers |= {name: partial(_export_folder, format=name) for name in ("accelerate", "trainer")}
    if format not in writers:
        raise UserError(f"format is {format!r}", nearest(format, FORMATS))
    target_path = Path(target)
    if target_path.exists():
        raise CheckpointError(f"{target_path} already exists", "name another target, or delete it first")
    with open_checkpoint(source, follow_links=follow_links) as checkpoint:
        checkpoint.verify_chunks(checkpoint.all_chunks(), progress)
        target_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            written = writers[format](checkpoint, target_path, entry)
        except OSError as e:
            raise CheckpointError(
                f"cannot export to {target_path}: {e.strerror or e}", "free disk space, then run it again"
            ) from e
        except BaseException:
            _remove(target_path)
            raise
    files = sorted(path.name for path in target_path.iterdir()) if target_path.is_dir() else [target_path.name]
    return {
        "path": str(target_path),
        "format": format,
        "tensors": written.tensors,
        "files": files,
        "notes": written.notes,
    }


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _module_of(checkpoint: OpenCheckpoint, entry: str) -> str:
    modules = [name for name, entry_info in checkpoint.manifest.entries.items() if entry_info.kind == "module"]
    if entry:
        if entry not in modules:
            raise CheckpointError(f"the checkpoint has no module {entry!r}", nearest(entry, modules))
        return entry
    if len(modules) != 1:
        raise CheckpointError(
            f"the checkpoint has {len(modules)} modules", f"choose one of {', '.join(modules) or 'none'}"
        )
    return modules[0]


def _export_safetensors(checkpoint: OpenCheckpoint, target: Path, entry: str) -> WrittenFiles:
    """Write a folder, or a single file if `target` is named like one."""
    module = _module_of(checkpoint, entry)
    file, metadata = _safetensors_form(checkpoint, module)
    is_single = target.suffix == ".safetensors"
    if not is_single:
        target.mkdir()
    written = _write_weights(
        checkpoint,
        target.parent if is_single else target,
        module,
        target.name if is_single else file,
        metadata,
        is_single,
    )
    others = sorted(set(checkpoint.manifest.entries) - {module})
    return WrittenFiles(written.tensors, written.notes + ([f"left out: {', '.join(others)}"] if others else []))


def _safetensors_form(checkpoint: OpenCheckpoint, module: str) -> tuple[str, dict[str, str]]:
    """Return the name of the file the module was imported from, and the metadata in its header."""
    values = ExportedValues(checkpoint)
    for name in values.names() if values.origin and values.origin.format == "safetensors" else ():
        entry, metadata = values.header(name)
        if entry == module:
            return name, metadata
    return "model.safetensors", {"format": "pt"}


def _write_weights(
    checkpoint: OpenCheckpoint, folder: Path, module: str, file: str, metadata: dict[str, str], single: bool = False
) -> WrittenFiles:
    """Write a module's tensors into `folder`, as `file` or, unless `single`, as several with an index."""
    names = checkpoint.manifest.module_tensors(module)
    stored = {name: checkpoint.manifest.tensors[name].alias_of or name for name in names}
    left_out = [
        name
        for name, stored_name in stored.items()
        if stored_name != name and not checkpoint.manifest.tensors[name].view
    ]
    keys = {name.removeprefix(f"{module}/"): name for name in names if name not in left_out}
    states = _extra_states(checkpoint, module)
    keys |= {key: str(value) for key, value in states.items() if isinstance(value, _TensorName)}
    not_tensors = sorted(set(states) - set(keys))
    pieces = (_piece(checkpoint, key, name) for key, name in keys.items())
    layouts = lay_out(pieces, sys.maxsize if single else SHARD_BYTES, metadata=metadata)
    count = len(layouts)
    renamed = [_rename_layout(layout, file, i, count) for i, layout in enumerate(layouts, start=1)]
    files = Files()
    write_shards(files, folder, renamed)
    if count > 1:
        index = {piece.key: layout.file for layout in renamed for piece in layout.pieces}
        total = sum(piece.bytes for layout in renamed for piece in layout.pieces)
        index_file = {"metadata": {"total_size": total}, "weight_map": index}
        write_file(files, folder / f"{file}.index.json", json.dumps(index_file, indent=2).encode())
    files.sync_folder(folder)
    ties = [f"{name} is tied to {stored[name]} and not written twice" for name in left_out]
    ties += [f"left out: {first_names(not_tensors)}: safetensors stores only tensors"] if not_tensors else []
    return WrittenFiles(sum(len(layout.pieces) for layout in renamed), ties)


class _TensorName(str):
    """Name of a tensor, to be distinguished from plain values."""


def _extra_states(checkpoint: OpenCheckpoint, module: str) -> dict[str, Any]:
    def leaf(name: str, tag: str) -> Any:
        checkpoint.entry(name)  # raises if the tensor does not exist
        return _TensorName(name) if tag == "$tensor" else name

    return extra_states(checkpoint.manifest.entries[module], partial(tree.decode, leaf=leaf))


def _rename_layout(layout: Layout, file: str, number: int, count: int) -> Layout:
    stem = file.removesuffix(".safetensors")
    return replace(layout, file=file if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors")


def _piece(checkpoint: OpenCheckpoint, key: str, name: str) -> TensorPiece:
    entry = checkpoint.entry(name)
    dtype, count = DTYPES[entry.dtype], 1
    for n in entry.shape:
        count *= n
    size_bytes = count * dtype.bytes
    shape = entry.shape if dtype.safetensors else (size_bytes,)
    return TensorPiece(
        key, dtype.code, shape, size_bytes, dtype.bytes, partial(_read, checkpoint, checkpoint.manifest.resolve(name))
    )


def _read(checkpoint: OpenCheckpoint, name: str, start: int, stop: int, out: memoryview) -> None:
    size = bits.torch_dtype(checkpoint.entry(name).dtype).itemsize
    out[:] = bits.byte_view(bits.as_integers(read_elements(checkpoint, name, start // size, stop // size)))


def _export_torch(checkpoint: OpenCheckpoint, target: Path, entry: str) -> WrittenFiles:
    values = ExportedValues(checkpoint)
    return WrittenFiles(
        save_value(values.entry(_module_of(checkpoint, entry)) if entry else _full_value(values), target), []
    )


def _full_value(values: ExportedValues) -> Any:
    """Return everything as one value, with the content of a DCP folder's extra files."""
    full_value = values.full_value()
    for content in values.extra_files().values():
        full_value = full_value | content if isinstance(full_value, dict) and isinstance(content, dict) else full_value
    return full_value


def _export_dcp(checkpoint: OpenCheckpoint, target: Path, entry: str) -> WrittenFiles:
    values = ExportedValues(checkpoint)
    full_value = {entry: values.entry(entry)} if entry else values.full_value()
    count = _save_with_dcp(full_value if isinstance(full_value, dict) else values.entries(), target)
    for name, content in ({} if entry else values.extra_files()).items():
        count += save_value(content, target / name)
    return WrittenFiles(count, [])


def _save_with_dcp(value: dict[str, Any], folder: Path) -> int:
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that it runs in one process, as intended
        metadata: Any = state_dict_saver.save(value, checkpoint_id=folder, no_dist=True)
    return sum(isinstance(m, TensorStorageMetadata) for m in metadata.state_dict_metadata.values())


def _export_folder(checkpoint: OpenCheckpoint, target: Path, entry: str, *, format: str) -> WrittenFiles:  # noqa: A002
    """Write a folder of a training library: the imported one, or a new one from the checkpoint's entries."""
    origin = checkpoint.manifest.origin
    target.mkdir()
    if origin is None or origin.format != format or entry:
        return write_folder(
            checkpoint, target, _module_of(checkpoint, entry), format, partial(_write_weights, checkpoint)
        )
    values, count = ExportedValues(checkpoint), 0
    notes: list[str] = []
    for name in values.names():
        path = target / name
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".safetensors":
            module, metadata = values.header(name)
            written = _write_weights(checkpoint, path.parent, _module_of(checkpoint, module), path.name, metadata)
            count, notes = count + written.tensors, notes + written.notes
        else:
            count += _write_value(values.file(name), path)
    return WrittenFiles(count, notes)


def _write_value(value: Any, path: Path) -> int:
    """Write JSON, a DCP folder (no suffix), or a torch.save file; return the number of tensors."""
    if path.suffix == ".json":
        try:
            path.write_text(json.dumps(value, indent=2) + "\n")
        except TypeError as e:
            raise DamagedCheckpoint(f"the manifest's form of {path.name} is not JSON: {e!s:.200}") from None
        return 0
    if path.suffix:
        return save_value(value, path)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise DamagedCheckpoint(f"the manifest's form of {path.name} is not a state dict")
    return _save_with_dcp(value, path)
