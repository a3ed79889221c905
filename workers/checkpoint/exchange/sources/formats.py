"""Formats that can be imported: detect each by its files, and read it into an ImportedState."""

import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from cluster.errors import NotFound, PolyfleetError, UserError, nearest
from workers.checkpoint.exchange.pickles.legacy_archive import is_legacy
from workers.checkpoint.exchange.pickles.pickle_values import PickleDecoder
from workers.checkpoint.exchange.sources.dcp_folders import COMMON_FILE, EXTRA_FILES, read_dcp, reason_left_out
from workers.checkpoint.exchange.sources.entry_conversion import add_entries, read_value
from workers.checkpoint.exchange.sources.folders import folder_format, numbered_folders, read_folder
from workers.checkpoint.exchange.sources.imported_state import ImportedState
from workers.checkpoint.exchange.sources.optimizer_names import add_optimizers
from workers.checkpoint.exchange.sources.safetensors_files import files_of, read_metadata
from workers.checkpoint.exchange.sources.source_step import EPOCHS, step_in, step_in_name, step_in_texts
from workers.checkpoint.exchange.sources.weight_files import (
    TORCH_INDEX,
    check_not_partitioned,
    import_safetensors,
    import_torch,
)
from workers.checkpoint.format.manifest import Origin
from workers.checkpoint.format.manifest_checks import open_regular
from workers.checkpoint.format.message_text import first_names
from workers.errors import CheckpointError

FORMATS = ("safetensors", "torch", "dcp", "accelerate", "trainer")
TORCH_WEIGHTS = (TORCH_INDEX, "pytorch_model.bin", "adapter_model.bin")
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")


def format_of(source: Path) -> str:
    """Detect the format. Raises NotFound, CheckpointError."""
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
    raise CheckpointError(f"{source} has an unknown format", f"choose from {', '.join(FORMATS)}")


def _format_of_folder(source: Path) -> str:
    weights = "torch" if any(any(source.glob(name)) for name in TORCH_WEIGHTS) else ""
    weights = "safetensors" if files_of(source) else weights
    if not weights:
        check_not_partitioned(source)
    if format_name := folder_format(source) or weights:
        return format_name
    if saves := numbered_folders(source):
        raise CheckpointError(f"{source} contains {len(saves)} saves", f"name one of them, such as {saves[-1]}")
    contents = first_names(sorted(path.name for path in source.iterdir())) or "it is empty"
    part = _importable_part(source)
    remedy = f"name the part to import, such as {part}" if part else f"supported formats: {', '.join(FORMATS)}"
    raise CheckpointError(f"{source} has nothing that can be imported: {contents}", remedy)


def _importable_part(folder: Path, levels: int = 2) -> Path | None:
    """Find a file or folder that can be imported, in a folder or below it; the last by name, which is the newest.

    Ray Train's `checkpoint_DATE` folders contain such parts: what the function that reported them has saved.
    """
    for path in sorted(folder.iterdir(), reverse=True):
        if path.is_symlink() or path.name.startswith(".") or not os.access(path, os.R_OK):
            continue
        if path.is_file() and path.suffix in SUFFIXES:
            return path
        if path.is_dir():
            if _is_checkpoint_folder(path):
                return path
            if levels > 1 and (part := _importable_part(path, levels - 1)):
                return part
    return None


def _is_checkpoint_folder(folder: Path) -> bool:
    has_weights = files_of(folder) or any(any(folder.glob(name)) for name in TORCH_WEIGHTS)
    return bool(has_weights or (folder / ".metadata").is_file() or folder_format(folder))


def read(source: Path, format: str, drop: bool) -> ImportedState:  # noqa: A002
    """Read everything in `source`. Objects other than plain values are refused or, with `drop`, left out and noted."""
    readers: dict[str, Callable[[Path], tuple[ImportedState, PickleDecoder]]] = {
        "safetensors": _read_safetensors, "torch": _read_torch, "dcp": _read_dcp,
        "accelerate": partial(read_folder, format="accelerate"), "trainer": partial(read_folder, format="trainer"),
    }  # fmt: skip
    if format not in readers:
        raise UserError(f"format is {format!r}", nearest(format, FORMATS))
    try:
        state = _finish(source, *readers[format](source), drop)
        state.origin = Origin(format, state.file_forms())
        return state
    except PolyfleetError:
        raise
    except (MemoryError, RecursionError) as e:
        problem = (
            "needs more memory than a file of its size should" if isinstance(e, MemoryError) else "is nested too deeply"
        )
        raise CheckpointError(f"{source} {problem}", "check that the file is in the format you named") from None
    except Exception as e:  # an untrusted file may cause any error
        raise CheckpointError(
            f"{source} cannot be read: {type(e).__name__}: {e!s:.200}",
            "check that the file is complete, then run it again",
        ) from e


