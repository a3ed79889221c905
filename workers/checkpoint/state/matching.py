"""Which stored name is which place of a live module: the same, or the same past a wrapper that only one side has.

A checkpoint of ours has clean names. One that was imported may have those of a compiled, data-parallel or Lightning
model. A prefix is taken off only if that makes both sides the same, and the report says so.
"""

from workers.checkpoint.format.manifest import Manifest
from workers.checkpoint.format.words import closest, few, without_wrappers
from workers.checkpoint.report import Report
from workers.checkpoint.state.names import Slot
from workers.errors import CheckpointError


def match(manifest: Manifest, report: Report, entry: str, slots: list[Slot]) -> list[tuple[Slot, str]]:
    """Each live slot with its stored name. A tie that the file has once, as safetensors does, needs no name of its own.

    Raises CheckpointError where names are missing or left over, with the nearest.
    """
    stored = set(manifest.own(entry))
    renamed = _renamed(entry, {slot.name for slot in slots}, stored, report)
    there = {id(slot.tensor) for slot in slots if renamed.get(slot.name, slot.name) in stored}
    matched, missing = [], []
    for slot in slots:
        name = renamed.get(slot.name, slot.name)
        if name in stored:
            matched.append((slot, name))
        elif id(slot.tensor) in there:
            report.notes.append(f"{slot.name} is tied in the live model, and stored under another name only")
        else:
            missing.append(name)
    extra = sorted(stored - {name for _, name in matched})
    if missing or extra:
        raise _differ(entry, sorted(missing), extra)
    return matched


def _differ(entry: str, missing: list[str], extra: list[str]) -> CheckpointError:
    sides = (("live model", missing), ("checkpoint", extra))
    say = [f"{len(found)} only in the {side} ({few(found)})" for side, found in sides if found]
    remedy = closest(missing[0], extra) if missing and extra else "build the model it was saved from"
    return CheckpointError(f"entry {entry!r}: tensor names differ: {'; '.join(say)}", remedy)


def _renamed(entry: str, live: set[str], stored: set[str], report: Report) -> dict[str, str]:
    """Live name -> stored name, where taking wrappers or one prefix off makes every stored name a live one."""
    if not stored or stored & live:
        return {}
    for what, short in (("wrappers", _without_wrappers(entry, stored)), ("a prefix", _without_prefix(entry, stored))):
        if len(set(short.values())) == len(short) and set(short.values()) <= live:
            report.notes.append(f"entry {entry!r}: {what} taken off the stored names, such as {min(stored)}")
            return {name: old for old, name in short.items()}
    return {}


def _without_wrappers(entry: str, stored: set[str]) -> dict[str, str]:
    return {name: f"{entry}/{without_wrappers(name.removeprefix(f'{entry}/'))}" for name in stored}


def _without_prefix(entry: str, stored: set[str]) -> dict[str, str]:
    """As Lightning's `model.`: what all names begin with, up to a dot."""
    rests = [name.removeprefix(f"{entry}/") for name in stored]
    first = rests[0].partition(".")[0] + "."
    if not all(rest.startswith(first) for rest in rests):
        return {}
    return {name: f"{entry}/{name.removeprefix(f'{entry}/')[len(first) :]}" for name in stored}
