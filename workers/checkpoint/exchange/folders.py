"""Folders that a training library saves: Accelerate's `save_state` and the Trainer's `checkpoint-500`.

Each file of such a folder is a part that is taken, or is named with the reason why it is left out:

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

from cluster.untrusted_files import depth, read_bytes
from workers.checkpoint.exchange.dcp_folders import read_dcp
from workers.checkpoint.exchange.entry_conversion import read_value, take, take_optimizers
from workers.checkpoint.exchange.imported_state import ImportedState
from workers.checkpoint.exchange.pickle_values import PickleDecoder
from workers.checkpoint.exchange.source_step import step_in, step_in_name
from workers.checkpoint.exchange.unsupported import PARTITIONS, has_partitions
from workers.checkpoint.exchange.weight_files import SAFETENSORS_INDEX, TORCH_INDEX, take_safetensors, take_torch
from workers.checkpoint.format.links import are_followed, real
from workers.checkpoint.format.manifest_checks import open_regular
from workers.checkpoint.format.tree import DEEPEST
from workers.errors import CheckpointError

TRAINER_STATE = "trainer_state.json"
RANDOM_STATES = "random_states_0.pkl"
LARGEST_JSON_BYTES = 64 << 20
PICKLED = (".bin", ".pt", ".pth", ".pkl")
VALUES = (TRAINER_STATE, "config.json", "generation_config.json", "adapter_config.json")
OBJECTS = {
    "training_args.bin": "a pickled object; the script makes its arguments again",
    "sampler": "a pickled object; the order of the data begins anew",
}
"""By name, or name without suffix and number: what no program but its own can read."""
NO_STATE = "it holds no state of the training"
_MODEL = re.compile(r"(?:(?:adapter_|pytorch_)?model|pytorch_model_fsdp)(_\d+)?\.(?:safetensors|bin)")
_SHARDED = re.compile(r"(?:pytorch_model_fsdp|optimizer)_\d+")
_UNFINISHED = ("optimizer.pt", "scheduler.pt", "rng_state*.pth")
"""What the Trainer writes between `training_args.bin` and `trainer_state.json`."""
_NUMBERED = re.compile(r"((?:checkpoint|ckpt|step|global_step|iter|iteration|epoch)[-_]?)(\d{1,18})")
_COUNTED = re.compile(r"checkpoint_\d+")
"""As Accelerate names its saves itself (ProjectConfiguration): 0, 1, 2, whatever the step."""
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
"""Parts that a folder may be without: the import says so."""


def folder_format(source: Path) -> str:
    """ "trainer", "accelerate" or ""."""
    if os.path.lexists(source / TRAINER_STATE) or _is_unfinished(source):
        return "trainer"
    if any(os.path.lexists(source / name) for name in ("optimizer.bin", RANDOM_STATES)):
        return "accelerate"
    sharded = (path for path in source.iterdir() if _SHARDED.fullmatch(path.name))
    return "accelerate" if any((path / ".metadata").is_file() for path in sharded) else ""


def _is_unfinished(source: Path) -> bool:
    """Whether the Trainer was stopped before it wrote `trainer_state.json`, or somebody removed that."""
    named = re.fullmatch(r"checkpoint-\d+", source.name) is not None
    return (source / "training_args.bin").exists() and (named or any(any(source.glob(name)) for name in _UNFINISHED))


def numbered_folders(source: Path) -> list[Path]:
    """Folders below it that are called like saves (checkpoint-500, checkpoint_3, step_500), the newest last; none where
    there are several kinds, whose numbers cannot be compared."""
    names = {path: match for path in source.iterdir() if (match := _NUMBERED.fullmatch(path.name))}
    saves = [path for path in names if path.is_dir() and not path.is_symlink()]
    one_kind = len({names[path][1] for path in saves}) == 1
    return sorted(saves, key=lambda path: int(names[path][2])) if one_kind else []


def read_folder(source: Path, format: str) -> tuple[ImportedState, PickleDecoder]:  # noqa: A002
    found, plain = ImportedState(), PickleDecoder()
    taken = _take_weights(found, source, plain)
    names = {path.name for path in source.iterdir()}
    if format == "accelerate":
        _check_whole(source, names, bool(taken))
    values: dict[str, Any] = {}
    for name in sorted(names - taken):
        if name.startswith("."):
            continue
        if (value := _take_part(found, source / name, plain)) is not None:
            values[name] = value
    absent = [part for part, form in _EXPECTED[format].items() if not any(re.match(form, name) for name in names)]
    found.notes += [f"the folder has no {part}" for part in absent]
    _find_step(found, source, values)
    return found, plain


def _check_whole(source: Path, names: set[str], has_model: bool) -> None:
    optimizer = any(name == "optimizer.bin" or re.fullmatch(r"optimizer_\d+", name) for name in names)
    has = {"optimizer.bin": optimizer, RANDOM_STATES: RANDOM_STATES in names}
    has["the model"] = has_model or any(name.startswith("pytorch_model_fsdp_") for name in names)
    if missing := [name for name, there in has.items() if not there]:
        raise CheckpointError(
            f"{source} is half a state: {', '.join(missing)} is missing",
            "import the model's file alone, or copy the folder again from its source",
        )


def _take_weights(found: ImportedState, source: Path, plain: PickleDecoder) -> set[str]:
    """The names of the files that hold models. Of several formats of one model the first is taken."""
    return _take_own_weights(found, source, plain) | _take_models_below(found, source)


def _take_own_weights(found: ImportedState, source: Path, plain: PickleDecoder) -> set[str]:
    if [*source.glob(SAFETENSORS_INDEX)]:
        return set(take_safetensors(found, source))
    if index := next(iter(source.glob(TORCH_INDEX)), None):
        return set(take_torch(found, index, plain))
    taken: dict[str, str] = {}
    for path in sorted(source.iterdir(), key=lambda path: (path.suffix != ".safetensors", path.name)):
        if not (match := _MODEL.fullmatch(path.name)):
            continue
        entry = f"model{match[1] or ''}"
        if entry in taken.values():
            found.left_out[path.name] = "another copy of the same model"
        elif path.suffix == ".safetensors":
            take_safetensors(found, path, entry)
        else:
            take_torch(found, path, plain, entry)
        taken[path.name] = entry
    if taken or not (others := sorted(source.glob("*.safetensors"))):
        return set(taken)
    return set(take_safetensors(found, source if len(others) > 1 else others[0]))


def _take_models_below(found: ImportedState, source: Path) -> set[str]:
    """Models in folders of their own, as diffusers and several adapters of PEFT have them: the folders' names."""
    taken: set[str] = set()
    for folder in sorted(path.parent for path in source.glob("*/*.safetensors")):
        skipped = folder.name in taken or folder.name.startswith(".") or _NUMBERED.fullmatch(folder.name)
        if skipped or _is_guarded(folder):
            continue
        taken.add(folder.name)
        there, entry = f"{folder.name}/", found.name_free(folder.name)
        files = {*take_safetensors(found, folder, entry, there)}
        for path in sorted(path for path in folder.iterdir() if path.name not in files):
            if path.name in VALUES:
                value = _read_values(path)
                found.file(f"{there}{path.name}", value)
                found.plain(found.name_free(f"{folder.name}_{path.stem}"), value)
            else:
                found.left_out[f"{there}{path.name}"] = NO_STATE
    return taken