def _finish(source: Path, state: ImportedState, plain: PickleDecoder, drop: bool) -> ImportedState:
    """Add optimizers and ties to `state`, after checking that nothing in it is refused."""
    if plain.refused and not drop:
        location, description = next(iter(plain.refused.items()))
        raise CheckpointError(
            f"{source} has {len(plain.refused)} Python objects that cannot be imported; {location} is a {description}",
            "pass --skip-unsupported to leave them out; tensors and numbers are imported",
        )
    state.notes += [f"dropped {location}: a {description}" for location, description in plain.refused.items()]
    state.notes += [f"left out {name}: {reason}" for name, reason in state.left_out.items()]
    state.left_out |= {location: f"a {description}" for location, description in plain.refused.items()}
    if plain.with_grad:
        state.notes.append(
            f"requires_grad of {plain.with_grad} tensors is not stored: the model they are loaded into sets it"
        )
    state.find_ties()
    add_optimizers(state)
    state.find_ties()  # also tensors in optimizers
    state.note_shared()
    _check_unfit(source, state, drop)
    if not state.entries:
        raise CheckpointError(f"{source} contains no tensors and no values", "check that it is the right file")
    return state


def _check_unfit(source: Path, state: ImportedState, drop: bool) -> None:
    """Raise CheckpointError for invalid optimizer state, unless `drop` allows to leave it out."""
    for entry, reason in state.invalid_optimizers.items():
        if not drop:
            raise CheckpointError(
                f"{source}: {entry} looks like the state of an optimizer, but it {reason}",
                "pass --skip-unsupported to leave it out; the rest is imported",
            )
        state.notes.append(f"dropped {entry}, the state of an optimizer that {reason}")
        state.left_out[entry] = f"the state of an optimizer that {reason}"


def _read_safetensors(source: Path) -> tuple[ImportedState, PickleDecoder]:
    state = ImportedState()
    imported = import_safetensors(state, source)
    if source.is_dir():
        _leave_out(state, source, imported)
    _find_step(state, source, [step_in_texts(read_metadata(path)) for path in files_of(source)])
    return state, PickleDecoder()


def _read_torch(source: Path) -> tuple[ImportedState, PickleDecoder]:
    state, plain = ImportedState(), PickleDecoder()
    if source.is_dir():
        _leave_out(state, source, import_torch(state, _torch_weights(source), plain))
        _find_step(state, source, [])
        return state, plain
    value = read_value(source, plain)
    state.file(source.name, value)
    add_entries(state, value)
    _find_step(state, source, [step_in(value)])
    return state, plain


def _torch_weights(source: Path) -> Path:
    """Return the index of several weight files, or the single weight file."""
    for pattern in TORCH_WEIGHTS:
        if matches := sorted(source.glob(pattern)):
            return matches[0]
    raise CheckpointError(f"{source} has no weights written by torch.save", "name the file to import")


def _read_dcp(source: Path) -> tuple[ImportedState, PickleDecoder]:
    state, plain = ImportedState(ordered=False), PickleDecoder()
    value, imported = read_dcp(source, plain)
    values = {source.name: value}
    common = PickleDecoder()  # its objects are left out and named, whether or not `drop` is set
    decoders = {name: common if name == COMMON_FILE else plain for name in EXTRA_FILES}
    values |= {name: read_value(source / name, decoders[name]) for name in EXTRA_FILES if (source / name).is_file()}
    state.left_out |= {location: f"a {description}" for location, description in common.refused.items()}
    for name, content in values.items():
        state.file(name, content)
        add_entries(state, content)
    _find_step(state, source, [*map(step_in, values.values())])
    _leave_out(state, source, {*imported, *values}, reason_left_out)
    return state, plain


def _find_step(state: ImportedState, source: Path, candidates: list[tuple[int, str] | None]) -> None:
    """Set the step to the first that the values have; else to that in the name of the file, or of its folder."""
    if step := next(filter(None, candidates), None):
        state.step, key = step
        if key.rpartition(".")[2] in EPOCHS:
            state.notes.append(f"step {state.step} is {key} of {source.name}, which has no step")
        return
    kind, folder = ("folder" if source.is_dir() else "file"), source.absolute()
    for name in [folder.name] if kind == "folder" else [folder.name, folder.parent.name]:
        if (number := step_in_name(name)) is not None:
            state.step = number
            state.notes.append(f"step {number} is from the name {name}: the {kind} has no step")
            return


def _leave_out(
    state: ImportedState,
    source: Path,
    imported: Collection[str],
    reason: Callable[[str], str] = lambda _: "it is not part of the model",
) -> None:
    """List the files in the folder that were not imported."""
    names = sorted(
        path.name for path in source.iterdir() if not path.name.startswith(".") and path.name not in imported
    )
    state.left_out |= {name: reason(name) for name in names}
