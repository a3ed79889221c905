"""Delete checkpoints of a pool in an object store: expired ones after an upload, and older ones on request."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cluster.errors import NotFound, UserError
from workers.checkpoint.disk.pins import HOLD, PIN
from workers.checkpoint.format.manifest import NAME
from workers.checkpoint.format.step_folders import step_of
from workers.checkpoint.transfer.copier import verify_location
from workers.checkpoint.transfer.object_store import open_objects
from workers.checkpoint.transfer.stored_checkpoints import Sizes, objects_of_checkpoints, stored_fault
from workers.checkpoint.transfer.stored_marks import (
    delete_objects,
    is_half_deleted,
    is_protected,
    pin_objects,
    unpin_objects,
)
from workers.checkpoint.transfer.stores import ObjectStore
from workers.errors import CheckpointError

Progress = Callable[[int, int], None]


def pin_stored(path: str, *, remove: bool = False) -> dict[str, Any]:
    """Pin the checkpoint at the URI `path`, so that it is never deleted as an old one, or remove its pin."""
    (unpin_objects if remove else pin_objects)(open_objects(path))
    return {"pinned": not remove}


def retain(root: str, keep: int, newest: str) -> dict[str, Any]:
    """Keep `newest`, which was just uploaded and read back, and the `keep - 1` newest others directly below `root`.

    Pinned ones stay and are not counted. Returns {"deleted": [names]}.
    """
    objects = open_objects(root)
    by_name = _sizes_by_name(objects)
    others = [name for name in _newest_first(by_name) if name != newest]
    is_there = NAME in by_name.get(newest, {})
    expired = _expired(objects, by_name, others, keep, lambda name: True) if is_there else []
    for name in expired + _half_deleted(by_name):
        delete_objects(objects.checkpoints_below(name))
    return {"deleted": expired}


def prune_stored(root: str, keep: int, *, dry_run: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Delete old checkpoints directly below `root`, by the rules of disk/pruner.py, and finish interrupted deletions.

    Returns the result of `prune` there, without "root", and "oldest": the last one that counts, or "". The newest is
    read back before anything is deleted. Raises UserError, NotFound, CheckpointError if none verifies.
    """
    if keep < 1:
        raise UserError(f"keep is {keep}", "keep at least 1 checkpoint")
    objects = open_objects(root)
    by_name = _sizes_by_name(objects)
    names, half_deleted = _newest_first(by_name), _half_deleted(by_name)
    if not names and not half_deleted:
        raise NotFound(f"no checkpoint in {root}", "name the folder that holds the step-… folders")
    newest = next((name for name in names if _is_intact(objects, name, progress)), None)
    if newest is None and names:
        raise CheckpointError(f"none of the {len(names)} checkpoints in {root} is sound: nothing was deleted")
    others = names[names.index(newest) + 1 :] if newest else []
    expired = _expired(objects, by_name, others, keep, lambda name: not stored_fault(objects, name, by_name[name]))
    if not dry_run:
        for name in expired + half_deleted:
            delete_objects(objects.checkpoints_below(name))
    retained = [name for name in names if name not in expired]
    counted = [name for name in retained if not {PIN, HOLD} & set(by_name[name])]
    return {
        "kept": retained,
        "deleted": expired + half_deleted,
        "bytes": sum(sum(by_name[name].values()) for name in expired + half_deleted),
        "dry_run": dry_run,
        "oldest": next(reversed(counted), newest or ""),
    }


def _expired(
    objects: ObjectStore, by_name: dict[str, Sizes], others: Iterable[str], keep: int, is_sound: Callable[[str], bool]
) -> list[str]:
    """Return which of `others` (newest first) `keep` deletes, besides one newer checkpoint that stays."""
    retained, expired = 1, []
    for name in others:
        if is_protected(objects.checkpoints_below(name), by_name[name]):
            continue
        if retained >= keep:
            expired.append(name)
        elif is_sound(name):
            retained += 1
    return expired


def _sizes_by_name(objects: ObjectStore) -> dict[str, Sizes]:
    """Sizes of the objects of each folder step-… directly below `objects`, complete or not."""
    by_name = defaultdict[str, dict[str, int]](dict)
    for folder, name, size_bytes in objects_of_checkpoints(objects):
        if "/" not in folder:
            by_name[folder][name] = size_bytes
    return dict(by_name)


def _newest_first(by_name: dict[str, Sizes]) -> list[str]:
    committed = [name for name, sizes in by_name.items() if NAME in sizes]
    return sorted(committed, key=lambda name: (step_of(Path(name)), name), reverse=True)


def _half_deleted(by_name: dict[str, Sizes]) -> list[str]:
    return sorted(name for name, sizes in by_name.items() if is_half_deleted(sizes))


def _is_intact(objects: ObjectStore, name: str, progress: Progress | None) -> bool:
    try:
        return bool(verify_location(objects.checkpoints_below(name).where, progress)["ok"])
    except CheckpointError:
        return False