def _is_guarded(folder: Path) -> bool:
    """Whether it is a link that a job or an archive may have left behind: it could lead anywhere."""
    return folder.is_symlink() and not are_followed()


def _take_part(found: ImportedState, path: Path, plain: PickleDecoder) -> Any:
    """The value of a file that is taken, else None and its reason in `found.left_out`."""
    stem = re.sub(r"_\d+$", "", path.stem)
    if path.is_dir():
        if _is_guarded(path):
            found.left_out[path.name] = "a link to a folder"
            return None
        if (path / ".metadata").is_file():
            found.ordered = False
            value = read_dcp(path, plain)
            found.file(path.name, value)
            take(found, value)
            return value
        other = "another save" if _NUMBERED.fullmatch(path.name) else "a folder of no known form"
        found.left_out[path.name] = PARTITIONS if has_partitions(path) else other
    elif why := OBJECTS.get(path.name) or OBJECTS.get(stem):
        found.left_out[path.name] = why
    elif path.suffix in PICKLED:
        value = read_value(path, plain)
        found.file(path.name, value)
        if not take_optimizers(found, path.stem, value):
            found.plain(found.name_free(path.stem), value)
        return value
    elif path.name in VALUES:
        value = _read_values(path)
        found.file(path.name, value)
        found.plain(found.name_free(path.stem), value)
        return value
    else:
        found.left_out[path.name] = NO_STATE
    return None


def _read_values(path: Path) -> Any:
    """JSON as Python's own writer writes it: with NaN, where a loss was none."""
    os.close(open_regular(path))  # which says what is wrong with it, if anything is
    data = read_bytes(real(path), LARGEST_JSON_BYTES)
    if depth(data) >= DEEPEST:
        raise CheckpointError(
            f"{path} is nested deeper than {DEEPEST}", "check that the file really is in the format you named"
        )
    return json.loads(data)


def _find_step(found: ImportedState, source: Path, values: dict[str, Any]) -> None:
    """The Trainer's; of Accelerate what the script registered, the folder's name, or its count of batches."""
    if told := step_in(values.pop(TRAINER_STATE, None)):
        found.step = told[0]
        return
    own = [(name, told) for name, value in values.items() if "custom" in name and (told := step_in(value))]
    counted = step_in(values.get(RANDOM_STATES))
    if own:
        (name, (found.step, key)), *_ = own
        found.notes.append(f"step {found.step} is {key} of {name}")
    elif (number := step_in_name(source.name)) is not None:
        found.step = number
        counted_saves = ", where Accelerate puts the number of the save" if _COUNTED.fullmatch(source.name) else ""
        found.notes.append(f"step {number} is from the folder's name {source.name}{counted_saves}")
    elif counted and counted[0]:
        found.step = counted[0]
        found.notes.append(f"step {found.step} is from {RANDOM_STATES}, which counts the batches of an epoch")
