"""The formats of others, each told apart by what lies there and read into a Found."""

import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from cluster.errors import NotFound, PolyfleetError, UserError, nearest
from workers.checkpoint.exchange.dcp_folders import BESIDE, read_dcp
from workers.checkpoint.exchange.entry_conversion import read_value, take
from workers.checkpoint.exchange.folders import folder_format, numbered_folders, read_folder
from workers.checkpoint.exchange.imported_state import ImportedState
from workers.checkpoint.exchange.legacy_archive import is_legacy
from workers.checkpoint.exchange.optimizer_names import add_optimizers
from workers.checkpoint.exchange.pickle_values import PickleDecoder
from workers.checkpoint.exchange.safetensors_files import files_of
from workers.checkpoint.exchange.source_step import EPOCHS, step_in, step_in_name
from workers.checkpoint.exchange.unsupported import refuse_parts
from workers.checkpoint.exchange.weight_files import TORCH_INDEX, take_safetensors, take_torch
from workers.checkpoint.format.manifest import Origin
from workers.checkpoint.format.manifest_checks import open_regular
from workers.checkpoint.format.message_text import first_names
from workers.errors import CheckpointError

FORMATS = ("safetensors", "torch", "dcp", "accelerate", "trainer")
TORCH_WEIGHTS = (TORCH_INDEX, "pytorch_model.bin", "adapter_model.bin")
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")


def format_of(source: Path) -> str:
    """By what is there. Raises NotFound, CheckpointError."""
    if not source.exists():
        raise NotFound(f"there is nothing at {source}", "name a file or a folder")
    if source.is_dir():
        if os.path.lexists(source / ".metadata"):
            return "dcp"
        return _format_of_folder(source)
    if source.suffix == ".safetensors":
        return "safetensors"
    with os.fdopen(open_regular(source), "rb") as file:
        head = file.read(16)
    if head[:2] == b"PK" or is_legacy(head) or source.suffix in SUFFIXES:
        return "torch"
    raise CheckpointError(f"{source} is of no known format", f"known: {', '.join(FORMATS)}")


def _format_of_folder(source: Path) -> str:
    weights = "torch" if any(any(source.glob(name)) for name in TORCH_WEIGHTS) else ""
    weights = "safetensors" if files_of(source) else weights
    if not weights:
        refuse_parts(source)
    if known := folder_format(source) or weights:
        return known
    if saves := numbered_folders(source):
        raise CheckpointError(f"{source} holds {len(saves)} saves", f"name one of them, such as {saves[-1]}")
    there = first_names(sorted(path.name for path in source.iterdir())) or "it is empty"
    raise CheckpointError(f"{source} has nothing that can be imported: {there}", f"known: {', '.join(FORMATS)}")


def read(source: Path, format: str, drop: bool) -> ImportedState:  # noqa: A002
    """Everything in `source`. Objects that are no plain values are refused, or with `drop` left out and noted."""
    known: dict[str, Callable[[Path], tuple[ImportedState, PickleDecoder]]] = {
        "safetensors": _safetensors, "torch": _torch, "dcp": _dcp,
        "accelerate": partial(read_folder, format="accelerate"), "trainer": partial(read_folder, format="trainer"),
    }  # fmt: skip
    if format not in known:
        raise UserError(f"format is {format!r}", nearest(format, FORMATS))
    try:
        found = _sound(source, *known[format](source), drop)
        found.origin = Origin(format, found.forms())
        return found
    except PolyfleetError:
        raise
    except (MemoryError, RecursionError) as e:
        said = (
            "needs much more memory than files of its size do" if isinstance(e, MemoryError) else "is nested too deep"
        )
        raise CheckpointError(f"{source} {said}", "check that the file really is in the format you named") from None
    except Exception as e:  # a stranger's file may be wrong in any way
        raise CheckpointError(
            f"{source} cannot be understood: {type(e).__name__}: {e!s:.200}",
            "check that the file is complete, then run it again",
        ) from e


