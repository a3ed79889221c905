"""Import checkpoints: safetensors files in place or as hard links, other formats streamed into shards.

No code in the source is executed, and no tensor is ever completely in memory. The source is read in a child process
without network or the fleet's tokens, with limits for memory, time and files (cluster/input/sandbox.py).
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

from cluster.errors import UserError
from cluster.input import sandbox
from cluster.version import VERSION as POLYFLEET
from workers.checkpoint.disk.commit import write_manifest, writer_lock
from workers.checkpoint.disk.files import Files, round_up_to_page
from workers.checkpoint.disk.layout import SHARD_BYTES, lay_out
from workers.checkpoint.disk.retention import PART, remove_checkpoint
from workers.checkpoint.disk.writer import write_shards
from workers.checkpoint.exchange.pickles.tensors import Reference
from workers.checkpoint.exchange.sources.formats import format_of, read
from workers.checkpoint.exchange.sources.imported_state import ImportedState
from workers.checkpoint.format import links
from workers.checkpoint.format.manifest import (
    CHUNK_BYTES,
    DAMAGED_REMEDY,
    FILE,
    MAX_MANIFEST_BYTES,
    NAME,
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    Producer,
    dump,
)
from workers.checkpoint.format.manifest_checks import open_regular, read_manifest
from workers.checkpoint.format.optimizer_tree import required_version
from workers.checkpoint.tools import run_in_child
from workers.errors import CheckpointError

Progress = Callable[[int, int], None]
NEEDS_ROOT = "name a folder to import into"


def import_checkpoint(
    source: str | Path,
    root: str | Path | None = None,
    *,
    format: str = "",  # noqa: A002
    step: int | None = None,
    drop: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Import `source` into a checkpoint below `root`.
    `source` is safetensors (a file, or a folder with an index), a file of torch.save or Lightning, or a folder of DCP,
    Accelerate or the Trainer. The format is detected if `format` is empty.

    safetensors files are hard-linked, so nothing is copied if both are on one file system; without `root` a manifest is
    written beside them. Symbolic links are followed. State dicts of optimizers become optimizer entries. `drop` leaves
    out objects other than plain values, and states that no optimizer can have. Returns {"path", "format", "step",
    "tensors", "bytes", "copied_bytes", "entries", "notes", "left_out": [{"name", "reason"}]}; "left_out" lists parts
    that were not imported. Raises CheckpointError, NotFound; then no checkpoint was made.
    """
    arguments = {"source": str(source), "root": root and str(root), "format": format, "step": step, "drop": drop}
    result: dict[str, Any] = run_in_child("import", arguments, progress, follow_links=True)
    return result


