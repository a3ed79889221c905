"""Checkpoints of ours as others write theirs. Tensors are mapped from the shards, so nothing is read twice or held."""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cluster.errors import UserError, nearest
from workers.checkpoint.disk.files import Files, write_file
from workers.checkpoint.disk.layout import Layout, Piece, lay_out
from workers.checkpoint.disk.writer import write_shards
from workers.checkpoint.exchange.reading import FORMATS
from workers.checkpoint.format import tree
from workers.checkpoint.format.dtypes import DTYPES
from workers.checkpoint.format.optimizer_tree import as_torch, read_optimizer
from workers.checkpoint.inspect import checkpoint_folder
from workers.checkpoint.opening import OpenCheckpoint, open_checkpoint
from workers.checkpoint.state import bits
from workers.checkpoint.state.filling import read_elements
from workers.errors import CheckpointError

SHARD_BYTES = 5_000_000_000
"""As Hugging Face's libraries cut their files."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Written:
    """`tensors` counts those that the files hold: what is tied counts once where it is written once."""

    tensors: int
    notes: list[str]


def export_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    format: str = "safetensors",  # noqa: A002
    entry: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write checkpoint `source` to `target`, which must not exist: {"path", "format", "tensors", "files", "notes"}.
    "tensors" counts what was written.

    "safetensors": a folder with one module's tensors and an index, as Hugging Face lays them out; `entry` chooses the
    module where there are several. "torch": one file for torch.load. "dcp": a folder for torch.distributed.checkpoint.
    "accelerate": model, optimizer, scheduler and values as save_state writes them. Every byte is verified first.
    """
    known = {"safetensors": _safetensors, "torch": _torch, "dcp": _dcp, "accelerate": _accelerate}
    if format not in known:
        raise UserError(f"format is {format!r}", nearest(format, FORMATS))
    to = Path(target)
    if to.exists():
        raise CheckpointError(f"{to} is already there", "name another place, or delete it first")
    with open_checkpoint(checkpoint_folder(source)) as opened:
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
        if not to.is_dir():
            to.unlink()
            return
        for path in to.iterdir():
            path.unlink()
        to.rmdir()


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
    module = _module_of(opened, entry)
    names = opened.manifest.own(module)
    stored = {name: opened.manifest.tensors[name].alias_of or name for name in names}
    left_out = [name for name, own in stored.items() if own != name and not opened.manifest.tensors[name].view]
    layouts = lay_out((_piece(opened, module, name) for name in names if name not in left_out), SHARD_BYTES)
    count = len(layouts)
    renamed = [_renamed(layout, i, count) for i, layout in enumerate(layouts, start=1)]
    to.mkdir()
    files = Files()
    write_shards(files, to, renamed)
    if count > 1:
        index = {piece.key: layout.file for layout in renamed for piece in layout.pieces}
        total = sum(piece.bytes for layout in renamed for piece in layout.pieces)
        told = {"metadata": {"total_size": total}, "weight_map": index}
        write_file(files, to / "model.safetensors.index.json", json.dumps(told, indent=2).encode())
    files.sync_folder(to)
    ties = [f"{name} is tied to {stored[name]} and not written twice" for name in left_out]
    others = sorted(set(opened.manifest.entries) - {module})
    notes = ties + ([f"left out: {', '.join(others)}"] if others else [])
    return Written(sum(len(layout.pieces) for layout in renamed), notes)


def _renamed(layout: Layout, number: int, count: int) -> Layout:
    file = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
    return replace(layout, file=file)


def _piece(opened: OpenCheckpoint, module: str, name: str) -> Piece:
    entry = opened.entry(name)
    dtype, count = DTYPES[entry.dtype], 1
    for n in entry.shape:
        count *= n
    size_bytes = count * dtype.bytes
    shape = entry.shape if dtype.safetensors else (size_bytes,)
    key = name.removeprefix(f"{module}/")
    return Piece(key, dtype.code, shape, size_bytes, dtype.bytes, partial(_read, opened, opened.manifest.resolve(name)))


