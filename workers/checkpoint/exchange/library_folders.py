"""Write any checkpoint as a folder that Accelerate or the Trainer can load."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers.checkpoint.exchange.exported_value import ExportedValues
from workers.checkpoint.format.manifest import StateEntry
from workers.checkpoint.loading.lazy_reader import OpenCheckpoint


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """What was written. `tensors` is their number in the files; a tie counts once if it is written once."""

    tensors: int
    notes: list[str]


WriteWeights = Callable[[Path, str, str, dict[str, str]], WrittenFiles]
"""Arguments: folder, module, file name and the metadata of its header."""
SUFFIXES = {"accelerate": ".bin", "trainer": ".pt"}


def write_folder(
    checkpoint: OpenCheckpoint,
    folder: Path,
    module: str,
    format: str,  # noqa: A002
    write: WriteWeights,
) -> WrittenFiles:
    """Write model, optimizers, schedulers, random states and step into the files that `format` uses."""
    model = write(folder, module, "model.safetensors", {"format": "pt"})
    count, values, suffix = model.tensors, ExportedValues(checkpoint), SUFFIXES[format]
    entries = checkpoint.manifest.entries
    stems = {name: stem for name, entry in entries.items() if (stem := _stem(name, entry))}
    numbers: dict[str, int] = {}
    for name, stem in stems.items():
        n = numbers[stem] = numbers.get(stem, -1) + 1
        count += save_value(values.entry(name), folder / (f"{stem}{suffix}" if n == 0 else f"{stem}_{n}{suffix}"))
    random = next((values.entry(name) for name, entry in entries.items() if entry.kind == "rng"), None)
    if random is not None and format == "accelerate":
        count += save_value(_random_states(checkpoint.manifest.step, random), folder / "random_states_0.pkl")
    elif random is not None:
        count += save_value(_rng_state(random), folder / "rng_state.pth")
    if format == "trainer":
        state: dict[str, Any] = {"epoch": None, "global_step": checkpoint.manifest.step, "log_history": []}
        (folder / "trainer_state.json").write_text(json.dumps(state, indent=2) + "\n")
    rest = [name for name, entry in entries.items() if name not in (*stems, module) and entry.kind != "rng"]
    left_out = [f"left out: {', '.join(rest)}: such a folder cannot contain it"] if rest else []
    return WrittenFiles(count, model.notes + left_out)


def _stem(name: str, entry: StateEntry) -> str:
    if entry.kind in ("stateful", "tree") and (entry.kind == "stateful" or name.startswith(("scheduler", "lr_sched"))):
        return "scheduler"
    return "optimizer" if entry.kind == "optimizer" else ""


def save_value(value: Any, path: Path) -> int:
    """Save with torch.save and return the number of tensors: one that occurs twice is written once."""
    torch.save(value, path)
    return len({id(tensor) for tensor in _tensors_in(value)})


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple | set | frozenset):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _random_states(step: int, random: dict[str, Any]) -> dict[str, Any]:
    """Random states under the names in Accelerate's files."""
    state = {
        "step": step,
        "random_state": _python_state(random),
        "numpy_random_seed": _numpy_state(random),
        "torch_manual_seed": random["torch"]["cpu"],
    }
    if "cuda" in random["torch"]:
        state["torch_cuda_manual_seed"] = [random["torch"]["cuda"]]
    return state


def _rng_state(random: dict[str, Any]) -> dict[str, Any]:
    """Random states under the Trainer's names; of `torch.cuda` a list if it had several devices."""
    state = {"python": _python_state(random), "numpy": _numpy_state(random), "cpu": random["torch"]["cpu"]}
    return state | ({"cuda": random["torch"]["cuda"]} if "cuda" in random["torch"] else {})


def _python_state(random: dict[str, Any]) -> tuple[Any, ...]:
    python = random["python"]
    return python["version"], tuple(int(w) for w in python["words"]), python["gauss"]


def _numpy_state(random: dict[str, Any]) -> tuple[Any, ...]:
    """numpy's state as a plain tuple."""
    numpy = random["numpy"]
    return numpy["bit_generator"], numpy["state"]["key"], numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]
