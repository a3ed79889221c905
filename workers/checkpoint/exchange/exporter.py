"""Checkpoints of ours as others write theirs. Tensors are mapped from the shards, so nothing is read twice or held."""

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
from workers.checkpoint.disk.files import Files, write_file
from workers.checkpoint.disk.layout import Layout, TensorPiece, lay_out
from workers.checkpoint.disk.writer import write_shards
from workers.checkpoint.exchange.dcp_folders import BESIDE
from workers.checkpoint.exchange.exported_value import Values
from workers.checkpoint.exchange.formats import FORMATS
from workers.checkpoint.exchange.library_folders import Written, made_folder, saved
from workers.checkpoint.format import tree
from workers.checkpoint.format.dtypes import DTYPES
from workers.checkpoint.format.manifest import DamagedCheckpoint, extra_states
from workers.checkpoint.format.message_text import first_names
from workers.checkpoint.lazy_reader import OpenCheckpoint, open_checkpoint
from workers.checkpoint.state import bits
from workers.checkpoint.state.tensor_fill import read_elements
from workers.errors import CheckpointError

SHARD_BYTES = 5_000_000_000
"""As Hugging Face's libraries cut their files."""
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
    """Write checkpoint `source` to `target`, which must not exist: {"path", "format", "tensors", "files", "notes"}.
    "tensors" counts what was written.

    "safetensors": a folder with one module's tensors and an index, as Hugging Face lays them out, or a file where
    `target` ends in .safetensors; `entry` chooses the module where there are several. "torch": one file for torch.load.
    "dcp": a folder for torch.distributed.checkpoint. "accelerate", "trainer": a folder as save_state or the Trainer
    writes it. What was imported comes back as it was: keys, their order, types. Every byte is verified first.
    `follow_links`: files of `source` may be links.
    """
    known = {"safetensors": _safetensors, "torch": _torch, "dcp": _dcp}
    known |= {name: partial(_folder, format=name) for name in ("accelerate", "trainer")}
    if format not in known:
        raise UserError(f"format is {format!r}", nearest(format, FORMATS))
    to = Path(target)
    if to.exists():
        raise CheckpointError(f"{to} is already there", "name another place, or delete it first")
    with open_checkpoint(source, follow_links=follow_links) as opened:
        opened.prove(opened.all_chunks(), progress)
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            written = known[format](opened, to, entry)
        except OSError as e:
            raise CheckpointError(f"cannot export to {to}: {e.strerror or e}", "free disk space") from e
        except BaseException:
            _remove(to)
            raise
    files = sorted(path.name for path in to.iterdir()) if to.is_dir() else [to.name]
    return {
        "path": str(to),
        "format": format,
        "tensors": written.tensors,
        "files": files,
        "notes": written.notes,
    }


def _remove(to: Path) -> None:
    with suppress(OSError):
        if to.is_dir():
            shutil.rmtree(to)
        else:
            to.unlink()


def _module_of(opened: OpenCheckpoint, entry: str) -> str:
    modules = [name for name, told in opened.manifest.entries.items() if told.kind == "module"]
    if entry:
        if entry not in modules:
            raise CheckpointError(f"the checkpoint has no module {entry!r}", nearest(entry, modules))
        return entry
    if len(modules) != 1:
        raise CheckpointError(
            f"the checkpoint has {len(modules)} modules", f"choose one of {', '.join(modules) or 'none'}"
        )
    return modules[0]


def _safetensors(opened: OpenCheckpoint, to: Path, entry: str) -> Written:
    """A folder; one file where `to` is called like one."""
    module = _module_of(opened, entry)
    file, metadata = _safetensors_form(opened, module)
    single = to.suffix == ".safetensors"
    if not single:
        to.mkdir()
    written = _weights(opened, to.parent if single else to, module, to.name if single else file, metadata, single)
    others = sorted(set(opened.manifest.entries) - {module})
    return Written(written.tensors, written.notes + ([f"left out: {', '.join(others)}"] if others else []))


def _safetensors_form(opened: OpenCheckpoint, module: str) -> tuple[str, dict[str, str]]:
    """What the file that the module came from was called, and the texts in its header."""
    values = Values(opened)
    for name in values.names() if values.origin and values.origin.format == "safetensors" else ():
        entry, texts = values.header(name)
        if entry == module:
            return name, texts
    return "model.safetensors", {"format": "pt"}


