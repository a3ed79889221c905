"""Checkpoints of a pool below a prefix of an object store: list them, and download one to a folder.

A pool's nodes save on their own disk and upload; see workers/storage/checkpoint_mirror.py.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from cluster.errors import NotFound
from cluster.input.checkpoint_location import path_error
from cluster.serialization import to_plain
from workers.checkpoint.disk.damage_marks import damage_reason
from workers.checkpoint.disk.files import Files
from workers.checkpoint.disk.inspect import summarize
from workers.checkpoint.disk.pins import PIN
from workers.checkpoint.disk.retention import remove_checkpoint
from workers.checkpoint.format.manifest import FOLDER, NAME, Manifest, Producer
from workers.checkpoint.format.manifest_checks import parse_manifest
from workers.checkpoint.format.step_folders import is_committed, step_of
from workers.checkpoint.transfer.copier import copy
from workers.checkpoint.transfer.object_store import open_objects
from workers.checkpoint.transfer.stored_marks import hold_objects
from workers.checkpoint.transfer.stores import ObjectStore, manifest_text
from workers.errors import CheckpointError

Progress = Callable[[int, int], None]
Sizes = Mapping[str, int]


def stored(root: str, described: Collection[str] = ()) -> dict[str, Any]:
    """List the committed checkpoints below the URI `root`: {"paths", "pinned", "rows"}, with paths relative to it.

    `pinned` are those of `paths` that are pinned. `rows` has a row as of `list_checkpoints` for each that is not in
    `described`. Only manifests and sizes are read.
    Raises FleetError if the store does not respond, UserError if it refuses.
    """
    objects, by_folder = open_objects(root), defaultdict[str, dict[str, int]](dict)
    for folder, name, size_bytes in objects_of_checkpoints(objects):
        by_folder[folder][name] = size_bytes
    committed = {folder: sizes for folder, sizes in sorted(by_folder.items()) if NAME in sizes}
    rows = [_row(objects, folder, sizes) for folder, sizes in committed.items() if folder not in set(described)]
    pinned = [folder for folder, sizes in committed.items() if PIN in sizes]
    return {"paths": list(committed), "pinned": pinned, "rows": rows}


def stage(source: str, target: str, progress: Progress | None = None) -> dict[str, Any]:
    """Copy the checkpoint at the URI `source` into the folder `target`, unless a sound one is there.

    Returns {"target", "transferred_bytes", "already_there"}. A local copy that is marked as damaged is replaced.
    """
    final = Path(target) / PurePosixPath(source).name
    if is_committed(final) and not damage_reason(final):
        return {"target": str(final), "transferred_bytes": 0, "already_there": True}
    if is_committed(final):
        remove_checkpoint(Files(), final)
    with hold_objects(open_objects(source), progress) as renew:
        copied = copy(source, target, progress=renew, follow_links=False)
    return {key: copied[key] for key in ("target", "transferred_bytes", "already_there")}


def objects_of_checkpoints(objects: ObjectStore) -> Iterator[tuple[str, str, int]]:
    """Yield (folder relative to `objects`, name, bytes) of each object directly in a step folder.

    Anybody with access may have written there: names that are no valid paths are left out.
    """
    prefix = f"{objects.path}/"
    with suppress(NotFound):  # nothing was uploaded yet
        for path, properties in objects.find():
            relative = path.removeprefix(prefix)
            folder, _, name = relative.rpartition("/")
            if path.startswith(prefix) and not path_error(relative) and FOLDER.fullmatch(PurePosixPath(folder).name):
                yield folder, name, int(properties.get("size") or 0)


def stored_fault(objects: ObjectStore, folder: str, sizes: Sizes) -> str:
    """Return why the manifest or the sizes of a checkpoint's objects are not as it was saved; "" if they are."""
    return str(_row(objects, folder, sizes)["problem"])


def _row(objects: ObjectStore, folder: str, sizes: Sizes) -> dict[str, Any]:
    checkpoint = objects.checkpoints_below(folder)
    location = {"path": folder, "name": PurePosixPath(folder).name}
    try:
        manifest = parse_manifest(manifest_text(checkpoint), f"{checkpoint.where}/{NAME}")
    except CheckpointError as e:
        unknown = {"step": step_of(Path(folder)), "created": "", "producer": to_plain(Producer()), "bytes": 0}
        return {**location, **unknown, "problem": e.message}
    fault = _size_fault(checkpoint, manifest, sizes)
    return {**location, **summarize(manifest), "pinned": False, "damaged": fault, "problem": fault}


def _size_fault(checkpoint: ObjectStore, manifest: Manifest, sizes: Sizes) -> str:
    for name, file in manifest.files.items():
        if sizes.get(name) != file.bytes:
            return f"{checkpoint.where}/{name} has {sizes.get(name, 0)} bytes, {file.bytes} were saved"
    return ""
