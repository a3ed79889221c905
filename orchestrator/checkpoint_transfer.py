"""Checkpoints between folders of this machine and pools, chunk by chunk: verified where they arrive, committed at once.

Manifests are read, and folders of this machine are written, by a child with limits (workers.checkpoint.tools): a pool's
manifest is as much a stranger's as any other.
"""

import hashlib
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from cluster import file_lock
from cluster.errors import Conflict, FleetError, NotFound, PolyfleetError, UserError
from orchestrator.file_transfer import AT_ONCE, until_reached
from orchestrator.file_upload import send_folder

if TYPE_CHECKING:
    from orchestrator.client import Client

Data = dict[str, Any]
Progress = Callable[[int, int], None]
Chunk = tuple[str, int]
CHUNK_BYTES = 8 << 20
MANIFEST = "MANIFEST.json"
LARGEST_MANIFEST_BYTES = 256 << 20
ANOTHER_S = 20.0
"""So long a copy of the same checkpoint that was cut off is waited for, until its node gives it up."""


def up(client: "Client", source: str, target: str, progress: Progress) -> Data:
    """Copy a checkpoint of this machine into POOL:FOLDER. Only chunks that are missing there travel."""
    started_s = time.monotonic()
    folder = _newest(Path(source).expanduser())
    text = _read(folder / MANIFEST, LARGEST_MANIFEST_BYTES)

    def run() -> Data:
        place = client.checkpoint_place(target)
        begun = _begun(client, place, folder.name, text)
        sent = 0
        if not begun["arrived"]:
            try:
                sent = _sent(client, place, folder, [(str(f), int(i)) for f, i in begun["missing"]], begun, progress)
                client.checkpoint_arrived(place, folder.name)
            except BaseException:
                with suppress(PolyfleetError):  # the first error is the one to tell
                    client.checkpoint_left(place, folder.name)
                raise
        path = f"{place['pool']}:{place['folder']}/{folder.name}"
        told = {"source": str(folder), "target": path, "travelled_bytes": sent, "already_there": begun["arrived"]}
        return told | {name: begun[name] for name in ("step", "files", "bytes")} | {"verified": True}

    return until_reached(client, run) | {"seconds": time.monotonic() - started_s}


def down(client: "Client", source: str, target: str, progress: Progress) -> Data:
    """Copy a checkpoint of a pool into a folder of this machine. What lies there already does not travel."""
    from workers.checkpoint.format.manifest import FOLDER
    from workers.checkpoint.tools import run_in_child

    started_s, root = time.monotonic(), Path(target).expanduser()

    def run() -> Data:
        ref, text = client.checkpoint_manifest(source)
        name = PurePosixPath(ref.partition(":")[2]).name
        if not FOLDER.fullmatch(name):
            raise UserError(f"{ref} is not called like a checkpoint", "name a folder step-…")
        with tempfile.NamedTemporaryFile(prefix="polyfleet-manifest-") as manifest:
            manifest.write(text)
            manifest.flush()
            asked = {"root": str(root), "name": name, "manifest": manifest.name}
            begun = run_in_child("missing", asked)
            fetched = _fetched(client, ref, Path(begun["folder"]), begun, progress)
            arrived = run_in_child("arrive", asked)
        told = {"source": ref, "target": arrived["path"], "travelled_bytes": fetched, "already_there": begun["arrived"]}
        return told | {name: begun[name] for name in ("step", "files", "bytes")} | {"verified": True}

    return until_reached(client, run) | {"seconds": time.monotonic() - started_s}


def bring_in(client: "Client", source: str, target: str, options: Data, progress: Progress, key: str = "") -> Data:
    """Import a file or folder of this machine, of another format, into POOL:FOLDER: it is sent to a node there and read
    by a process of its own with limits, as any stranger's.
    """
    local = Path(source).expanduser()
    if not os.path.lexists(local):
        raise NotFound(f"no {source!r} on this machine", "name a file or a folder")
    where = f"{socket.gethostname()}\n{local.resolve()}\n{target}"
    upload = hashlib.sha256(where.encode("utf-8", "replace")).hexdigest()[:24]

    def run() -> Data:
        place = client.checkpoint_place(target)
        sent = send_folder(client, place["node"], upload, local, progress)
        there = f"{place['pool']}:.uploads/{upload}" + ("" if local.is_dir() else f"/{local.name}")
        asked = {"source": there, "root": f"{place['pool']}:{place['folder']}", **options}
        try:
            told: Data = client.checkpoint_tool("import", asked, progress, key)
        except UserError as e:
            with suppress(PolyfleetError):  # what is refused, or does not fit, need not stay there
                client.upload_discard(place["node"], upload)
            raise type(e)(*(_named(text, there, source) for text in e.args)) from None
        client.upload_discard(place["node"], upload)
        return told | {"notes": [_named(note, there, source) for note in told["notes"]], "travelled_bytes": sent}

    with _turn(local, lambda: client.tell(f"another import of {local} is running; this one starts after it")):
        return until_reached(client, run)