def _weights(
    opened: OpenCheckpoint, to: Path, module: str, file: str, metadata: dict[str, str], single: bool = False
) -> Written:
    """A module's tensors in `to`, as `file` or, unless `single`, as several with an index where they are large."""
    names = opened.manifest.own(module)
    stored = {name: opened.manifest.tensors[name].alias_of or name for name in names}
    left_out = [name for name, own in stored.items() if own != name and not opened.manifest.tensors[name].view]
    keys = {name.removeprefix(f"{module}/"): name for name in names if name not in left_out}
    states = _extra_states(opened, module)
    keys |= {key: str(value) for key, value in states.items() if isinstance(value, _TensorName)}
    plain = sorted(set(states) - set(keys))
    pieces = (_piece(opened, key, name) for key, name in keys.items())
    layouts = lay_out(pieces, sys.maxsize if single else SHARD_BYTES, metadata=metadata)
    count = len(layouts)
    renamed = [_renamed(layout, file, i, count) for i, layout in enumerate(layouts, start=1)]
    files = Files()
    write_shards(files, to, renamed)
    if count > 1:
        index = {piece.key: layout.file for layout in renamed for piece in layout.pieces}
        total = sum(piece.bytes for layout in renamed for piece in layout.pieces)
        told = {"metadata": {"total_size": total}, "weight_map": index}
        write_file(files, to / f"{file}.index.json", json.dumps(told, indent=2).encode())
    files.sync_folder(to)
    ties = [f"{name} is tied to {stored[name]} and not written twice" for name in left_out]
    ties += [f"left out: {first_names(plain)}: safetensors holds tensors only"] if plain else []
    return Written(sum(len(layout.pieces) for layout in renamed), ties)


class _TensorName(str):
    """Stands for a tensor among plain values."""


def _extra_states(opened: OpenCheckpoint, module: str) -> dict[str, Any]:
    def leaf(name: str, tag: str) -> Any:
        opened.entry(name)  # one that is not there is damage
        return _TensorName(name) if tag == "$tensor" else name

    return extra_states(opened.manifest.entries[module], partial(tree.decode, leaf=leaf))


def _renamed(layout: Layout, file: str, number: int, count: int) -> Layout:
    stem = file.removesuffix(".safetensors")
    return replace(layout, file=file if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors")


def _piece(opened: OpenCheckpoint, key: str, name: str) -> TensorPiece:
    entry = opened.entry(name)
    dtype, count = DTYPES[entry.dtype], 1
    for n in entry.shape:
        count *= n
    size_bytes = count * dtype.bytes
    shape = entry.shape if dtype.safetensors else (size_bytes,)
    return TensorPiece(
        key, dtype.code, shape, size_bytes, dtype.bytes, partial(_read, opened, opened.manifest.resolve(name))
    )


def _read(opened: OpenCheckpoint, name: str, start: int, stop: int, out: memoryview) -> None:
    size = bits.torch_dtype(opened.entry(name).dtype).itemsize
    out[:] = bits.byte_view(bits.movable(read_elements(opened, name, start // size, stop // size)))


def _torch(opened: OpenCheckpoint, to: Path, entry: str) -> Written:
    values = Values(opened)
    return Written(saved(values.entry(_module_of(opened, entry)) if entry else _joined(values), to), [])


def _joined(values: Values) -> Any:
    """The whole as one value, with what a folder of DCP had beside it."""
    whole, beside = values.whole(), values.beside()
    return whole | beside if isinstance(whole, dict) and isinstance(beside, dict) else whole


def _dcp(opened: OpenCheckpoint, to: Path, entry: str) -> Written:
    values = Values(opened)
    whole = {entry: values.entry(entry)} if entry else values.whole()
    count = _saved_by_dcp(whole if isinstance(whole, dict) else values.entries(), to)
    if not entry and (beside := values.beside()) is not None:
        count += saved(beside, to / BESIDE)
    return Written(count, [])


def _saved_by_dcp(value: dict[str, Any], to: Path) -> int:
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is done in one process is meant
        metadata: Any = state_dict_saver.save(value, checkpoint_id=to, no_dist=True)
    return sum(isinstance(m, TensorStorageMetadata) for m in metadata.state_dict_metadata.values())


def _folder(opened: OpenCheckpoint, to: Path, entry: str, *, format: str) -> Written:  # noqa: A002
    """A folder of a training library: the one that was imported, or one made of what the checkpoint has."""
    origin = opened.manifest.origin
    to.mkdir()
    if origin is None or origin.format != format or entry:
        return made_folder(opened, to, _module_of(opened, entry), format, partial(_weights, opened))
    values, count = Values(opened), 0
    notes: list[str] = []
    for name in values.names():
        path = to / name
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".safetensors":
            module, texts = values.header(name)
            written = _weights(opened, path.parent, _module_of(opened, module), path.name, texts)
            count, notes = count + written.tensors, notes + written.notes
        else:
            count += _write_value(values.file(name), path)
    return Written(count, notes)


def _write_value(value: Any, path: Path) -> int:
    """As JSON, as a folder of DCP where the name has no suffix, else by torch.save: the number of tensors in it."""
    if path.suffix == ".json":
        try:
            path.write_text(json.dumps(value, indent=2) + "\n")
        except TypeError as e:
            raise DamagedCheckpoint(f"the manifest's form of {path.name} is no JSON: {e!s:.200}") from None
        return 0
    if path.suffix:
        return saved(value, path)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise DamagedCheckpoint(f"the manifest's form of {path.name} is no state dict")
    return _saved_by_dcp(value, path)
