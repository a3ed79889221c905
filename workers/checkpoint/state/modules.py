"""Load into live modules: match every stored tensor with a live one, and restore ties."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from workers.checkpoint.conversion import bits
from workers.checkpoint.format.dtypes import dtype_name
from workers.checkpoint.format.manifest import EXTRA_STATE, extra_states
from workers.checkpoint.format.message_text import first_names
from workers.checkpoint.state import name_matching, names
from workers.checkpoint.state.load_stage import Apply, LoadStage
from workers.checkpoint.state.names import Slot
from workers.checkpoint.state.values import check_kind
from workers.checkpoint.tensors import sharded
from workers.errors import CheckpointError


@dataclass(slots=True)
class LiveModules:
    """Live tensors by the names under which they are stored. `tensors`: the object that has a name after the load."""

    names: dict[int, str] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    applies: list[Apply] = field(default_factory=list)

    def device_types(self) -> set[str]:
        return {tensor.device.type for tensor in self.tensors.values()}


def stage_modules(stage: LoadStage, modules: dict[str, nn.Module]) -> LiveModules:
    """Check and note all that is loaded into `modules`. They are changed only by fills and the returned `applies`."""
    live = LiveModules()
    slots_by_name: dict[str, list[Slot]] = defaultdict(list)
    for entry, module in modules.items():
        check_kind(stage, entry, "module", module)
        saved_extra, owners = _saved_extra(stage, entry), names.extra_states(module)
        match = name_matching.match(
            stage.reader.manifest, stage.report, entry, names.slots(entry, module), saved_extra, owners
        )
        for slot, name in match.slots:
            slots_by_name[stage.reader.manifest.resolve(name)].append(slot)
        live.applies.append(
            _stage_extra(entry, {match.extra[prefix]: saved_extra[prefix] for prefix in saved_extra}, owners)
        )
    _check_shapes(stage, slots_by_name)
    _check_live_ties(stage, slots_by_name)
    for stored, slots in slots_by_name.items():
        live.applies.append(_stage_tensor(stage, live, stored, slots))
    return live


def _stage_tensor(stage: LoadStage, live: LiveModules, stored: str, slots: list[Slot]) -> Apply:
    shared = next((slot for slot in slots if slot.name == stored), slots[0]).tensor
    others = [slot for slot in slots if slot.tensor is not shared]
    for slot in slots:
        live.names[id(slot.tensor)] = stored
        _check_tie(slot, shared, stored)
    live.tensors[stored] = shared
    stage.policy.check_live_dtype(stored, dtype_name(shared.dtype), shared.device.type)
    stage.fill_into(stored, sharded.local_part(shared), sharded.box_of(shared))
    stage.report.retied.update({slot.name: stored for slot in others})
    _note_unshared(stage, stored, shared, live)

    def apply() -> None:
        for slot in others:
            slot.replace(shared)

    return apply


def _note_unshared(stage: LoadStage, stored: str, tensor: torch.Tensor, live: LiveModules) -> None:
    """Add a note if a view is stored but the live model does not share the memory."""
    entry = stage.reader.entry(stored)
    base = live.tensors.get(entry.alias_of) if entry.view else None
    if base is not None and not bits.share_memory(base, tensor):
        stage.report.notes.append(f"{stored} shared memory with {entry.alias_of} when saved, but not in the live model")


def _check_shapes(stage: LoadStage, slots_by_name: dict[str, list[Slot]]) -> None:
    differences = [
        f"{slot.name} is {list(slot.tensor.shape)} live and {list(stage.shape(stored))} in the checkpoint"
        for stored, slots in slots_by_name.items()
        for slot in slots
        if tuple(slot.tensor.shape) != stage.shape(stored)
    ]
    if differences:
        raise CheckpointError(f"shapes differ: {first_names(differences, '; ')}", "build the same model as was saved")


def _check_live_ties(stage: LoadStage, slots_by_name: dict[str, list[Slot]]) -> None:
    """Check that no live tensor gets two stored ones, unless they are the same bit for bit."""
    first: dict[int, str] = {}
    for stored, slots in slots_by_name.items():
        for slot in slots:
            other = first.setdefault(id(slot.tensor), stored)
            if other != stored and not _same_bits(stage.read_now(other), stage.read_now(stored)):
                raise CheckpointError(
                    f"{other} and {stored} are one tensor in the live model and two different ones in the checkpoint",
                    "untie them in the model before loading",
                )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits.as_integers(a), bits.as_integers(b))


def _check_tie(slot: Slot, shared: torch.Tensor, stored: str) -> None:
    tensor = slot.tensor
    if (tensor.dtype, tensor.device, tensor.shape) != (shared.dtype, shared.device, shared.shape):
        raise CheckpointError(
            f"{slot.name} is tied to {stored} in the checkpoint; in the live model one is {tensor.dtype} on"
            f" {tensor.device}, the other {shared.dtype} on {shared.device}",
            "give both the same dtype and device before loading",
        )


def _saved_extra(stage: LoadStage, entry: str) -> dict[str, Any]:
    """Return what modules with `get_extra_state` saved, by prefix."""
    states = extra_states(stage.entry(entry), stage.value)
    return {key.removesuffix(EXTRA_STATE): value for key, value in states.items()}


def _stage_extra(entry: str, saved: dict[str, Any], owners: dict[str, nn.Module]) -> Apply:
    if set(saved) != set(owners):
        differ = sorted(set(saved) ^ set(owners))
        raise CheckpointError(
            f"entry {entry!r}: extra state of {differ[0]!r} is only in the checkpoint or only in the model",
            "build the same model as was saved",
        )

    def apply() -> None:
        for prefix, owner in owners.items():
            owner.set_extra_state(saved[prefix])

    return apply
