"""Save a checkpoint: write to a temporary folder, fsync, rename, manifest last. A crash never damages older ones.

1  .part-step-…/ is created, its shards written and fsynced       readers ignore a folder with that name
2  it is renamed to step-…/ and the root fsynced                  without a manifest it is not a checkpoint yet
3  the manifest is written to a temporary file, fsynced, renamed  the rename commits: only then does it exist
4  checkpoints beyond `keep` are deleted, manifest first          after the new one was read back and verified

With many ranks each rank writes its own shards in step 1, and rank 0 does the rest. Object stores have no rename: all
objects have names never used before, and the manifest, put last, is the commit.
"""

import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from cluster.serialization import from_plain, to_plain
from cluster.version import VERSION as POLYFLEET
from workers.checkpoint.conversion import bits
from workers.checkpoint.disk.files import Files
from workers.checkpoint.disk.layout import SHARD_BYTES, Layout, lay_out
from workers.checkpoint.disk.writer import Arena, Progress
from workers.checkpoint.format.dtypes import FLOATS, dtype_name
from workers.checkpoint.format.manifest import FileEntry, Manifest, Producer, Stored, TensorEntry, World
from workers.checkpoint.saving.commit_guard import check_not_replaced
from workers.checkpoint.saving.destination import Destination, FolderDestination
from workers.checkpoint.saving.rank_group import CheckpointRanks, checkpoint_ranks
from workers.checkpoint.state.capture import Capture, capture
from workers.checkpoint.tensors import sharded
from workers.checkpoint.tensors.pieces import pieces
from workers.errors import CheckpointError, NonFiniteValue

if TYPE_CHECKING:
    from workers.checkpoint.saving.background_saver import SaveInProgress

Part = tuple[dict[str, FileEntry], dict[str, TensorEntry]]
_WRITE_REMEDY = "free disk space, or check the folder's permissions"

NAN_CHECKED_ROLES = ("parameter", "optimizer", "master")
"""Roles that must not be NaN. Buffers may contain anything: masks are infinite, uninitialized memory is arbitrary."""
NAN_CHECKED_DTYPES = (*FLOATS, "complex64", "complex128")
NAN_CHECK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Saved:
    """Result of a save. `path` is a Path, or a string for a URI.
    `notes` lists what could not be cleaned up: the checkpoint itself is complete. `blocked_s` is how long the caller
    was blocked, `seconds` how long until all was durable.
    """

    path: "Path | Any"
    step: int
    bytes: int
    seconds: float
    notes: tuple[str, ...] = ()
    blocked_s: float = 0.0


class PreparedSave:
    """A checkpoint whose content is fixed: named, described, laid out. `arena` has a copy, if one was made."""

    def __init__(
        self, to: Destination, step: int, state: Mapping[str, Any], producer: Producer, ranks: CheckpointRanks
    ):
        self.ranks = ranks
        contents = capture(state)
        self.notes = tuple(contents.notes)
        tensors = _own_tensors(contents, ranks)
        self.bytes = sum(tensor.nbytes for tensor in tensors.values())
        stem = "shard-{:05d}" if ranks.size == 1 else f"shard-r{ranks.rank:05d}-{{:05d}}"
        self.layouts = lay_out(pieces(tensors), SHARD_BYTES, f"{stem}.safetensors")
        self.tensors = _describe(contents, self.layouts)
        self.manifest = Manifest(step, "", producer, {}, {}, contents.entries, _world(contents, ranks))
        self.to = to
        self.arena: Arena | None = None

    def snapshot(self, arena: Arena) -> None:
        """Copy the tensors into `arena`; afterwards the live tensors may change."""
        arena.copy_shards(self.layouts)
        self.arena = arena


@overload
def save(
    root: str | os.PathLike[str],
    step: int,
    state: Mapping[str, Any],
    *,
    keep: int | None = None,
    attempt: str | None = None,
    kind: str = "",
    asynchronous: Literal[False] = False,
    progress: Progress | None = None,
    files: Files | None = None,
) -> Saved: ...


@overload
def save(
    root: str | os.PathLike[str],
    step: int,
    state: Mapping[str, Any],
    *,
    keep: int | None = None,
    attempt: str | None = None,
    kind: str = "",
    asynchronous: Literal[True],
    progress: Progress | None = None,
    files: Files | None = None,
) -> "SaveInProgress": ...


