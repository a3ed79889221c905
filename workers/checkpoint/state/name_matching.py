"""Match stored names with those of a live module, without wrappers that only one side has.

Checkpoints saved by Polyfleet have names without wrappers. An imported one may have those of a compiled, data-parallel,
Lightning or PEFT model, and so may the live model. The report says what was stripped.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from workers.checkpoint.conversion.load_report import LoadReport
from workers.checkpoint.format.manifest import EXTRA_STATE, Manifest
from workers.checkpoint.format.message_text import closest, first_names
from workers.checkpoint.format.wrappers import AmbiguousNamesError, fit
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
    """Match stored tensors and extra states with live ones.
    A tie that the file has only once, as in safetensors, does not need its second name. `saved_extra` and `extra` are
    the prefixes ("" or "layers.0.") of modules with extra state.

    Raises CheckpointError if names are missing or left over, with the nearest name, or match ambiguously.
    """
    stored = [name.removeprefix(f"{entry}/") for name in manifest.module_tensors(entry)]
    stored_extra = {prefix: f"{prefix}{EXTRA_STATE}" for prefix in saved_extra}
    live_names = {slot.name.removeprefix(f"{entry}/"): id(slot.tensor) for slot in slots}
    live_names |= {f"{prefix}{EXTRA_STATE}": -i for i, prefix in enumerate(extra, 1)}
    new_names = _rename_stored(entry, [*stored, *stored_extra.values()], live_names, report)
    stored_names = {f"{entry}/{new}": f"{entry}/{old}" for old, new in new_names.items()}
    prefixes = {prefix: new_names.get(name, name).removesuffix(EXTRA_STATE) for prefix, name in stored_extra.items()}
    return Match(_slots(manifest, report, entry, slots, stored_names), prefixes)


def _slots(
    manifest: Manifest, report: LoadReport, entry: str, slots: list[Slot], names: dict[str, str]
) -> list[tuple[Slot, str]]:
    """Pair slots with stored names. `names` maps live names to stored names, where they differ."""
    stored = set(manifest.module_tensors(entry))
    matched_ids = {id(slot.tensor) for slot in slots if names.get(slot.name, slot.name) in stored}
    pairs, missing = [], []
    for slot in slots:
        name = names.get(slot.name, slot.name)
        if name in stored:
            pairs.append((slot, name))
        elif id(slot.tensor) in matched_ids:
            report.notes.append(f"{slot.name} is tied in the live model, and stored only under another name")
        else:
            missing.append(name)
    extra = sorted(stored - {name for _, name in pairs})
    if missing or extra:
        raise _names_error(entry, sorted(missing), extra)
    return pairs


def _names_error(entry: str, missing: list[str], extra: list[str]) -> CheckpointError:
    sides = (("live model", missing), ("checkpoint", extra))
    differences = [f"{len(names)} only in the {side} ({first_names(names)})" for side, names in sides if names]
    remedy = closest(missing[0], extra) if missing and extra else "build the same model as was saved"
    return CheckpointError(f"entry {entry!r}: tensor names differ: {'; '.join(differences)}", remedy)


def _rename_stored(entry: str, stored: list[str], live_names: dict[str, int], report: LoadReport) -> dict[str, str]:
    """Map stored names to live names without wrappers; {} if not all names match."""
    try:
        result = fit(stored, live_names)
    except AmbiguousNamesError as e:
        raise CheckpointError(
            f"entry {entry!r}: the stored names match the live model more than once: {e}",
            "build the model under the names it was saved with",
        ) from None
    if result is None:
        return {}
    report.notes += [f"entry {entry!r}: {result.stripped}"] * bool(result.stripped)
    return result.names