def import_here(
    source: str,
    root: str | None = None,
    *,
    format: str = "",  # noqa: A002
    step: int | None = None,
    drop: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """`import_checkpoint` for a child process (tools.py), which must have limited its resources before."""
    try:
        return _import(source, root, format, step, drop, progress)
    except CheckpointError as e:
        raise _with_remedy(Path(source), e) from None


def _with_remedy(source: Path, error: CheckpointError) -> CheckpointError:
    """Return the error with a remedy for imported files, which have no older step. Name git-lfs pointers as such."""
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    pointers = [path for path in files if str(path) in error.message and links.is_pointer(path)]
    if pointers:
        return CheckpointError(*links.pointer_message(max(pointers, key=lambda path: len(str(path)))))
    if isinstance(error, DamagedCheckpoint):
        remedy = "copy it again from its source" if error.remedy == DAMAGED_REMEDY else error.remedy
        return CheckpointError(error.message, remedy)
    return error


def _import(
    source: str,
    root: str | None,
    format: str,  # noqa: A002
    step: int | None,
    drop: bool,
    progress: Progress | None,
) -> dict[str, Any]:
    source_path = Path(source)
    kind = format or format_of(source_path)
    if root is None and kind != "safetensors":
        raise UserError(f"{source_path} cannot be imported in place", NEEDS_ROOT)
    state = read(source_path, kind, drop)
    state.check_expanded(source)
    number = (state.step or 0) if step is None else step
    if step is None and state.step is None:
        state.notes.append(f"{source_path.name} contains no step number: step 0 is used. Set it with `--step N`")
    name = f"step-{number:08d}-{os.urandom(4).hex()}"
    if root is None:
        folder = source_path if source_path.is_dir() else source_path.parent
        manifest, copied_bytes = _import_without_copy(folder, state, number, progress), 0
    else:
        folder = Path(root) / name
        manifest, copied_bytes = _import_into(Path(root), folder, state, number, kind, progress)
    return {
        "path": str(folder),
        "format": kind,
        "step": number,
        "tensors": len(manifest.stored()),
        "bytes": manifest.size_bytes(),
        "copied_bytes": copied_bytes,
        "entries": {entry: entry_info.kind for entry, entry_info in manifest.entries.items()},
        "notes": state.notes,
        "left_out": [{"name": name, "reason": reason} for name, reason in state.left_out.items()],
    }


def _import_without_copy(folder: Path, state: ImportedState, step: int, progress: Progress | None) -> Manifest:
    if os.path.lexists(folder / NAME):
        raise CheckpointError(f"{folder} is already a checkpoint", "nothing to import; check it with `verify`")
    if symlinks := [path for path in _files_of(state) if path.is_symlink()]:
        raise CheckpointError(f"{symlinks[0]} is a link and cannot be imported in place", NEEDS_ROOT)
    manifest = _hash_files(_files_of(state), state, step, progress)
    write_manifest(Files(), folder, dump(manifest))
    return _read_back(folder, lambda: (folder / NAME).unlink())


def _import_into(
    root: Path, folder: Path, state: ImportedState, step: int, kind: str, progress: Progress | None
) -> tuple[Manifest, int]:
    files, staging = Files(), root / f"{PART}{folder.name}"
    with writer_lock(root):
        try:
            files.make_folder(staging)
            if kind == "safetensors":
                copied_bytes = sum(_link_or_copy(path, staging / path.name) for path in _files_of(state))
                manifest = _hash_files([staging / path.name for path in _files_of(state)], state, step, progress)
            else:
                manifest = _write_tensors(files, staging, state, step, progress)
                copied_bytes = manifest.size_bytes()
            files.sync_folder(staging)
            files.rename(staging, folder)
            files.sync_folder(root)
            write_manifest(files, folder, dump(manifest))
            return _read_back(folder, lambda: None), copied_bytes
        except BaseException:
            for leftover in (staging, folder):
                with suppress(OSError):
                    remove_checkpoint(files, leftover)
            raise


def _read_back(folder: Path, undo: Callable[[], None]) -> Manifest:
    """Read the new manifest back with every check of an untrusted one, because its files are untrusted."""
    sandbox.raise_limits(metadata_bytes=(folder / NAME).stat().st_size)
    try:
        return read_manifest(folder)
    except CheckpointError:
        undo()
        raise


def _files_of(state: ImportedState) -> list[Path]:
    files = {Path(r.storage.file): None for r in state.references.values() if isinstance(r, Reference)}
    for path in files:
        if not FILE.fullmatch(path.name):
            raise CheckpointError(
                f"a file called {path.name!r} cannot be part of a checkpoint", "rename it: use letters, digits, - and _"
            )
    return list(files)


def _link_or_copy(path: Path, target: Path) -> int:
    """Hard-link or copy a file; return how many bytes were copied."""
    os.close(open_regular(path))
    sandbox.raise_limits(data_bytes=path.stat().st_size, file_bytes=path.stat().st_size)
    try:
        os.link(links.resolve_links(path), target)
        return 0
    except OSError as e:
        if e.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise
    shutil.copyfile(path, target)
    return target.stat().st_size


def _hash_files(paths: list[Path], state: ImportedState, step: int, progress: Progress | None) -> Manifest:
    total, done, files = sum(path.stat().st_size for path in paths), 0, {}
    sandbox.raise_limits(data_bytes=total, file_bytes=MAX_MANIFEST_BYTES)
    for path in paths:
        digests, size_bytes = [], 0
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            while data := file.read(CHUNK_BYTES):
                while len(data) < CHUNK_BYTES and (rest := file.read(CHUNK_BYTES - len(data))):
                    data += rest
                digests.append(xxhash.xxh3_128(data).hexdigest())
                size_bytes += len(data)
                done += len(data)
                if progress is not None:
                    progress(done, total)
        files[path.name] = FileEntry(size_bytes, tuple(digests))
    locations = {
        name: (Path(r.storage.file).name, r.storage.offset)
        for name, r in state.references.items()
        if isinstance(r, Reference)
    }
    return _manifest(state, step, files, locations)


def _write_tensors(files: Files, staging: Path, state: ImportedState, step: int, progress: Progress | None) -> Manifest:
    pieces = list(state.pieces())
    needed_bytes, free_bytes = sum(piece.bytes for piece in pieces), shutil.disk_usage(staging).free
    if needed_bytes > free_bytes:
        raise CheckpointError(
            f"the tensors need {needed_bytes:,} bytes, the disk of {staging.parent} has {free_bytes:,} free",
            "free disk space; if the source file is small, it may be malicious: do not import it",
        )
    layouts = lay_out(pieces, SHARD_BYTES)
    largest = max([layout.size_bytes for layout in layouts], default=0)
    sandbox.raise_limits(
        metadata_bytes=sum(len(layout.header) for layout in layouts),
        data_bytes=2 * needed_bytes,
        mapped_bytes=3 * max(state.mapped_bytes(), default=0),
        file_bytes=max(MAX_MANIFEST_BYTES, round_up_to_page(largest)),
    )
    shards = write_shards(files, staging, layouts, progress=progress)
    locations = {
        piece.key: (layout.file, offset)
        for layout in layouts
        for piece, offset in zip(layout.pieces, layout.offsets, strict=True)
    }
    return _manifest(state, step, shards, locations)


def _manifest(
    state: ImportedState, step: int, files: dict[str, FileEntry], locations: dict[str, tuple[str, int]]
) -> Manifest:
    created = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    producer, version = Producer(polyfleet=POLYFLEET), required_version(state.entries)
    return Manifest(
        step,
        created,
        producer,
        files,
        state.located_tensors(locations),
        state.entries,
        origin=state.origin,
        version=version,
    )
