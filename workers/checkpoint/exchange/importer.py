"""Checkpoints of others become ours: safetensors in place or by links, the rest streamed into shards.

Nothing of theirs is executed, and no tensor is ever whole in memory. They are read in a process of its own, which has
neither network nor our tokens, and limits for memory, time and files (cluster/sandbox.py).
"""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from cluster import sandbox
from cluster.errors import UserError
from cluster.version import VERSION as POLYFLEET
from workers.checkpoint.disk.commit import write_manifest
from workers.checkpoint.disk.files import Files, rounded_up
from workers.checkpoint.disk.layout import SHARD_BYTES, lay_out
from workers.checkpoint.disk.retention import PART, remove_checkpoint
from workers.checkpoint.disk.writer import write_shards
from workers.checkpoint.disk.writer_lock import writer_lock
from workers.checkpoint.exchange.formats import format_of, read
from workers.checkpoint.exchange.imported_state import ImportedState
from workers.checkpoint.exchange.tensors import Reference
from workers.checkpoint.format import links, versions
from workers.checkpoint.format.chunks import CHUNK_BYTES
from workers.checkpoint.format.manifest import (
    DAMAGED_REMEDY,
    FILE,
    LARGEST_BYTES,
    NAME,
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    Producer,
)
from workers.checkpoint.format.manifest_checks import open_regular, read_manifest
from workers.checkpoint.tools import run_in_child
from workers.errors import CheckpointError

Progress = Callable[[int, int], None]
ELSEWHERE = "name a folder to import into"


