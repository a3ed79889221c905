"""Save: write aside, fsync, rename, manifest last. A crash at any point leaves the old, or the old and the new.

1  .part-step-…/ is made and its shards written and fsynced      nobody looks at a folder of that name
2  it is renamed to step-…/ and the root fsynced                 without a manifest it is not a checkpoint yet
3  the manifest is written beside, fsynced, renamed, fsynced     the rename is the commit: before it old, after it new
4  older checkpoints beyond `keep` go, manifest first            only now, and never the one just written
"""

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from cluster.version import VERSION as POLYFLEET
from workers.checkpoint import bits, manifest
from workers.checkpoint.capture import Capture, capture
from workers.checkpoint.dtypes import DTYPES, dtype_name
from workers.checkpoint.files import Files
from workers.checkpoint.manifest import FileEntry, Manifest, Producer, TensorEntry
from workers.checkpoint.retention import PART, refuse_older_attempt, remove_checkpoint, retain
from workers.checkpoint.shards import SHARD_BYTES, Blob, split, write_shard
from workers.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Saved:
    """`notes` has what could not be tidied away: the checkpoint itself is complete."""

    path: Path
    step: int
    bytes: int
    seconds: float
    notes: tuple[str, ...] = ()


def save(
    root: str | os.PathLike[str],
    step: int,
    state: Mapping[str, Any],
    *,
    keep: int | None = None,
    attempt: str | None = None,
    kind: str = "",
    files: Files | None = None,
) -> Saved:
    """Write a checkpoint of `state` below `root` and return once it is durable.

    An entry of `state` is a module, an optimizer, anything with state_dict and load_state_dict, nested values and
    tensors, or `"rng": True`. `keep` retains that many newest checkpoints. `attempt` is `job.epoch`: an attempt older
    than one that saved here is refused. `kind` is the device kind. Raises CheckpointError; then `root` is as it was.
    """
    started_s = time.perf_counter()
    _check_arguments(step, keep)
    producer = _producer(attempt, kind)
    held = capture(state)
    writer = _Writer(Path(root), step, files or Files())
    try:
        writer.root.mkdir(parents=True, exist_ok=True)
        _check_space(writer.root, step, held)
        refuse_older_attempt(writer.root, producer)
        described = writer.write(held, producer)
    except OSError as e:
        raise CheckpointError(
            f"cannot save step {step} in {root}: {e.strerror or e}",
            "free disk space, or check the folder's permissions",
        ) from e
    notes = () if keep is None else retain(writer.files, writer.root, keep, newest=writer.folder)
    return Saved(writer.folder, step, described.size_bytes(), time.perf_counter() - started_s, notes)


class _Writer:
    """One checkpoint being written."""

    def __init__(self, root: Path, step: int, files: Files):
        name = f"step-{step:08d}-{os.urandom(4).hex()}"
        self.root = root
        self.step = step
        self.files = files
        self.folder = root / name
        self.aside = root / f"{PART}{name}"

    def write(self, held: Capture, producer: Producer) -> Manifest:
        """Raises OSError, with nothing of this checkpoint left behind."""
        try:
            self.files.make_folder(self.aside)
            described = self._write_shards(held, producer)
            self.files.sync_folder(self.aside)
            self.files.rename(self.aside, self.folder)
            self.files.sync_folder(self.root)
            self._commit(described)
        except BaseException:
            for folder in (self.aside, self.folder):
                with suppress(OSError):  # the first error is the one to tell
                    remove_checkpoint(self.files, folder)
            raise
        return described

    def _write_shards(self, held: Capture, producer: Producer) -> Manifest:
        tensors = bits.to_cpu(held.tensors)
        blobs = (_blob(name, tensor) for name, tensor in tensors.items())
        shards: dict[str, FileEntry] = {}
        entries: dict[str, TensorEntry] = {}
        for number, shard in enumerate(split(blobs, SHARD_BYTES), start=1):
            file = f"shard-{number:05d}.safetensors"
            shards[file], offsets = write_shard(self.files, self.aside / file, shard)
            for blob in shard:
                entries[blob.name] = _describe(held, tensors, blob.name, file, offsets[blob.name])
        entries |= {name: TensorEntry(role, alias_of=stored) for name, (stored, role) in held.ties.items()}
        created = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        return Manifest(self.step, created, producer, shards, entries, held.entries)

    def _commit(self, described: Manifest) -> None:
        part = self.folder / f".{manifest.NAME}.part"
        file = self.files.create(part)
        try:
            self.files.write(file, manifest.dump(described))
            self.files.close_durably(file)
        finally:
            file.close()
        self.files.rename(part, self.folder / manifest.NAME)
        self.files.sync_folder(self.folder)


def _blob(name: str, tensor: torch.Tensor) -> Blob:
    dtype = DTYPES[dtype_name(tensor.dtype)]
    data = bits.to_bytes(tensor)
    return Blob(name, dtype.code, tuple(tensor.shape) if dtype.safetensors else (len(data),), data)


def _describe(held: Capture, tensors: dict[str, torch.Tensor], name: str, file: str, offset: int) -> TensorEntry:
    live, tensor = held.tensors[name], tensors[name]
    return TensorEntry(
        role=held.roles[name],
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        file=file,
        offset=offset,
        device=str(live.device),
        layout=bits.memory_order(tensor),
    )


def _producer(attempt: str | None, kind: str) -> Producer:
    job, _, epoch = (attempt or "").rpartition(".")
    if attempt and not (job and epoch.isdecimal()):
        raise CheckpointError(f"attempt is {attempt!r}", "give it as job.epoch, such as mnist-1a2b3c.2")
    return Producer(POLYFLEET, torch.__version__, kind.partition(":")[0], kind, job, int(epoch or 0))


def _check_space(root: Path, step: int, held: Capture) -> None:
    needed_bytes = sum(tensor.nbytes for tensor in held.tensors.values())
    free_bytes = shutil.disk_usage(root).free
    if needed_bytes > free_bytes:
        raise CheckpointError(
            f"step {step} needs {needed_bytes / 2**30:.2f} GiB, {root} has {free_bytes / 2**30:.2f} free",
            "free disk space, or keep fewer checkpoints",
        )


def _check_arguments(step: int, keep: int | None) -> None:
    if type(step) is not int or not 0 <= step < 10**15:
        raise CheckpointError(f"step is {step!r}", "give a whole number from 0 on")
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep is {keep}", "keep at least 1 checkpoint, or None for all")
