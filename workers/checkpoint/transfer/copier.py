"""Copy one checkpoint from a folder or store into another. A copy is resumable, and is visible only once complete."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workers.checkpoint.disk.damage_marks import record_verification
from workers.checkpoint.disk.files import Files
from workers.checkpoint.disk.reader import Chunk
from workers.checkpoint.disk.writer import ByteProgress
from workers.checkpoint.format.manifest import CHUNK_BYTES, NAME, DamagedCheckpoint, chunk_digest
from workers.checkpoint.format.manifest_checks import parse_manifest
from workers.checkpoint.transfer.expected import ExpectedFiles, expected_of
from workers.checkpoint.transfer.receiver import CheckpointReceiver
from workers.checkpoint.transfer.stored_marks import cancel_deletion
from workers.checkpoint.transfer.stores import FolderStore, ObjectStore, manifest_text, newest_checkpoint, store
from workers.errors import CheckpointError

THREADS = 4
"""Concurrent reads: each read from an object store takes a network round trip. As many chunks are in memory at once."""
Progress = Callable[[int, int], None]


def copy(
    source: str | Path,
    target: str | Path,
    *,
    progress: Progress | None = None,
    files: Files | None = None,
    follow_links: bool = True,
) -> dict[str, Any]:
    """Copy checkpoint `source`, or the newest of a folder, into the folder `target`. Both may be paths or URIs.

    Returns {"target", "step", "files", "bytes", "transferred_bytes", "already_there", "verified", "seconds"};
    `transferred_bytes` counts what the target did not have. Each chunk is verified when it arrives and again at the
    target. Raises CheckpointError (DamagedCheckpoint: source or target), NotFound, Conflict; chunks that arrived are
    reused by the next try. `follow_links`: files of `source` may be links, and so may checkpoints in it if it is a
    folder of checkpoints.
    """
    started_s = time.perf_counter()
    origin, name = newest_checkpoint(store(source, follow_links))
    text = manifest_text(origin)
    manifest = expected_of(parse_manifest(text, f"{origin.where}/{NAME}"))
    destination = store(target)
    counter = ByteProgress(manifest.size_bytes(), progress)
    if isinstance(destination, FolderStore):
        receiver = CheckpointReceiver(destination.path, name, text, files, manifest)
        transferred_bytes, already_there = _copy_to_folder(origin, receiver, counter)
    else:
        transferred_bytes, already_there = _copy_to_objects(
            origin, destination.checkpoints_below(name), text, manifest, counter
        )
    return {
        "target": destination.checkpoints_below(name).where,
        "step": manifest.step,
        "files": len(manifest.files),
        "bytes": manifest.size_bytes(),
        "transferred_bytes": transferred_bytes,
        "already_there": already_there,
        "verified": True,
        "seconds": time.perf_counter() - started_s,
    }


def verify_location(place: str | Path, progress: Progress | None = None) -> dict[str, Any]:
    """Like workers.checkpoint.verify, for a path or a URI: every byte is read from there.
    A checkpoint in a folder is marked if it is damaged; if it is sound its mark is removed.
    """
    origin, _ = newest_checkpoint(store(place))
    manifest = expected_of(parse_manifest(manifest_text(origin), f"{origin.where}/{NAME}"))
    counter = ByteProgress(manifest.size_bytes(), progress)
    problems = []
    for chunk, data in _fetch_chunks(origin, manifest, manifest.chunks()):
        counter.add(manifest.size_of(chunk))
        if isinstance(data, CheckpointError):
            problems.append(data.message)
    if isinstance(origin, FolderStore):
        record_verification(origin.path, problems)
    return {
        "path": origin.where,
        "step": manifest.step,
        "ok": not problems,
        "bytes": manifest.size_bytes(),
        "chunks": len(manifest.chunks()),
        "problems": problems,
    }


def _copy_to_folder(
    origin: FolderStore | ObjectStore, receiver: CheckpointReceiver, counter: ByteProgress
) -> tuple[int, bool]:
    try:
        with receiver:
            if receiver.is_complete:
                counter.add(counter.total)
                return 0, True
            transferred_bytes = 0
            for chunk, data in _fetch_chunks(origin, receiver.manifest, receiver.missing(counter.add)):
                if isinstance(data, CheckpointError):
                    raise data
                receiver.write(chunk, data)
                transferred_bytes += len(data)
                counter.add(len(data))
            receiver.commit()
            return transferred_bytes, False
    except OSError as e:
        raise CheckpointError(
            f"cannot copy {receiver.name} into {receiver.root}: {e.strerror or e}",
            "free disk space there, then copy it again: chunks that arrived are not sent again",
        ) from e


def _copy_to_objects(
    origin: FolderStore | ObjectStore,
    destination: ObjectStore,
    text: bytes,
    manifest: ExpectedFiles,
    counter: ByteProgress,
) -> tuple[int, bool]:
    """Copy complete objects: those already there and sound are not sent again; the manifest is put last."""
    if destination.exists(NAME):
        problems = verify_location(destination.where)["problems"]
        if problems or manifest_text(destination) != text:
            reason = problems[0] if problems else "it is another checkpoint with that name"
            raise DamagedCheckpoint(
                f"{destination.where} already exists: {reason}", "delete it, or name another target"
            )
        counter.add(counter.total)
        return 0, True
    cancel_deletion(destination)
    transferred_bytes = 0
    for file, entry in manifest.files.items():
        if _is_sound(destination, manifest, file):
            counter.add(entry.bytes)
            continue
        destination.write(file, _file_parts(origin, manifest, file, counter))
        transferred_bytes += entry.bytes
        if not _is_sound(destination, manifest, file):
            raise DamagedCheckpoint(f"{destination.where}/{file} does not read back as it was sent", "copy it again")
    destination.write(NAME, iter([text]))
    return transferred_bytes, False


def _is_sound(objects: ObjectStore, manifest: ExpectedFiles, file: str) -> bool:
    try:
        if not objects.exists(file) or objects.size_bytes(file) != manifest.files[file].bytes:
            return False
    except DamagedCheckpoint:
        return False
    checked = _fetch_chunks(objects, manifest, manifest.chunks_of(file))
    return not any(isinstance(data, CheckpointError) for _, data in checked)


def _file_parts(
    origin: FolderStore | ObjectStore, manifest: ExpectedFiles, file: str, counter: ByteProgress
) -> Iterator[bytes]:
    for _, data in _fetch_chunks(origin, manifest, manifest.chunks_of(file)):
        if isinstance(data, CheckpointError):
            raise data
        counter.add(len(data))
        yield bytes(data)


def _fetch_chunks(
    origin: FolderStore | ObjectStore, manifest: ExpectedFiles, chunks: list[Chunk]
) -> Iterator[tuple[Chunk, memoryview | CheckpointError]]:
    """Yield each chunk in order, verified, or the error; a few chunks are read ahead."""

    def fetch(chunk: Chunk) -> memoryview | CheckpointError:
        data = memoryview(bytearray(manifest.size_of(chunk)))
        try:
            origin.read(chunk[0], chunk[1] * CHUNK_BYTES, data)
        except CheckpointError as e:
            return e
        if chunk_digest(data) == manifest.digest_of(chunk):
            return data
        return DamagedCheckpoint(f"{origin.where}/{chunk[0]}: {manifest.name_of(chunk)} is not what was saved")

    with ThreadPoolExecutor(THREADS, "fetch") as pool:
        pending = [(chunk, pool.submit(fetch, chunk)) for chunk in chunks[:THREADS]]
        remaining = iter(chunks[THREADS:])
        while pending:
            chunk, future = pending.pop(0)
            data = future.result()
            if (next_chunk := next(remaining, None)) is not None:
                pending.append((next_chunk, pool.submit(fetch, next_chunk)))
            yield chunk, data