def _read(opened: OpenCheckpoint, name: str, start: int, stop: int, out: memoryview) -> None:
    size = bits.torch_dtype(opened.entry(name).dtype).itemsize
    out[:] = bits.byte_view(bits.movable(read_elements(opened, name, start // size, stop // size)))


def values(opened: OpenCheckpoint) -> dict[str, Any]:
    """All entries as torch's users have them: a module as {name: tensor}, an optimizer as its state_dict."""
    tensors: dict[str, torch.Tensor] = {}

    def tensor(name: str) -> torch.Tensor:
        own = opened.manifest.resolve(name)
        if own not in tensors:
            tensors[own] = opened.tensor(own)
        return tensors[own]

    def leaf(name: str, tag: str) -> Any:
        return tensor(name).numpy() if tag == "$array" else tensor(name)

    state: dict[str, Any] = {}
    for entry, told in opened.manifest.entries.items():
        if told.kind == "module":
            state[entry] = {n.removeprefix(f"{entry}/"): tensor(n) for n in opened.manifest.own(entry)}
        elif told.kind == "optimizer":
            state[entry] = as_torch(read_optimizer(entry, told), partial(tree.decode, leaf=leaf))
        else:
            state[entry] = tree.decode(told.tree, leaf)
    return state


def _torch(opened: OpenCheckpoint, to: Path, entry: str) -> Written:
    state = values(opened)
    return Written(_saved(state[_module_of(opened, entry)] if entry else state, to), [])


def _saved(value: Any, to: Path) -> int:
    """How many tensors torch.save put into its file: one that occurs twice is written once."""
    torch.save(value, to)
    return len({id(tensor) for tensor in _tensors_in(value)})


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple | set | frozenset):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _dcp(opened: OpenCheckpoint, to: Path, entry: str) -> Written:
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    state = values(opened)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is done in one process is meant
        wanted = {entry: state[entry]} if entry else state
        metadata: Any = state_dict_saver.save(wanted, checkpoint_id=to, no_dist=True)
    tensors = [m for m in metadata.state_dict_metadata.values() if isinstance(m, TensorStorageMetadata)]
    return Written(len(tensors), [])


def _accelerate(opened: OpenCheckpoint, to: Path, entry: str) -> Written:
    model = _safetensors(opened, to, entry)
    count = model.tensors
    state, kinds = values(opened), {name: told.kind for name, told in opened.manifest.entries.items()}
    numbers: dict[str, int] = {}
    for name, value in state.items():
        stem = {"optimizer": "optimizer", "stateful": "scheduler"}.get(kinds[name], "")
        if not stem:
            continue
        n = numbers[stem] = numbers.get(stem, -1) + 1
        count += _saved(value, to / (f"{stem}.bin" if n == 0 else f"{stem}_{n}.bin"))
    random = next((state[name] for name, kind in kinds.items() if kind == "rng"), None)
    if random is not None:
        count += _saved(_random_states(opened.manifest.step, random), to / "random_states_0.pkl")
    kept = [note for note in model.notes if not note.startswith("left out")]
    plain = [name for name, kind in kinds.items() if kind == "tree"]
    left_out = [f"left out: {', '.join(plain)}: save_state has no place for plain values"] if plain else []
    return Written(count, kept + left_out)


def _random_states(step: int, saved: dict[str, Any]) -> dict[str, Any]:
    """As accelerate's own files name them; numpy's state is its plain tuple."""
    python, numpy = saved["python"], saved["numpy"]
    told = {
        "step": step,
        "random_state": (python["version"], tuple(int(w) for w in python["words"]), python["gauss"]),
        "numpy_random_seed": (
            numpy["bit_generator"], numpy["state"]["key"], numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"],
        ),
        "torch_manual_seed": saved["torch"]["cpu"],
    }  # fmt: skip
    if "cuda" in saved["torch"]:
        told["torch_cuda_manual_seed"] = [saved["torch"]["cuda"]]
    return told
