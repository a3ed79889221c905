"""Which stored name is which place of a live module: the same, or the same past wrappers that only one side has.

A checkpoint of ours has clean names. One that was imported may have those of a compiled, data-parallel, Lightning or
PEFT model, and so may the live model. The report says what was stripped.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from workers.checkpoint.format.manifest import EXTRA_STATE, Manifest
from workers.checkpoint.format.message_text import closest, first_names
from workers.checkpoint.format.wrappers import AmbiguousNamesError, fit
from workers.checkpoint.load_report import LoadReport
from workers.checkpoint.state.names import Slot
from workers.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Match:
    """Each live slot with its stored name. `extra`: stored prefix of an extra state -> that of the live module."""

    slots: list[tuple[Slot, str]]
    extra: dict[str, str]


def match(
    manifest: Manifest,
    report: LoadReport,
    entry: str,
    slots: list[Slot],
    saved_extra: Iterable[str],
    extra: Iterable[str],
) -> Match:
    """A tie that the file has once, as safetensors does, needs no name of its own. `saved_extra` and `extra` are the
    prefixes ("" or "layers.0.") of modules with extra state.

    Raises CheckpointError where names are missing or left over, with the nearest, or fit in more than one way.
    """
    stored = [name.removeprefix(f"{entry}/") for name in manifest.own(entry)]
    stored_extra = {prefix: f"{prefix}{EXTRA_STATE}" for prefix in saved_extra}
    places = {slot.name.removeprefix(f"{entry}/"): id(slot.tensor) for slot in slots}
    places |= {f"{prefix}{EXTRA_STATE}": -i for i, prefix in enumerate(extra, 1)}
    renamed = _renamed(entry, [*stored, *stored_extra.values()], places, report)
    live = {f"{entry}/{new}": f"{entry}/{old}" for old, new in renamed.items()}
    prefixes = {prefix: renamed.get(name, name).removesuffix(EXTRA_STATE) for prefix, name in stored_extra.items()}
    return Match(_slots(manifest, report, entry, slots, live), prefixes)


def _slots(
    manifest: Manifest, report: LoadReport, entry: str, slots: list[Slot], names: dict[str, str]
) -> list[tuple[Slot, str]]:
    """`names`: live name -> stored name, where they differ."""
    stored = set(manifest.own(entry))
    there = {id(slot.tensor) for slot in slots if names.get(slot.name, slot.name) in stored}
    matched, missing = [], []
    for slot in slots:
        name = names.get(slot.name, slot.name)
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
    say = [f"{len(found)} only in the {side} ({first_names(found)})" for side, found in sides if found]
    remedy = closest(missing[0], extra) if missing and extra else "build the model it was saved from"
    return CheckpointError(f"entry {entry!r}: tensor names differ: {'; '.join(say)}", remedy)


def _renamed(entry: str, stored: list[str], places: dict[str, int], report: LoadReport) -> dict[str, str]:
    """Stored name -> live name, past wrappers; {} where not all names fit."""
    try:
        found = fit(stored, places)
    except AmbiguousNamesError as e:
        raise CheckpointError(
            f"entry {entry!r}: the stored names fit the live model in more than one way: {e}",
            "build the model under the names it was saved with",
        ) from None
    if found is None:
        return {}
    report.notes += [f"entry {entry!r}: {found.stripped}"] * bool(found.stripped)
    return found.names
