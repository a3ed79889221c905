"""Read folders that Accelerate (`save_state`) and the Trainer (`checkpoint-500`) save.

Each file of such a folder is imported, or named with the reason why it is left out:

    weights         model.safetensors, pytorch_model.bin, adapter_model.…, one file or several with an index
    sharded (FSDP)  pytorch_model_fsdp_0/, optimizer_0/: folders of torch.distributed.checkpoint
    state           optimizer.bin|.pt, scheduler.bin|.pt, scaler.pt, random_states_R.pkl, rng_state_R.pth, …
    values          trainer_state.json, config.json, …

Source: accelerate/checkpointing.py and utils/fsdp_utils.py, transformers/trainer.py.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from cluster.input.untrusted_files import depth, read_bytes
from workers.checkpoint.exchange.pickles.pickle_values import PickleDecoder
from workers.checkpoint.exchange.sources.dcp_folders import read_dcp, reason_left_out
from workers.checkpoint.exchange.sources.entry_conversion import add_entries, add_optimizer_entries, read_value
from workers.checkpoint.exchange.sources.imported_state import ImportedState
from workers.checkpoint.exchange.sources.source_step import step_in, step_in_name
from workers.checkpoint.exchange.sources.weight_files import (
    PARTITIONS,
    SAFETENSORS_INDEX,
    TORCH_INDEX,
    has_partitions,
    import_safetensors,
    import_torch,
)
from workers.checkpoint.format.links import are_followed, resolve_links
from workers.checkpoint.format.manifest_checks import open_regular
from workers.checkpoint.format.tree import MAX_DEPTH
from workers.errors import CheckpointError

TRAINER_STATE = "trainer_state.json"
RANDOM_STATES = "random_states_0.pkl"
MAX_JSON_BYTES = 64 << 20
PICKLED = (".bin", ".pt", ".pth", ".pkl")
VALUES = (TRAINER_STATE, "config.json", "generation_config.json", "adapter_config.json")
OBJECTS = {
    "training_args.bin": "a pickled object; the script creates its arguments again",
    "sampler": "a pickled object; the order of the data starts from the beginning",
}
"""Files that only their own program can read, by name, or by name without suffix and number."""
NO_STATE = "it has no training state"
_MODEL = re.compile(r"(?:(?:adapter_|pytorch_)?model|pytorch_model_fsdp)(_\d+)?\.(?:safetensors|bin)")
_SHARDED = re.compile(r"(?:pytorch_model_fsdp|optimizer)_\d+")
_UNFINISHED = ("optimizer.pt", "scheduler.pt", "rng_state*.pth")
"""Files that the Trainer writes between `training_args.bin` and `trainer_state.json`."""
_NUMBERED = re.compile(r"((?:checkpoint|ckpt|step|global_step|iter|iteration|epoch)[-_]?)(\d{1,18})")
_COUNTED = re.compile(r"checkpoint_\d+")
"""Names that Accelerate itself gives its saves (ProjectConfiguration): 0, 1, 2, whatever the step."""
_EXPECTED = {
    "trainer": {
        "weights": r"(adapter_|pytorch_)?model[._-]",
        "optimizer": r"optimizer(\.|_\d+$)",
        "scheduler": r"scheduler\.",
        "random states": r"rng_state",
        TRAINER_STATE: r"trainer_state\.json",
    },
    "accelerate": {"optimizer": r"optimizer[._]", "random states": r"random_states_"},
}
"""Parts that a folder may lack: the import notes which are missing."""


def folder_format(source: Path) -> str:
    """Return "trainer", "accelerate" or ""."""
    if os.path.lexists(source / TRAINER_STATE) or _is_unfinished(source):
        return "trainer"
    if any(os.path.lexists(source / name) for name in ("optimizer.bin", RANDOM_STATES)):
        return "accelerate"
    sharded = (path for path in source.iterdir() if _SHARDED.fullmatch(path.name))
    return "accelerate" if any((path / ".metadata").is_file() for path in sharded) else ""


def _is_unfinished(source: Path) -> bool:
    """Check for a Trainer's folder without `trainer_state.json`: it was stopped, or the file removed."""
    has_step_name = re.fullmatch(r"checkpoint-\d+", source.name) is not None
    return (source / "training_args.bin").exists() and (
        has_step_name or any(any(source.glob(name)) for name in _UNFINISHED)
    )