def import_checkpoint(
    source: str | Path,
    root: str | Path | None = None,
    *,
    format: str = "",  # noqa: A002
    step: int | None = None,
    drop: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make a checkpoint below `root` of what lies at `source`: safetensors (a file, or a folder with an index), a file
    of torch.save or Lightning, a folder of DCP, Accelerate or the Trainer. The format is recognised; `format` says it.

    safetensors files are linked, so nothing is copied where both lie on one file system; without `root` a manifest is
    put beside them. Symbolic links are followed. State dicts of optimizers become optimizers. `drop` leaves out objects
    that are no plain values, and states that no optimizer can have. {"path", "format", "step", "tensors", "bytes",
    "copied_bytes", "entries", "notes", "left_out": [{"name", "reason"}]}: the last are the parts that were not taken.
    Raises CheckpointError, NotFound; then nothing was made.
    """
    arguments = {"source": str(source), "root": root and str(root), "format": format, "step": step, "drop": drop}
    told: dict[str, Any] = run_in_child("import", arguments, progress, follow_links=True)
    return told


def import_here(
    source: str,
    root: str | None = None,
    *,
    format: str = "",  # noqa: A002
    step: int | None = None,
    drop: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """`import_checkpoint` in this process, which has set its limits before: for a child (tools.py)."""
    try:
        return _imported(source, root, format, step, drop, progress)
    except CheckpointError as e:
        raise _explained(Path(source), e) from None


def _explained(source: Path, error: CheckpointError) -> CheckpointError:
    """The error with a remedy for files of others, which have no older step; a pointer of git-lfs is named as one."""
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    pointers = [path for path in files if str(path) in error.message and links.is_pointer(path)]
    if pointers:
        return CheckpointError(*links.pointer_words(max(pointers, key=lambda path: len(str(path)))))
    if isinstance(error, DamagedCheckpoint):
        remedy = "copy it again from its source" if error.remedy == DAMAGED_REMEDY else error.remedy
        return CheckpointError(error.message, remedy)
    return error


def _imported(
    source: str,
    root: str | None,
    format: str,  # noqa: A002
    step: int | None,
    drop: bool,
    progress: Progress | None,
) -> dict[str, Any]:
    there = Path(source)
    kind = format or format_of(there)
    if root is None and kind != "safetensors":
        raise UserError(f"{there} cannot become a checkpoint where it is", ELSEWHERE)
    found = read(there, kind, drop)
    found.check_expanded(source)
    number = (found.step or 0) if step is None else step
    if step is None and found.step is None:
        found.notes.append(f"no step was found in {there.name}: it counts as step 0. Give one with `--step N`")
    name = f"step-{number:08d}-{os.urandom(4).hex()}"
    if root is None:
        folder = there if there.is_dir() else there.parent
        described, copied_bytes = _in_place(folder, found, number, progress), 0
    else:
        folder = Path(root) / name
        described, copied_bytes = _into(Path(root), folder, found, number, kind, progress)
    return {
        "path": str(folder),
        "format": kind,
        "step": number,
        "tensors": len(described.stored()),
        "bytes": described.size_bytes(),
        "copied_bytes": copied_bytes,
        "entries": {entry: told.kind for entry, told in described.entries.items()},
        "notes": found.notes,
        "left_out": [{"name": name, "reason": why} for name, why in found.left_out.items()],
    }


def _in_place(folder: Path, found: ImportedState, step: int, progress: Progress | None) -> Manifest:
    if os.path.lexists(folder / NAME):
        raise CheckpointError(f"{folder} is a checkpoint already", "`verify` tells whether it is sound")
    if linked := [path for path in _files_of(found) if path.is_symlink()]:
        raise CheckpointError(f"{linked[0]} is a link: it cannot become a part of a checkpoint where it is", ELSEWHERE)
    described = _hashed(_files_of(found), found, step, progress)
    write_manifest(Files(), folder, described)
    return _believed(folder, lambda: (folder / NAME).unlink())


def _into(
    root: Path, folder: Path, found: ImportedState, step: int, kind: str, progress: Progress | None
) -> tuple[Manifest, int]:
    files, aside = Files(), root / f"{PART}{folder.name}"
    with writer_lock(root):
        try:
            files.make_folder(aside)
            if kind == "safetensors":
                copied_bytes = sum(_linked(path, aside / path.name) for path in _files_of(found))
                described = _hashed([aside / path.name for path in _files_of(found)], found, step, progress)
            else:
                described = _written(files, aside, found, step, progress)
                copied_bytes = described.size_bytes()
            files.sync_folder(aside)
            files.rename(aside, folder)
            files.sync_folder(root)
            write_manifest(files, folder, described)
            return _believed(folder, lambda: None), copied_bytes
        except BaseException:
            for there in (aside, folder):
                with suppress(OSError):
                    remove_checkpoint(files, there)
            raise


def _believed(folder: Path, undo: Callable[[], None]) -> Manifest:
    """What was described, read back with every check a stranger's manifest gets: the files were a stranger's."""
    sandbox.raise_limits(metadata_bytes=(folder / NAME).stat().st_size)
    try:
        return read_manifest(folder)
    except CheckpointError:
        undo()
        raise


def _files_of(found: ImportedState) -> list[Path]:
    files = {Path(r.storage.file): None for r in found.references.values() if isinstance(r, Reference)}
    for path in files:
        if not FILE.fullmatch(path.name):
            raise CheckpointError(
                f"a file called {path.name!r} cannot be part of a checkpoint", "rename it: letters, -, _"
            )
    return list(files)


def _linked(path: Path, to: Path) -> int:
    """Answers how many bytes had to be copied."""
    os.close(open_regular(path))
    sandbox.raise_limits(data_bytes=path.stat().st_size, file_bytes=path.stat().st_size)
    try:
        os.link(links.real(path), to)
        return 0
    except OSError as e:
        if e.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise
    shutil.copyfile(path, to)
    return to.stat().st_size


def _hashed(paths: list[Path], found: ImportedState, step: int, progress: Progress | None) -> Manifest:
    total, done, files = sum(path.stat().st_size for path in paths), 0, {}
    sandbox.raise_limits(data_bytes=total, file_bytes=LARGEST_BYTES)
    for path in paths:
        digests, size_bytes = [], 0
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            while data := file.read(CHUNK_BYTES):
                while len(data) < CHUNK_BYTES and (more := file.read(CHUNK_BYTES - len(data))):
                    data += more
                digests.append(xxhash.xxh3_128(data).hexdigest())
                size_bytes += len(data)
                done += len(data)
                if progress is not None:
                    progress(done, total)
        files[path.name] = FileEntry(size_bytes, tuple(digests))
    places = {
        name: (Path(r.storage.file).name, r.storage.offset)
        for name, r in found.references.items()
        if isinstance(r, Reference)
    }
    return _manifest(found, step, files, places)


def _written(files: Files, aside: Path, found: ImportedState, step: int, progress: Progress | None) -> Manifest:
    pieces = list(found.pieces())
    needed_bytes, free_bytes = sum(piece.bytes for piece in pieces), shutil.disk_usage(aside).free
    if needed_bytes > free_bytes:
        raise CheckpointError(
            f"the tensors need {needed_bytes:,} bytes, the disk of {aside.parent} has {free_bytes:,} free",
            "free disk space; if the source file is small, it may be malicious: do not import it",
        )
    layouts = lay_out(pieces, SHARD_BYTES)
    largest = max([layout.size_bytes for layout in layouts], default=0)
    sandbox.raise_limits(
        metadata_bytes=sum(len(layout.header) for layout in layouts),
        data_bytes=2 * needed_bytes,
        mapped_bytes=3 * max(found.mapped_bytes(), default=0),
        file_bytes=max(LARGEST_BYTES, rounded_up(largest)),
    )
    shards = write_shards(files, aside, layouts, progress=progress)
    places = {
        piece.key: (layout.file, offset)
        for layout in layouts
        for piece, offset in zip(layout.pieces, layout.offsets, strict=True)
    }
    return _manifest(found, step, shards, places)


def _manifest(
    found: ImportedState, step: int, files: dict[str, FileEntry], places: dict[str, tuple[str, int]]
) -> Manifest:
    created = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    producer, version = Producer(polyfleet=POLYFLEET), versions.needed(found.entries)
    return Manifest(
        step, created, producer, files, found.placed(places), found.entries, origin=found.origin, version=version
    )