def save(
    root: str | os.PathLike[str],
    step: int,
    state: Mapping[str, Any],
    *,
    keep: int | None = None,
    attempt: str | None = None,
    kind: str = "",
    asynchronous: bool = False,
    progress: Progress | None = None,
    files: Files | None = None,
) -> "Saved | SaveInProgress":
    """Write a checkpoint of `state` below `root` and return a Saved once it is durable.
    With `asynchronous`, return a SaveInProgress once the state has been copied. A save that is still being written is
    waited for first, and its error is raised here.

    An entry of `state` is a module, an optimizer, anything with state_dict and load_state_dict, nested values and
    tensors, or `"rng": True`. `keep` is the number of newest checkpoints to retain, not counting pinned ones. `attempt`
    is `job.epoch`: an attempt older than one that saved here is refused. `kind` is the device kind. If any tensor is a
    DTensor, every rank must call this, with the same `root` on a shared file system. `root` may be the URI of an object
    store. Raises CheckpointError; then `root` is as it was.
    """
    if asynchronous:
        from workers.checkpoint.saving.background_saver import SHARED

        return SHARED.save(root, step, state, keep=keep, attempt=attempt, kind=kind, progress=progress, files=files)
    prepared = prepare(root, step, state, keep=keep, attempt=attempt, kind=kind, files=files)
    saved = write(prepared, keep, progress)
    return replace(saved, blocked_s=saved.seconds)


def prepare(
    root: "str | os.PathLike[str]",
    step: int,
    state: Mapping[str, Any],
    *,
    keep: int | None,
    attempt: str | None,
    kind: str,
    files: Files | None,
) -> PreparedSave:
    """Check and lay out a checkpoint before anything is written. Raises CheckpointError, on every rank."""
    _check_arguments(step, keep)
    producer = producer_of(attempt, kind)
    ranks = checkpoint_ranks(state)
    name = ranks.from_first(f"step-{step:08d}-{os.urandom(4).hex()}")
    to = destination(root, name, files or Files())
    ranks.run_on_first(lambda: to.check_attempt(producer))
    return ranks.check_all_ranks(lambda: PreparedSave(to, step, state, producer, ranks))


def destination(root: "str | os.PathLike[str]", name: str, files: Files) -> Destination:
    """Return a folder of this machine, or an object store for a URI."""
    if "://" not in str(root):
        return FolderDestination(Path(root), name, files)
    from workers.checkpoint.transfer.object_store import ObjectStoreDestination

    return ObjectStoreDestination(str(root), name)


def write(prepared: PreparedSave, keep: int | None, progress: Progress | None) -> Saved:
    """Write and commit. On failure, remove what was written of this checkpoint and raise CheckpointError."""
    started_s, to, ranks = time.perf_counter(), prepared.to, prepared.ranks
    try:
        with to.lock() if ranks.first else nullcontext():
            manifest = _write(prepared, progress)
            notes = _retain(to, keep) if ranks.first and keep is not None else ()
    except OSError as e:
        step = prepared.manifest.step
        raise CheckpointError(f"cannot save step {step} in {to.root}: {e.strerror or e}", _WRITE_REMEDY) from e
    seconds = time.perf_counter() - started_s
    return Saved(to.path, manifest.step, manifest.size_bytes(), seconds, (*prepared.notes, *notes))


def _retain(to: Destination, keep: int) -> tuple[str, ...]:
    """Delete older checkpoints, unless this attempt was replaced while it saved. The new one is already complete."""
    try:
        check_not_replaced()
    except CheckpointError as e:
        return (f"nothing older was deleted: {e.message}",)
    return to.apply_retention(keep)


def _write(prepared: PreparedSave, progress: Progress | None) -> Manifest:
    to, ranks, manifest = prepared.to, prepared.ranks, prepared.manifest
    try:
        ranks.run_on_first(lambda: to.begin_save(manifest.step, prepared.bytes * ranks.size, manifest.producer))
        shards = ranks.check_all_ranks(lambda: to.put(prepared.layouts, prepared.arena, progress))
        parts = _gather_parts(ranks, shards, prepared.tensors)
        return ranks.run_on_first(lambda: _commit(prepared, parts)) or manifest
    except BaseException:
        if ranks.first:
            to.abort_save()
        raise


def _gather_parts(ranks: CheckpointRanks, shards: dict[str, FileEntry], tensors: dict[str, TensorEntry]) -> list[Part]:
    """Exchange between all ranks which files and tensors each one wrote."""
    if ranks.size == 1:
        return [(shards, tensors)]
    own = [{name: to_plain(entry) for name, entry in part.items()} for part in (shards, tensors)]
    return [
        (from_plain(dict[str, FileEntry], files), from_plain(dict[str, TensorEntry], entries))
        for files, entries in ranks.gather(own)
    ]


