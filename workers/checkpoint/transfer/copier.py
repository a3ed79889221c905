"""Copy one checkpoint: from a folder or store into another. It resumes where it was cut, and appears whole or not."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workers.checkpoint.disk.damage_marks import record_verification
from workers.checkpoint.disk.files import Files
from workers.checkpoint.disk.reader import Chunk
from workers.checkpoint.format.chunks import CHUNK_BYTES, chunk_count, chunk_digest
from workers.checkpoint.format.manifest import NAME, DamagedCheckpoint, Manifest
from workers.checkpoint.format.manifest_checks import parse_manifest
from workers.checkpoint.transfer.expected import Expected
from workers.checkpoint.transfer.receiver import CheckpointReceiver
from workers.checkpoint.transfer.stores import FolderStore, ObjectStore, manifest_text, newest_checkpoint, store
from workers.errors import CheckpointError

THREADS = 4
"""Reads in flight: an object store answers each only after a round trip. So many chunks are held at once."""
Progress = Callable[[int, int], None]


def copy(
    source: str | Path,
    target: str | Path,
    *,
    progress: Progress | None = None,
    files: Files | None = None,
    follow_links: bool = True,
) -> dict[str, Any]:
    """Copy checkpoint `source` (of a folder of some: the newest) into the folder `target`; either is a path or a URI.

    {"target", "step", "files", "bytes", "travelled_bytes", "already_there", "verified", "seconds"}; what has travelled
    was not at the target yet. Each chunk is checked as it arrives and again where it lies. Raises
    CheckpointError (DamagedCheckpoint: source or target), NotFound, Conflict; what has arrived stays for the next try.
    `follow_links`: files of `source` may be links, and where it is a folder of checkpoints, they, too.
    """
    started_s = time.perf_counter()
    found, name = newest_checkpoint(store(source, follow_links))
    text = manifest_text(found)
    manifest = parse_manifest(text, f"{found.where}/{NAME}")
    to = store(target)
    told = ByteProgress(manifest.size_bytes(), progress)
    if isinstance(to, FolderStore):
        travelled, there = _into_folder(found, to.path, name, text, told, files)
    else:
        travelled, there = _into_objects(found, to.below(name), text, manifest, told)
    return {
        "target": to.below(name).where,
        "step": manifest.step,
        "files": len(manifest.files),
        "bytes": manifest.size_bytes(),
        "travelled_bytes": travelled,
        "already_there": there,
        "verified": True,
        "seconds": time.perf_counter() - started_s,
    }


def verify_location(place: str | Path, progress: Progress | None = None) -> dict[str, Any]:
    """Like workers.checkpoint.verify, for a path or a URI: every byte is read from there. In a folder, one that is not
    sound is marked, and one that is loses its mark."""
    found, _ = newest_checkpoint(store(place))
    manifest = parse_manifest(manifest_text(found), f"{found.where}/{NAME}")
    told = ByteProgress(manifest.size_bytes(), progress)
    problems = []
    for chunk, data in _fetched(found, manifest, _all(manifest)):
        told.more(_size(manifest, chunk))
        if isinstance(data, CheckpointError):
            problems.append(data.message)
    if isinstance(found, FolderStore):
        record_verification(found.path, problems)
    return {
        "path": found.where,
        "step": manifest.step,
        "ok": not problems,
        "bytes": manifest.size_bytes(),
        "chunks": len(_all(manifest)),
        "problems": problems,
    }


def _into_folder(
    found: FolderStore | ObjectStore, root: Path, name: str, text: bytes, told: "ByteProgress", files: Files | None
) -> tuple[int, bool]:
    try:
        with CheckpointReceiver(root, name, text, files) as incoming:
            if incoming.arrived:
                told.more(told.total)
                return 0, True
            travelled = 0
            for chunk, data in _fetched(found, incoming.manifest, incoming.missing(told.more)):
                if isinstance(data, CheckpointError):
                    raise data
                incoming.write(chunk, data)
                travelled += len(data)
                told.more(len(data))
            incoming.commit()
            return travelled, False
    except OSError as e:
        raise CheckpointError(
            f"cannot copy {name} into {root}: {e.strerror or e}",
            "free space there, and copy again: what arrived is kept",
        ) from e


def _into_objects(
    found: FolderStore | ObjectStore, to: ObjectStore, text: bytes, manifest: Manifest, told: "ByteProgress"
) -> tuple[int, bool]:
    """Whole objects: one that is there and sound is not sent again; the manifest is put last."""
    if to.exists(NAME):
        problems = verify_location(to.where)["problems"]
        if problems or manifest_text(to) != text:
            reason = problems[0] if problems else "it is another checkpoint of that name"
            raise DamagedCheckpoint(f"{to.where} is there already: {reason}", "delete it, or name another place")
        told.more(told.total)
        return 0, True
    travelled = 0
    for file, entry in manifest.files.items():
        if _is_sound(to, manifest, file):
            told.more(entry.bytes)
            continue
        to.write(file, _parts(found, manifest, file, told))
        travelled += entry.bytes
        if not _is_sound(to, manifest, file):
            raise DamagedCheckpoint(f"{to.where}/{file} does not read back as it was sent", "copy again")
    to.write(NAME, iter([text]))
    return travelled, False


def _is_sound(place: ObjectStore, manifest: Manifest, file: str) -> bool:
    try:
        if not place.exists(file) or place.size_bytes(file) != manifest.files[file].bytes:
            return False
    except DamagedCheckpoint:
        return False
    chunks = [chunk for chunk in _all(manifest) if chunk[0] == file]
    return not any(isinstance(data, CheckpointError) for _, data in _fetched(place, manifest, chunks))


def _parts(found: FolderStore | ObjectStore, manifest: Manifest, file: str, told: "ByteProgress") -> Iterator[bytes]:
    for _, data in _fetched(found, manifest, [chunk for chunk in _all(manifest) if chunk[0] == file]):
        if isinstance(data, CheckpointError):
            raise data
        told.more(len(data))
        yield bytes(data)


def _fetched(
    found: FolderStore | ObjectStore, manifest: Manifest | Expected, chunks: list[Chunk]
) -> Iterator[tuple[Chunk, memoryview | CheckpointError]]:
    """Each chunk in order, verified, or what was wrong with it; a few are read ahead."""

    def fetch(chunk: Chunk) -> memoryview | CheckpointError:
        data = memoryview(bytearray(_size(manifest, chunk)))
        try:
            found.read(chunk[0], chunk[1] * CHUNK_BYTES, data)
        except CheckpointError as e:
            return e
        if chunk_digest(data) == manifest.files[chunk[0]].xxh3_128[chunk[1]]:
            return data
        count = len(manifest.files[chunk[0]].xxh3_128)
        return DamagedCheckpoint(f"{found.where}/{chunk[0]}: chunk {chunk[1] + 1} of {count} is not what was saved")

    with ThreadPoolExecutor(THREADS, "fetch") as pool:
        waiting = [(chunk, pool.submit(fetch, chunk)) for chunk in chunks[:THREADS]]
        following = iter(chunks[THREADS:])
        while waiting:
            chunk, coming = waiting.pop(0)
            data = coming.result()
            if (after := next(following, None)) is not None:
                waiting.append((after, pool.submit(fetch, after)))
            yield chunk, data


def _all(manifest: Manifest) -> list[Chunk]:
    return [(file, index) for file, entry in manifest.files.items() for index in range(chunk_count(entry.bytes))]


def _size(manifest: Manifest | Expected, chunk: Chunk) -> int:
    return min(CHUNK_BYTES, manifest.files[chunk[0]].bytes - chunk[1] * CHUNK_BYTES)


class ByteProgress:
    def __init__(self, total: int, progress: Progress | None):
        self.total, self._done, self._progress = total, 0, progress

    def more(self, size_bytes: int) -> None:
        self._done += size_bytes
        if self._progress is not None:
            self._progress(min(self._done, self.total), self.total)