def numbered_folders(source: Path) -> list[Path]:
    """List subfolders named like saves (checkpoint-500, checkpoint_3, step_500), the newest last.
    The list is empty if there are several kinds of names, whose numbers cannot be compared.
    """
    names = {path: match for path in source.iterdir() if (match := _NUMBERED.fullmatch(path.name))}
    saves = [path for path in names if path.is_dir() and not path.is_symlink()]
    is_one_kind = len({names[path][1] for path in saves}) == 1
    return sorted(saves, key=lambda path: int(names[path][2])) if is_one_kind else []


def read_folder(source: Path, format: str) -> tuple[ImportedState, PickleDecoder]:  # noqa: A002
    state, plain = ImportedState(), PickleDecoder()
    weight_files = _import_weights(state, source, plain)
    names = {path.name for path in source.iterdir()}
    if format == "accelerate":
        _check_complete(source, names, bool(weight_files))
    values: dict[str, Any] = {}
    for name in sorted(names - weight_files):
        if name.startswith("."):
            continue
        if (value := _import_part(state, source / name, plain)) is not None:
            values[name] = value
    missing = [part for part, form in _EXPECTED[format].items() if not any(re.match(form, name) for name in names)]
    state.notes += [f"the folder has no {part}" for part in missing]
    _find_step(state, source, values)
    return state, plain


def _check_complete(source: Path, names: set[str], has_model: bool) -> None:
    optimizer = any(name == "optimizer.bin" or re.fullmatch(r"optimizer_\d+", name) for name in names)
    parts = {"optimizer.bin": optimizer, RANDOM_STATES: RANDOM_STATES in names}
    parts["the model"] = has_model or any(name.startswith("pytorch_model_fsdp_") for name in names)
    if missing := [name for name, exists in parts.items() if not exists]:
        raise CheckpointError(
            f"{source} is incomplete: {', '.join(missing)} is missing",
            "import the model's file alone, or copy the folder again from its source",
        )


def _import_weights(state: ImportedState, source: Path, plain: PickleDecoder) -> set[str]:
    """Import weights and return the names of their files. Of several formats of one model the first is used."""
    return _import_own_weights(state, source, plain) | _import_models_below(state, source)


def _import_own_weights(state: ImportedState, source: Path, plain: PickleDecoder) -> set[str]:
    if [*source.glob(SAFETENSORS_INDEX)]:
        return set(import_safetensors(state, source))
    if index := next(iter(source.glob(TORCH_INDEX)), None):
        return set(import_torch(state, index, plain))
    entries_by_file: dict[str, str] = {}
    for path in sorted(source.iterdir(), key=lambda path: (path.suffix != ".safetensors", path.name)):
        if not (match := _MODEL.fullmatch(path.name)):
            continue
        entry = f"model{match[1] or ''}"
        if entry in entries_by_file.values():
            state.left_out[path.name] = "another copy of the same model"
        elif path.suffix == ".safetensors":
            import_safetensors(state, path, entry)
        else:
            import_torch(state, path, plain, entry)
        entries_by_file[path.name] = entry
    if entries_by_file or not (others := sorted(source.glob("*.safetensors"))):
        return set(entries_by_file)
    return set(import_safetensors(state, source if len(others) > 1 else others[0]))