def _commit(prepared: PreparedSave, parts: "list[Part]") -> Manifest:
    created = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    shards = {name: entry for part, _ in parts for name, entry in part.items()}
    tensors = _join_tensors([tensors for _, tensors in parts])
    manifest = replace(prepared.manifest, created=created, files=shards, tensors=tensors)
    check_not_replaced()
    prepared.to.commit(manifest)
    return manifest


def _own_tensors(contents: Capture, ranks: CheckpointRanks) -> dict[str, torch.Tensor]:
    """Tensors that this rank writes: its parts of sharded tensors, and on rank 0 all others."""
    tensors = {}
    for name, tensor in contents.own_tensors().items():
        if not sharded.is_sharded(tensor):
            if ranks.first:
                tensors[name] = tensor
        elif sharded.is_written_here(tensor, name) and (sharded.local_part(tensor).numel() or not tensor.numel()):
            tensors[name] = sharded.local_part(tensor)
    return tensors


def _describe(contents: Capture, layouts: list[Layout]) -> dict[str, TensorEntry]:
    """Entries of all tensors in the order of the state; those that another rank writes have no shard yet."""
    locations = {
        piece.key: Stored(layout.file, offset)
        for layout in layouts
        for piece, offset in zip(layout.pieces, layout.offsets, strict=True)
    }
    entries = {name: _entry(contents, name, locations.get(name)) for name in contents.tensors}
    return entries | {name: TensorEntry(role, alias_of=stored) for name, (stored, role) in contents.ties.items()}


def _entry(contents: Capture, name: str, location: Stored | None) -> TensorEntry:
    tensor = contents.tensors[name]
    box = sharded.box_of(tensor) if location else None
    location = replace(location, start=box.start, shape=box.shape) if location and box else location
    base, view = contents.views.get(name, ("", None))
    return TensorEntry(
        role=contents.roles[name],
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        shards=(location,) if location else (),
        device=str(tensor.device),
        layout=() if view or sharded.is_sharded(tensor) else bits.memory_order(tensor),
        scale=contents.scales.get(name, ""),
        alias_of=base,
        view=view,
    )


def _join_tensors(parts: list[dict[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Merge the tensor entries of all ranks: the same tensors, with the shards of each rank."""
    return {
        name: replace(entry, shards=tuple(s for part in parts if name in part for s in part[name].shards))
        for name, entry in parts[0].items()
    }


def _world(contents: Capture, ranks: CheckpointRanks) -> World:
    sharded_tensor = next((tensor for tensor in contents.tensors.values() if sharded.is_sharded(tensor)), None)
    return World(ranks.size, *(sharded.mesh_of(sharded_tensor) if sharded_tensor is not None else ()))


def producer_of(attempt: str | None, kind: str) -> Producer:
    job, _, epoch = (attempt or "").rpartition(".")
    if attempt and not (job and epoch.isdecimal()):
        raise CheckpointError(f"attempt is {attempt!r}", "give it as job.epoch, such as mnist-1a2b3c.2")
    return Producer(POLYFLEET, torch.__version__, kind.partition(":")[0], kind, job, int(epoch or 0))


def _check_arguments(step: int, keep: int | None) -> None:
    if type(step) is not int or not 0 <= step < 10**15:
        raise CheckpointError(f"step is {step!r}", "give an integer of at least 0")
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep is {keep}", "keep at least 1 checkpoint, or None for all")


def check_no_nan(prepared: PreparedSave) -> None:
    """Check the copy in memory of a save. Raises NonFiniteValue for the first parameter or optimizer state with NaN."""
    if prepared.arena is None:
        return
    for layout in prepared.layouts:
        for piece, offset in zip(layout.pieces, layout.offsets, strict=True):
            entry = prepared.tensors[piece.key]
            if entry.role in NAN_CHECKED_ROLES and entry.dtype in NAN_CHECKED_DTYPES and piece.bytes:
                data = prepared.arena.piece(layout, offset, piece.bytes)
                if _has_nan(data, getattr(torch, entry.dtype)):
                    raise NonFiniteValue(
                        f"{entry.role} {piece.key} of the checkpoint contains NaN", prepared.manifest.step
                    )


def _has_nan(data: memoryview, dtype: torch.dtype) -> bool:
    """Check for NaN, first by the sum, which is faster. Infinities of both signs also add up to NaN."""
    tensor = torch.frombuffer(data, dtype=dtype)
    for part in torch.split(tensor, NAN_CHECK_BYTES // dtype.itemsize):
        values = part.float() if dtype.itemsize == 1 else part
        if torch.isnan(values.sum()) and torch.isnan(values).any():
            return True
    return False
