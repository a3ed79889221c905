"""Into live modules: every stored tensor has its place and every place its tensor, ties are tied again."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from workers.checkpoint.format.dtypes import dtype_name
from workers.checkpoint.format.manifest import EXTRA_STATE, extra_states
from workers.checkpoint.format.message_text import first_names
from workers.checkpoint.state import bits, name_matching, names, sharded
from workers.checkpoint.state.load_stage import Apply, LoadStage
from workers.checkpoint.state.names import Slot
from workers.checkpoint.state.values import check_kind
from workers.errors import CheckpointError


@dataclass(slots=True)
class LiveModules:
    """Live tensors by the names under which they are stored. `kept`: which object bears a name after the load."""

    names: dict[int, str] = field(default_factory=dict)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    applies: list[Apply] = field(default_factory=list)

    def device_types(self) -> set[str]:
        return {tensor.device.type for tensor in self.kept.values()}


def stage_modules(stage: LoadStage, modules: dict[str, nn.Module]) -> LiveModules:
    """Check and note all that goes into `modules`. They are changed only by fills and by the returned `applies`."""
    live = LiveModules()
    places: dict[str, list[Slot]] = defaultdict(list)
    for entry, module in modules.items():
        check_kind(stage, entry, "module", module)
        saved, owners = _saved_extra(stage, entry), names.extra_states(module)
        match = name_matching.match(
            stage.reader.manifest, stage.report, entry, names.slots(entry, module), saved, owners
        )
        for slot, name in match.slots:
            places[stage.reader.manifest.resolve(name)].append(slot)
        live.applies.append(_stage_extra(entry, {match.extra[prefix]: saved[prefix] for prefix in saved}, owners))
    _check_shapes(stage, places)
    _check_live_ties(stage, places)
    for stored, slots in places.items():
        live.applies.append(_stage_tensor(stage, live, stored, slots))
    return live


def _stage_tensor(stage: LoadStage, live: LiveModules, stored: str, slots: list[Slot]) -> Apply:
    kept = next((slot for slot in slots if slot.name == stored), slots[0]).tensor
    apart = [slot for slot in slots if slot.tensor is not kept]
    for slot in slots:
        live.names[id(slot.tensor)] = stored
        _check_tie(slot, kept, stored)
    live.kept[stored] = kept
    stage.policy.admit(stored, dtype_name(kept.dtype), kept.device.type)
    stage.into(stored, sharded.local(kept), sharded.box_of(kept))
    stage.report.retied.update({slot.name: stored for slot in apart})
    _note_unshared(stage, stored, kept, live)

    def apply() -> None:
        for slot in apart:
            slot.replace(kept)

    return apply


def _note_unshared(stage: LoadStage, stored: str, kept: torch.Tensor, live: LiveModules) -> None:
    """A view is a tensor of its own here unless the live model shares the memory, too: that is worth a line."""
    entry = stage.reader.entry(stored)
    base = live.kept.get(entry.alias_of) if entry.view else None
    if base is not None and not bits.share_memory(base, kept):
        stage.report.notes.append(f"{stored} shared memory with {entry.alias_of} when saved, and does not here")


def _check_shapes(stage: LoadStage, places: dict[str, list[Slot]]) -> None:
    wrong = [
        f"{slot.name} is {list(slot.tensor.shape)} live and {list(stage.shape(stored))} in the checkpoint"
        for stored, slots in places.items()
        for slot in slots
        if tuple(slot.tensor.shape) != stage.shape(stored)
    ]
    if wrong:
        raise CheckpointError(f"shapes differ: {first_names(wrong, '; ')}", "build the model it was saved from")


def _check_live_ties(stage: LoadStage, places: dict[str, list[Slot]]) -> None:
    """One live tensor cannot receive two stored ones unless they are the same, bit for bit."""
    first: dict[int, str] = {}
    for stored, slots in places.items():
        for slot in slots:
            other = first.setdefault(id(slot.tensor), stored)
            if other != stored and not _same_bits(stage.now(other), stage.now(stored)):
                raise CheckpointError(
                    f"{other} and {stored} are one tensor in the live model and two different ones in the checkpoint",
                    "untie them in the model before loading",
                )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits.movable(a), bits.movable(b))


def _check_tie(slot: Slot, kept: torch.Tensor, stored: str) -> None:
    tensor = slot.tensor
    if (tensor.dtype, tensor.device, tensor.shape) != (kept.dtype, kept.device, kept.shape):
        raise CheckpointError(
            f"{slot.name} is tied to {stored} in the checkpoint; live, one is {tensor.dtype} on {tensor.device},"
            f" the other {kept.dtype} on {kept.device}",
            "give both one dtype and device before loading",
        )


def _saved_extra(stage: LoadStage, entry: str) -> dict[str, Any]:
    """What modules with `get_extra_state` saved, by their prefix."""
    states = extra_states(stage.entry(entry), stage.value)
    return {key.removesuffix(EXTRA_STATE): value for key, value in states.items()}


def _stage_extra(entry: str, saved: dict[str, Any], owners: dict[str, nn.Module]) -> Apply:
    if set(saved) != set(owners):
        differ = sorted(set(saved) ^ set(owners))
        raise CheckpointError(
            f"entry {entry!r}: extra state of {differ[0]!r} is on one side only", "build the model it was saved from"
        )

    def apply() -> None:
        for prefix, owner in owners.items():
            owner.set_extra_state(saved[prefix])

    return apply