def _sound(source: Path, found: ImportedState, plain: PickleDecoder, drop: bool) -> ImportedState:
    """`found`, with its optimizers and ties, once nothing in it is refused."""
    if plain.refused and not drop:
        where, what = next(iter(plain.refused.items()))
        raise CheckpointError(
            f"{source} holds {len(plain.refused)} Python objects that cannot be imported; {where} is a {what}",
            "pass --drop to leave them out; tensors and numbers are kept",
        )
    found.notes += [f"dropped {where}: a {what}" for where, what in plain.refused.items()]
    found.notes += [f"left out {name}: {why}" for name, why in found.left_out.items()]
    found.left_out |= {where: f"a {what}" for where, what in plain.refused.items()}
    if plain.with_grad:
        found.notes.append(
            f"requires_grad of {plain.with_grad} tensors is not kept: the model they are loaded into has it"
        )
    found.tie()
    add_optimizers(found)
    found.tie()  # what optimizers hold, too
    found.note_shared()
    _judge_unfit(source, found, drop)
    if not found.entries:
        raise CheckpointError(f"{source} contains no tensors and no values", "check that it is the right file")
    return found


def _judge_unfit(source: Path, found: ImportedState, drop: bool) -> None:
    """Raises CheckpointError for what looks like the state of an optimizer and cannot be one, unless it is dropped."""
    for entry, why in found.unfit.items():
        if not drop:
            raise CheckpointError(
                f"{source}: {entry} looks like the state of an optimizer, but it {why}",
                "pass --drop to leave it out; the rest is kept",
            )
        found.notes.append(f"dropped {entry}, the state of an optimizer that {why}")
        found.left_out[entry] = f"the state of an optimizer that {why}"


def _safetensors(source: Path) -> tuple[ImportedState, PickleDecoder]:
    found = ImportedState()
    taken = take_safetensors(found, source)
    if source.is_dir():
        _leave_out(found, source, taken)
    return found, PickleDecoder()


def _torch(source: Path) -> tuple[ImportedState, PickleDecoder]:
    found, plain = ImportedState(), PickleDecoder()
    if source.is_dir():
        _leave_out(found, source, take_torch(found, _torch_weights(source), plain))
        return found, plain
    value = read_value(source, plain)
    found.file(source.name, value)
    take(found, value)
    _find_step(found, source, value)
    return found, plain


def _torch_weights(source: Path) -> Path:
    """The index of several files of weights, or the one there is."""
    for pattern in TORCH_WEIGHTS:
        if there := sorted(source.glob(pattern)):
            return there[0]
    raise CheckpointError(f"{source} holds no weights of torch.save", "name the file to import")


def _dcp(source: Path) -> tuple[ImportedState, PickleDecoder]:
    found, plain = ImportedState(ordered=False), PickleDecoder()
    value = read_dcp(source, plain)
    found.file(source.name, value)
    take(found, value)
    beside = None
    if (source / BESIDE).is_file():
        beside = read_value(source / BESIDE, plain)
        found.file(BESIDE, beside)
        take(found, beside)
    _find_step(found, source, value, beside)
    taken = [path.name for path in (*source.glob("*.distcp"), source / BESIDE)]
    _leave_out(found, source, taken, "the checkpoint")
    return found, plain


def _find_step(found: ImportedState, source: Path, *values: Any) -> None:
    if told := next(filter(None, map(step_in, values)), None):
        found.step, key = told
        if key.rpartition(".")[2] in EPOCHS:
            found.notes.append(f"step {found.step} is {key} of {source.name}, which tells no step")
    elif (number := step_in_name(source.name)) is not None:
        found.step = number
        found.notes.append(f"step {number} is from the name {source.name}: no value in it tells a step")


def _leave_out(found: ImportedState, source: Path, taken: Collection[str], whole: str = "the model") -> None:
    """Name what lies in the folder beside what was taken."""
    names = sorted(path.name for path in source.iterdir() if not path.name.startswith(".") and path.name not in taken)
    found.left_out |= dict.fromkeys(names, f"it is no part of {whole}")
