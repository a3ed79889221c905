"""Describe, list and verify checkpoints without torch, for the server, the agents and the command line.

`follow_links` (default: True): links to files, and links from a root to checkpoints, are followed, because callers name
a path of their own. Callers that read on behalf of others pass False, as tools.py does.
"""

import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import NotFound
from cluster.serialization import to_plain
from workers.checkpoint.conversion.load_report import SkippedCheckpoint
from workers.checkpoint.disk.damage_marks import damage_reason
from workers.checkpoint.disk.pins import is_pinned
from workers.checkpoint.disk.reader import CheckpointReader, Progress
from workers.checkpoint.format.manifest import NAME, DamagedCheckpoint, Manifest, Producer
from workers.checkpoint.format.manifest_checks import read_manifest, tensor_bytes
from workers.checkpoint.format.step_folders import checkpoints_below, newest_first, step_of
from workers.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest sound checkpoint, and the newer damaged ones that were skipped."""

    path: Path
    step: int
    skipped: tuple[SkippedCheckpoint, ...] = ()


def describe(path: str | Path, *, follow_links: bool = True) -> dict[str, Any]:
    """Summarize one checkpoint: producer, contents, size. Reads the manifest only."""
    folder = checkpoint_folder(path, follow_links)
    manifest = read_manifest(folder, follow_links)
    return {
        "path": str(folder),
        "name": folder.name,
        **summarize(manifest),
        "pinned": is_pinned(folder),
        "damaged": damage_reason(folder),
    }


def summarize(manifest: Manifest) -> dict[str, Any]:
    """Summarize what a manifest says: producer, contents, size."""
    return {
        "step": manifest.step,
        "created": manifest.created,
        "producer": to_plain(manifest.producer),
        "bytes": manifest.size_bytes(),
        "files": len(manifest.files),
        "world": manifest.world.size,
        "entries": {name: {"kind": entry.kind, "type": entry.type} for name, entry in manifest.entries.items()},
        **_contents(manifest),
    }


def list_checkpoints(root: str | Path, *, follow_links: bool = True) -> list[dict[str, Any]]:
    """`describe` all checkpoints below `root`, newest first per folder, with `problem`: "" or a sentence.

    A damaged checkpoint has only its path, name and step; the other columns of a table are empty.
    """
    return [_list_row(folder, follow_links) for folder in checkpoints_below(Path(root), follow_links)]


def verify(path: str | Path, progress: Progress | None = None, *, follow_links: bool = True) -> dict[str, Any]:
    """Read every byte: {"path", "step", "ok", "bytes", "chunks", "problems": [sentences]}. Raises only NotFound."""
    folder = checkpoint_folder(path, follow_links)
    try:
        with CheckpointReader(folder, follow_links) as reader:
            problems = [fault.message for fault in reader.damaged_chunks(progress)]
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
    """Return the newest sound checkpoint below `root` (all hashes verified), or None if there is none.

    Raises DamagedCheckpoint if there are checkpoints and all are damaged: starting over must be the user's decision.
    """
    skipped: list[SkippedCheckpoint] = []
    for folder in newest_first(Path(root), follow_links):
        result = verify(folder, follow_links=follow_links)
        if result["ok"]:
            return Latest(folder, result["step"], tuple(skipped))
        skipped.append(SkippedCheckpoint(str(folder), result["problems"][0]))
    if skipped:
        raise _none_left(Path(root), [checkpoint.reason for checkpoint in skipped])
    return None


def newest(root: str | Path, *, follow_links: bool = True) -> dict[str, Any]:
    """Return the newest checkpoint below `root` that is not marked as damaged and has a valid manifest.

    The result is {"path", "passed_over": [{"path", "reason"}]}, with path "" if there is no checkpoint. File sizes are
    checked; tensors are not read. Raises DamagedCheckpoint if there are checkpoints and all are damaged.
    """
    passed_over: list[dict[str, str]] = []
    for folder in newest_first(Path(root), follow_links):
        fault = damage_reason(folder) or size_fault(folder, follow_links)
        if not fault:
            return {"path": str(folder), "passed_over": passed_over}
        passed_over.append({"path": str(folder), "reason": fault})
    if passed_over:
        raise _none_left(Path(root), [checkpoint["reason"] for checkpoint in passed_over])
    return {"path": "", "passed_over": []}


def size_fault(folder: Path, follow_links: bool = False) -> str:
    """Return what is wrong with a checkpoint, as far as manifest and file sizes show; "" for nothing."""
    try:
        manifest = read_manifest(folder, follow_links)
        for name, file in manifest.files.items():
            if (actual_bytes := (folder / name).stat(follow_symlinks=follow_links).st_size) != file.bytes:
                return f"{folder / name} has {actual_bytes} bytes, {file.bytes} were saved"
    except CheckpointError as e:
        return e.message
    except OSError as e:
        return f"{e.filename} cannot be read: {e.strerror}"
    return ""


def _none_left(root: Path, reasons: list[str]) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"none of the {len(reasons)} checkpoints in {root} is sound; the newest: {reasons[0]}",
        "copy one again from its source, or name another folder to start from step 0",
    )


def checkpoint_folder(path: str | Path, follow_links: bool = False) -> Path:
    """Return `path` if it is a checkpoint, else the newest checkpoint in it, sound or not. Raises NotFound."""
    folder = Path(path)
    if os.path.lexists(folder / NAME):
        return folder
    if folders := newest_first(folder, follow_links):
        return folders[0]
    raise NotFound(f"{folder} is not a checkpoint: it has no {NAME}", "name a step-… folder, or save one first")


def _list_row(folder: Path, follow_links: bool) -> dict[str, Any]:
    try:
        summary = describe(folder, follow_links=follow_links)
        return {**summary, "problem": summary["damaged"]}
    except CheckpointError as e:
        location = {"path": str(folder), "name": folder.name, "step": step_of(folder), "problem": e.message}
        return {**location, "created": "", "producer": to_plain(Producer()), "bytes": 0}


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
