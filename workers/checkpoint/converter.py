"""A normalised copy: every tensor in the dtype a kind of device computes with natively, ready for tools that know no
policy. Streamed: a shard is converted while it is written, and nothing is held but a few buffers.
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

from cluster.catalogue import require_known_kind
from cluster.errors import Conflict
from cluster.serialization import to_plain
from workers.checkpoint.disk.commit import write_manifest
from workers.checkpoint.disk.damage_marks import damage_reason
from workers.checkpoint.disk.files import Files
from workers.checkpoint.disk.layout import SHARD_BYTES, Layout, TensorPiece, lay_out
from workers.checkpoint.disk.reader import CheckpointReader
from workers.checkpoint.disk.retention import PART, remove_checkpoint
from workers.checkpoint.disk.writer import write_shards
from workers.checkpoint.disk.writer_lock import writer_lock
from workers.checkpoint.dtype_policy import DtypePolicy
from workers.checkpoint.format.dtypes import DTYPES, dtype_name
from workers.checkpoint.format.manifest import NAME, Manifest, Stored, TensorEntry
from workers.checkpoint.format.manifest_checks import read_manifest
from workers.checkpoint.inspect import checkpoint_folder, outer_fault
from workers.checkpoint.load_report import LoadReport
from workers.checkpoint.state import bits
from workers.checkpoint.state.load_stage import LoadStage
from workers.checkpoint.target_dtypes import unsupported_dtypes
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
    """Write a copy of checkpoint `source` below `root` and answer with the report of what changed, and its "path".

    Its name has the step, and an id that follows from the source and the dtypes: asked for again, it is the same copy,
    which is not written twice (`already_there`), and the copy of a copy, or one in other dtypes, has another name.
    `to_kind` ("tpu:v5e") decides with dtype="native"; a mapping or function decides by itself. Random states, numpy
    arrays and values stay as they are. `follow_links`: files of `source` may be links. Raises CheckpointError:
    DamagedCheckpoint, or a loss that `on_lossy` refuses; UserError for a kind that nobody lists.
    """
    kind = require_known_kind(to_kind) if to_kind else ""
    policy = DtypePolicy(dtype, None, on_lossy, unsupported_dtypes(kind) if kind else None)
    files = files or Files()
    with CheckpointReader(checkpoint_folder(source, follow_links), follow_links) as reader:
        report = LoadReport(str(reader.folder), reader.manifest.step, reader.manifest.producer)
        wanted = {name: _wanted(policy, name, entry) for name, entry in reader.manifest.stored().items()}
        made = _Converted(reader, policy, report, wanted)
        reader.prove(reader.all_chunks(), progress)
        made.measure()
        policy.judge(report)
        folder = Path(root) / _name(reader, wanted)
        there = os.path.lexists(folder / NAME)
        described = _found(folder, wanted) if there else made.write(files, Path(root), folder, kind)
    return {
        "path": str(folder),
        "step": described.step,
        "bytes": described.size_bytes(),
        "already_there": there,
        **_told(report),
    }


def _name(reader: CheckpointReader, wanted: dict[str, str]) -> str:
    asked = json.dumps([reader.manifest.digest, sorted(wanted.items())]).encode()
    return f"step-{reader.manifest.step:08}-{hashlib.sha256(asked).hexdigest()[:8]}"


def _found(folder: Path, wanted: dict[str, str]) -> Manifest:
    """The same conversion, done before. Raises CheckpointError where something else is there."""
    fault = damage_reason(folder) or outer_fault(folder)
    if not fault:
        there = read_manifest(folder)
        if wanted == {name: entry.dtype for name, entry in there.stored().items()}:
            return there
        fault = "it is another checkpoint of that name"
    raise CheckpointError(f"{folder} is already there: {fault}", "name another folder, or delete it first")


def _wanted(policy: DtypePolicy, name: str, entry: TensorEntry) -> str:
    return entry.dtype if entry.role in ("rng", "array") else policy.wanted(name, entry, "cpu")


class _Converted:
    """The tensors of a checkpoint in other dtypes, a few MiB of each at a time."""

    def __init__(self, reader: CheckpointReader, policy: DtypePolicy, report: LoadReport, wanted: dict[str, str]):
        self._reader, self._wanted = reader, wanted
        self._stage = LoadStage(reader, policy, report, torch.device("cpu"))

    def measure(self) -> None:
        """What the conversions change, into the report; tensors that stay as they are cost nothing."""
        for name, dtype in self._wanted.items():
            self._stage.note(name, bits.torch_dtype(dtype))
        self._stage.rescale()
        self._stage.rehearse()

    def write(self, files: Files, root: Path, folder: Path, kind: str) -> Manifest:
        layouts = lay_out([self._piece(name) for name in self._wanted], SHARD_BYTES)
        aside = root / f"{PART}{folder.name}"
        with writer_lock(root):
            if os.path.lexists(folder / NAME):
                raise Conflict(f"another process has just written {folder}", "run it again: it is the same copy")
            if folder.exists():  # of a conversion that was cut before its manifest
                remove_checkpoint(files, folder)
            try:
                files.make_folder(aside)
                shards = write_shards(files, aside, layouts)
                described = replace(
                    self._reader.manifest,
                    created=datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
                    files=shards,
                    tensors=self._described(layouts),
                )
                files.sync_folder(aside)
                files.rename(aside, folder)
                files.sync_folder(root)
                write_manifest(files, folder, described)
            except BaseException:
                for there in (aside, folder):
                    with suppress(OSError):
                        remove_checkpoint(files, there)
                raise
        return described

    def _piece(self, name: str) -> TensorPiece:
        entry, dtype = self._reader.entry(name), DTYPES[self._wanted[name]]
        count = int(np.prod(entry.shape, dtype=np.int64))
        shape = entry.shape if dtype.safetensors else (count * dtype.bytes,)
        return TensorPiece(name, dtype.code, shape, count * dtype.bytes, dtype.bytes, partial(self._read, name))

    def _read(self, name: str, start: int, stop: int, out: memoryview) -> None:
        """Bytes of the converted tensor: the elements they belong to are read, converted and put there."""
        dtype = bits.torch_dtype(self._wanted[name])
        size = dtype.itemsize
        target = torch.from_numpy(np.frombuffer(out, np.uint8)).view(dtype)
        self._stage.part(name, target, start // size, stop // size)

    def _described(self, layouts: list[Layout]) -> dict[str, TensorEntry]:
        places = {
            piece.key: Stored(layout.file, offset)
            for layout in layouts
            for piece, offset in zip(layout.pieces, layout.offsets, strict=True)
        }
        return {
            name: replace(entry, dtype=self._wanted[name], shards=(places[name],))
            if name in places
            else replace(entry, dtype=self._wanted[entry.alias_of] if entry.view else "")
            for name, entry in self._reader.manifest.tensors.items()
        }


def _told(report: LoadReport) -> dict[str, Any]:
    converted = {name: to_plain(told) for name, told in report.converted().items()}
    return {
        "kept": len(report.tensors) - len(converted),
        "converted": converted,
        "lossy": len(report.lossy()),
        "notes": report.notes,
        "dtypes": sorted({dtype_name(told.dtype) for told in report.tensors.values()}),
    }