def _import_models_below(state: ImportedState, source: Path) -> set[str]:
    """Import models in subfolders, as diffusers and PEFT with several adapters write them. Return folder names."""
    names: set[str] = set()
    for folder in sorted(path.parent for path in source.glob("*/*.safetensors")):
        skipped = folder.name in names or folder.name.startswith(".") or _NUMBERED.fullmatch(folder.name)
        if skipped or _is_refused_link(folder):
            continue
        names.add(folder.name)
        prefix, entry = f"{folder.name}/", state.free_name(folder.name)
        files = {*import_safetensors(state, folder, entry, prefix)}
        for path in sorted(path for path in folder.iterdir() if path.name not in files):
            if path.name in VALUES:
                value = _read_values(path)
                state.file(f"{prefix}{path.name}", value)
                state.plain(state.free_name(f"{folder.name}_{path.stem}"), value)
            else:
                state.left_out[f"{prefix}{path.name}"] = NO_STATE
    return names


def _is_refused_link(folder: Path) -> bool:
    """Check for a link that a job or an archive may have left behind: it could lead anywhere."""
    return folder.is_symlink() and not are_followed()


def _import_part(state: ImportedState, path: Path, plain: PickleDecoder) -> Any:
    """Return the value of a file that is imported, else None, with the reason in `state.left_out`."""
    stem = re.sub(r"_\d+$", "", path.stem)
    if path.is_dir():
        if _is_refused_link(path):
            state.left_out[path.name] = "a link to a folder"
            return None
        if (path / ".metadata").is_file():
            state.ordered = False
            value, imported = read_dcp(path, plain)
            others = sorted(file.name for file in path.iterdir() if file.name not in (".metadata", *imported))
            state.left_out |= {f"{path.name}/{name}": reason_left_out(name) for name in others}
            state.file(path.name, value)
            add_entries(state, value)
            return value
        description = "another save" if _NUMBERED.fullmatch(path.name) else "a folder of unknown content"
        state.left_out[path.name] = PARTITIONS if has_partitions(path) else description
    elif reason := OBJECTS.get(path.name) or OBJECTS.get(stem):
        state.left_out[path.name] = reason
    elif path.suffix in PICKLED:
        value = read_value(path, plain)
        state.file(path.name, value)
        if not add_optimizer_entries(state, path.stem, value):
            state.plain(state.free_name(path.stem), value)
        return value
    elif path.name in VALUES:
        value = _read_values(path)
        state.file(path.name, value)
        state.plain(state.free_name(path.stem), value)
        return value
    else:
        state.left_out[path.name] = NO_STATE
    return None


def _read_values(path: Path) -> Any:
    """Read JSON as Python's own writer writes it: with NaN, where a loss was not a number."""
    os.close(open_regular(path))  # raises with the reason if it is not a readable file
    data = read_bytes(resolve_links(path), MAX_JSON_BYTES)
    if depth(data) >= MAX_DEPTH:
        raise CheckpointError(
            f"{path} is nested deeper than {MAX_DEPTH}", "check that the file is in the format you named"
        )
    return json.loads(data)


def _find_step(state: ImportedState, source: Path, values: dict[str, Any]) -> None:
    """Set the step: the Trainer's; else the script's own, the folder's number, or a count of batches."""
    if step := step_in(values.pop(TRAINER_STATE, None)):
        state.step = step[0]
        return
    candidates = [(name, step) for name, value in values.items() if "custom" in name and (step := step_in(value))]
    batches, name = step_in(values.get(RANDOM_STATES)), source.absolute().name
    if candidates:
        (file, (state.step, key)), *_ = candidates
        state.notes.append(f"step {state.step} is {key} of {file}")
    elif (number := step_in_name(name)) is not None:
        state.step = number
        counted_saves = ", in which Accelerate writes the number of the save" if _COUNTED.fullmatch(name) else ""
        state.notes.append(f"step {number} is from the folder's name {name}{counted_saves}")
    elif batches and batches[0]:
        state.step = batches[0]
        state.notes.append(f"step {state.step} is from {RANDOM_STATES}, which counts the batches of an epoch")