@contextmanager
def _turn(local: Path, when_taken: Callable[[], None]) -> Iterator[None]:
    """Imports of one file or folder take turns: two imports into one place share an upload, which the first discards
    when it ends. A source that cannot be opened is reported where it is read.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            descriptor = os.open(local, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            file_lock.wait_for(descriptor, when_taken)
        yield


def _named(text: str, there: str, source: str) -> str:
    """With the path that the user gave instead of the upload's."""
    return text.replace(there, source)


def _newest(path: Path) -> Path:
    """The checkpoint at `path`; of a folder of some the newest that is not known to be damaged."""
    from workers.checkpoint.tools import run_in_child

    if (path / MANIFEST).is_file():
        return path.resolve()
    if not path.is_dir():
        raise NotFound(f"no checkpoint at {path}", "name a folder step-…, or one that holds some")
    found = run_in_child("newest", {"root": str(path.resolve())}, follow_links=True)
    if not found["path"]:
        remedy = "name a folder step-…; files of other formats come in by `polyfleet checkpoint import`"
        raise NotFound(f"no checkpoint at {path}", remedy)
    return Path(found["path"])


def _begun(client: "Client", place: Data, name: str, text: bytes) -> Data:
    """Waits for a copy of the same that was cut off. Raises Conflict for one that goes on."""
    deadline = time.monotonic() + ANOTHER_S
    while True:
        try:
            return client.checkpoint_begin(place, name, text)
        except Conflict:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def _sent(client: "Client", place: Data, folder: Path, missing: list[Chunk], begun: Data, progress: Progress) -> int:
    from workers.checkpoint.format.manifest import FILE

    def send(chunk: Chunk) -> int:
        if not FILE.fullmatch(chunk[0]):
            raise FleetError(f"the server asks for {chunk[0]!r}, which no checkpoint has")
        data = _read(folder / chunk[0], CHUNK_BYTES, chunk[1] * CHUNK_BYTES)
        client.checkpoint_send(place, folder.name, *chunk, data)
        return len(data)

    absent = sum(min(CHUNK_BYTES, _size(folder / file) - index * CHUNK_BYTES) for file, index in missing)
    here = max(begun["bytes"] - absent, 0)
    return _together(send, missing, lambda done: progress(min(here + done, begun["bytes"]), begun["bytes"]))


def _size(path: Path) -> int:
    """0 for one that is not there: reading it says so."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _fetched(client: "Client", ref: str, folder: Path, begun: Data, progress: Progress) -> int:
    chunks = [(str(file), int(index)) for file, index, _ in begun["chunks"]]
    sizes = {(str(file), int(index)): int(size) for file, index, size in begun["chunks"]}

    def fetch(chunk: Chunk) -> int:
        data = client.checkpoint_chunk(ref, *chunk)
        if len(data) != sizes[chunk]:
            raise FleetError(f"{ref}/{chunk[0]} has changed: a chunk has {len(data)} bytes, not {sizes[chunk]}")
        _write(folder, chunk, data)
        return len(data)

    here = begun["bytes"] - sum(sizes.values())
    return _together(fetch, chunks, lambda done: progress(here + done, begun["bytes"]))


def _together(do: Callable[[Chunk], int], chunks: list[Chunk], tell: Callable[[int], None]) -> int:
    """A few at a time, so that only those are in memory: bytes in all. The first error ends it."""
    done_bytes, following = 0, iter(chunks)
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="chunks") as pool:
        running = {pool.submit(do, chunk) for chunk in _some(following)}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            try:
                done_bytes += sum(one.result() for one in ended)
                tell(done_bytes)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
            running |= {pool.submit(do, chunk) for _, chunk in zip(ended, following, strict=False)}
    return done_bytes


def _some(chunks: Iterator[Chunk]) -> list[Chunk]:
    return [chunk for _, chunk in zip(range(AT_ONCE), chunks, strict=False)]


def _read(path: Path, most_bytes: int, offset: int = 0) -> bytes:
    """Of a regular file, also behind a link: what is sent was named by the user of this machine."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}", "is the checkpoint whole? `verify` tells") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UserError(f"{path} is not a regular file", "is the checkpoint whole? `verify` tells")
        data = bytearray()
        while len(data) < most_bytes and (piece := os.pread(descriptor, most_bytes - len(data), offset + len(data))):
            data += piece
        return bytes(data)
    finally:
        os.close(descriptor)


def _write(folder: Path, chunk: Chunk, data: bytes) -> None:
    """At its place in a file that the tool has made; it is believed only once the tool has read it back."""
    descriptor = os.open(folder / chunk[0], os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(descriptor, view[done:], chunk[1] * CHUNK_BYTES + done)
        if hasattr(os, "posix_fadvise"):  # the kernel begins to write it to the disk, while others arrive
            os.posix_fadvise(descriptor, chunk[1] * CHUNK_BYTES, len(view), os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
