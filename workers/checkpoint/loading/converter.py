"""Copy a checkpoint with every tensor in a dtype that a kind of device computes with natively.

The copy is for tools without a dtype policy. Conversion is streamed: a shard is converted while it is written, and
only a few buffers are in memory.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.catalogue import resolve_kind
from cluster.errors import Conflict
from cluster.serialization import to_plain
from workers.checkpoint.conversion import bits
from workers.checkpoint.conversion.dtype_policy import DtypePolicy
from workers.checkpoint.conversion.load_report import LoadReport
from workers.checkpoint.conversion.target_dtypes import unsupported_dtypes
from workers.checkpoint.disk.commit import write_manifest, writer_lock
from workers.checkpoint.disk.damage_marks import damage_reason
from workers.checkpoint.disk.files import Files
from workers.checkpoint.disk.inspect import checkpoint_folder, size_fault
from workers.checkpoint.disk.layout import SHARD_BYTES, Layout, TensorPiece, lay_out
from workers.checkpoint.disk.reader import CheckpointReader
from workers.checkpoint.disk.retention import PART, remove_checkpoint
from workers.checkpoint.disk.writer import write_shards
from workers.checkpoint.format.dtypes import DTYPES, dtype_name
from workers.checkpoint.format.manifest import NAME, Manifest, Stored, TensorEntry, dump
from workers.checkpoint.format.manifest_checks import read_manifest
from workers.checkpoint.state.load_stage import LoadStage
from workers.errors import CheckpointError

Progress = Callable[[int, int], None]


def convert(
    source: str | Path,
    root: str | Path,
    *,
    to_kind: str = "",
    dtype: "Mapping[Any, Any] | Callable[[str, str], Any] | str" = "native",
    on_lossy: str = "error",
    progress: Progress | None = None,
    files: Files | None = None,
    follow_links: bool = True,
) -> dict[str, Any]:
    """Write a converted copy of `source` below `root`; return its "path" and the report of changes.

    The folder's name has the step and an id derived from the source and the dtypes. The same conversion therefore has
    the same name and is not written twice (`already_there`); other dtypes, or a copy of a copy, get another name.
    `to_kind` ("tpu:v5e") applies with dtype="native"; a mapping or function decides by itself. Random states, numpy
    arrays and values stay as they are. `follow_links`: files of `source` may be links. Raises CheckpointError
    (DamagedCheckpoint, or a loss that `on_lossy` refuses) and UserError for an unknown kind.
    """
    kind = resolve_kind(to_kind) if to_kind else ""
    policy = DtypePolicy(dtype, None, on_lossy, unsupported_dtypes(kind) if kind else None)
    files = files or Files()
    with CheckpointReader(checkpoint_folder(source, follow_links), follow_links) as reader:
        report = LoadReport(str(reader.folder), reader.manifest.step, reader.manifest.producer)
        target_dtypes = {name: _target_dtype(policy, name, entry) for name, entry in reader.manifest.stored().items()}
        converted = _ConvertedTensors(reader, policy, report, target_dtypes)
        reader.verify_chunks(reader.all_chunks(), progress)
        converted.measure()
        policy.check_losses(report)
        folder = Path(root) / _folder_name(reader, target_dtypes)
        exists = os.path.lexists(folder / NAME)
        manifest = _existing_copy(folder, target_dtypes) if exists else converted.write(files, Path(root), folder)
    return {
        "path": str(folder),
        "step": manifest.step,
        "bytes": manifest.size_bytes(),
        "already_there": exists,
        **_report_fields(report),
    }


def _folder_name(reader: CheckpointReader, target_dtypes: dict[str, str]) -> str:
    identity = json.dumps([reader.manifest.digest, sorted(target_dtypes.items())]).encode()
    return f"step-{reader.manifest.step:08}-{hashlib.sha256(identity).hexdigest()[:8]}"


def _existing_copy(folder: Path, target_dtypes: dict[str, str]) -> Manifest:
    """Return the manifest of the same conversion, made earlier. Raises CheckpointError if `folder` is anything else."""
    fault = damage_reason(folder) or size_fault(folder)
    if not fault:
        manifest = read_manifest(folder)
        if target_dtypes == {name: entry.dtype for name, entry in manifest.stored().items()}:
            return manifest
        fault = "it is another checkpoint with that name"
    raise CheckpointError(f"{folder} already exists: {fault}", "name another folder, or delete this one first")


def _target_dtype(policy: DtypePolicy, name: str, entry: TensorEntry) -> str:
    return entry.dtype if entry.role in ("rng", "array") else policy.target_dtype(name, entry, "cpu")


class _ConvertedTensors:
    """Tensors of a checkpoint in other dtypes, converted a few MiB at a time."""

    def __init__(
        self, reader: CheckpointReader, policy: DtypePolicy, report: LoadReport, target_dtypes: dict[str, str]
    ):
        self._reader, self._target_dtypes = reader, target_dtypes
        self._stage = LoadStage(reader, policy, report, torch.device("cpu"))

    def measure(self) -> None:
        """Add to the report what the conversions change. Tensors that keep their dtype are not read."""
        for name, dtype in self._target_dtypes.items():
            self._stage.plan_parts(name, bits.torch_dtype(dtype))
        self._stage.rescale()
        self._stage.count_losses()

    def write(self, files: Files, root: Path, folder: Path) -> Manifest:
        layouts = lay_out([self._piece(name) for name in self._target_dtypes], SHARD_BYTES)
        staging = root / f"{PART}{folder.name}"
        with writer_lock(root):
            if os.path.lexists(folder / NAME):
                raise Conflict(f"another process has just written {folder}", "run it again: it is the same copy")
            if folder.exists():  # left by a conversion that was interrupted before its manifest
                remove_checkpoint(files, folder)
            try:
                files.make_folder(staging)
                shards = write_shards(files, staging, layouts)
                manifest = replace(
                    self._reader.manifest,
                    created=datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
                    files=shards,
                    tensors=self._describe_tensors(layouts),
                )
                files.sync_folder(staging)
                files.rename(staging, folder)
                files.sync_folder(root)
                write_manifest(files, folder, dump(manifest))
            except BaseException:
                for path in (staging, folder):
                    with suppress(OSError):
                        remove_checkpoint(files, path)
                raise
        return manifest

    def _piece(self, name: str) -> TensorPiece:
        entry, dtype = self._reader.entry(name), DTYPES[self._target_dtypes[name]]
        count = int(np.prod(entry.shape, dtype=np.int64))
        shape = entry.shape if dtype.safetensors else (count * dtype.bytes,)
        return TensorPiece(name, dtype.code, shape, count * dtype.bytes, dtype.bytes, partial(self._read, name))

    def _read(self, name: str, start: int, stop: int, out: memoryview) -> None:
        """Write bytes start to stop of the converted tensor into `out`: read their elements and convert them."""
        dtype = bits.torch_dtype(self._target_dtypes[name])
        size = dtype.itemsize
        target = torch.from_numpy(np.frombuffer(out, np.uint8)).view(dtype)
        self._stage.copy_part(name, target, start // size, stop // size)

    def _describe_tensors(self, layouts: list[Layout]) -> dict[str, TensorEntry]:
        locations = {
            piece.key: Stored(layout.file, offset)
            for layout in layouts
            for piece, offset in zip(layout.pieces, layout.offsets, strict=True)
        }
        return {
            name: replace(entry, dtype=self._target_dtypes[name], shards=(locations[name],))
            if name in locations
            else replace(entry, dtype=self._target_dtypes[entry.alias_of] if entry.view else "")
            for name, entry in self._reader.manifest.tensors.items()
        }


def _report_fields(report: LoadReport) -> dict[str, Any]:
    converted = {name: to_plain(tensor) for name, tensor in report.converted().items()}
    return {
        "kept": len(report.tensors) - len(converted),
        "converted": converted,
        "lossy": len(report.lossy()),
        "notes": report.notes,
        "dtypes": sorted({dtype_name(tensor.dtype) for tensor in report.tensors.values()}),
    }
