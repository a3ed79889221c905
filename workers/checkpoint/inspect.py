"""What a checkpoint holds and whether it is sound, without torch: for the server, the agents and the command line.

`follow_links`: links to files, and of a root to checkpoints, are followed, for who asks names a place of their own. Who
reads for others passes False, as tools.py does.
"""

import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import NotFound
from cluster.serialization import to_plain
from workers.checkpoint.disk.damage_marks import damage_reason
from workers.checkpoint.disk.pins import is_pinned
from workers.checkpoint.disk.reader import CheckpointReader, Progress
from workers.checkpoint.format.manifest import NAME, DamagedCheckpoint, Manifest, Producer
from workers.checkpoint.format.manifest_checks import read_manifest, tensor_bytes
from workers.checkpoint.format.step_folders import checkpoints_below, newest_first, step_of
from workers.checkpoint.load_report import SkippedCheckpoint
from workers.checkpoint.move_plan import plan as plan
from workers.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest sound checkpoint, and the newer ones that were passed over."""

    path: Path
    step: int
    skipped: tuple[SkippedCheckpoint, ...] = ()


def describe(path: str | Path, *, follow_links: bool = True) -> dict[str, Any]:
    """A summary of one checkpoint: who saved it, what is in it, how large. Reads the manifest only."""
    folder = checkpoint_folder(path, follow_links)
    manifest = read_manifest(folder, follow_links)
    return {
        "path": str(folder),
        "name": folder.name,
        "step": manifest.step,
        "created": manifest.created,
        "producer": to_plain(manifest.producer),
        "bytes": manifest.size_bytes(),
        "files": len(manifest.files),
        "world": manifest.world.size,
        "pinned": is_pinned(folder),
        "damaged": damage_reason(folder),
        "entries": {name: {"kind": entry.kind, "type": entry.type} for name, entry in manifest.entries.items()},
        **_contents(manifest),
    }


def list_checkpoints(root: str | Path, *, follow_links: bool = True) -> list[dict[str, Any]]:
    """`describe` of every checkpoint below `root`, those of one folder newest first, and `problem`: "" or a sentence.

    A damaged one has only its path, name and step, and nothing for the rest a table shows.
    """
    return [_listed(folder, follow_links) for folder in checkpoints_below(Path(root), follow_links)]


def verify(path: str | Path, progress: Progress | None = None, *, follow_links: bool = True) -> dict[str, Any]:
    """Read every byte: {"path", "step", "ok", "bytes", "chunks", "problems": [sentences]}. Raises NotFound only."""
    folder = checkpoint_folder(path, follow_links)
    try:
        with CheckpointReader(folder, follow_links) as reader:
            problems = [fault.message for fault in reader.faults(progress)]
            size_bytes = reader.manifest.size_bytes()
            chunks = sum(len(file.xxh3_128) for file in reader.manifest.files.values())
            step = reader.manifest.step
    except CheckpointError as e:
        problems, size_bytes, chunks, step = [e.message], 0, 0, step_of(folder)
    return {
        "path": str(folder),
        "step": step,
        "ok": not problems,
        "bytes": size_bytes,
        "chunks": chunks,
        "problems": problems,
    }


def latest(root: str | Path, *, follow_links: bool = True) -> Latest | None:
    """The newest checkpoint below `root` whose manifest and hashes hold; None where there is none at all.

    Raises DamagedCheckpoint where there are some and none holds: to begin from nothing must be somebody's decision.
    """
    skipped: list[SkippedCheckpoint] = []
    for folder in newest_first(Path(root), follow_links):
        found = verify(folder, follow_links=follow_links)
        if found["ok"]:
            return Latest(folder, found["step"], tuple(skipped))
        skipped.append(SkippedCheckpoint(str(folder), found["problems"][0]))
    if skipped:
        raise _none_left(Path(root), [one.reason for one in skipped])
    return None


def newest(root: str | Path, *, follow_links: bool = True) -> dict[str, Any]:
    """The newest checkpoint below `root` whose manifest holds, whose files have their sizes, and which was not found
    damaged before: {"path", "passed_over": [{"path", "reason"}]}. "" where there is none at all. No tensor is read.

    Raises DamagedCheckpoint where there are some and none is left.
    """
    passed_over: list[dict[str, str]] = []
    for folder in newest_first(Path(root), follow_links):
        fault = damage_reason(folder) or outer_fault(folder, follow_links)
        if not fault:
            return {"path": str(folder), "passed_over": passed_over}
        passed_over.append({"path": str(folder), "reason": fault})
    if passed_over:
        raise _none_left(Path(root), [one["reason"] for one in passed_over])
    return {"path": "", "passed_over": []}


def outer_fault(folder: Path, follow_links: bool = False) -> str:
    """What is wrong with a checkpoint that can be known without reading its tensors; "" for nothing."""
    try:
        manifest = read_manifest(folder, follow_links)
        for name, file in manifest.files.items():
            if (found_bytes := (folder / name).stat(follow_symlinks=follow_links).st_size) != file.bytes:
                return f"{folder / name} has {found_bytes} bytes, {file.bytes} were saved"
    except CheckpointError as e:
        return e.message
    except OSError as e:
        return f"{e.filename} cannot be read: {e.strerror}"
    return ""


def _none_left(root: Path, reasons: list[str]) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"none of the {len(reasons)} checkpoints in {root} is sound; the newest: {reasons[0]}",
        "copy one again from its source, or name another folder to begin anew",
    )


def checkpoint_folder(path: str | Path, follow_links: bool = False) -> Path:
    """`path` if it is a checkpoint; of a folder of checkpoints the newest, sound or not. Raises NotFound."""
    folder = Path(path)
    if os.path.lexists(folder / NAME):
        return folder
    if there := newest_first(folder, follow_links):
        return there[0]
    raise NotFound(f"{folder} is no checkpoint: it has no {NAME}", "name a folder step-…, or save one first")


def _listed(folder: Path, follow_links: bool) -> dict[str, Any]:
    try:
        told = describe(folder, follow_links=follow_links)
        return {**told, "problem": told["damaged"]}
    except CheckpointError as e:
        known = {"path": str(folder), "name": folder.name, "step": step_of(folder), "problem": e.message}
        return {**known, "created": "", "producer": to_plain(Producer()), "bytes": 0}


def _contents(manifest: Manifest) -> dict[str, Any]:
    stored = manifest.stored()
    size_bytes: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for tensor in stored.values():
        count[tensor.dtype] += 1
        size_bytes[tensor.dtype] += tensor_bytes(tensor)
    parameters = [tensor for tensor in stored.values() if tensor.role == "parameter"]
    return {
        "tensors": len(stored),
        "parameters": sum(math.prod(tensor.shape) for tensor in parameters),
        "dtypes": {dtype: {"tensors": count[dtype], "bytes": size_bytes[dtype]} for dtype in sorted(count)},
        "roles": dict(Counter(tensor.role for tensor in stored.values())),
        "ties": {name: tensor.alias_of for name, tensor in manifest.tensors.items() if tensor.alias_of},
    }
