"""Copy checkpoints between folders of this machine and pools in chunks; the receiver verifies, then commits atomically.

A child process with limits (workers.checkpoint.tools) reads manifests and writes folders of this machine, because a
pool's manifest is untrusted data.
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
from urllib.parse import unquote

from cluster.errors import Conflict, FleetError, NotFound, PolyfleetError, UserError
from cluster.host import file_lock
from orchestrator.client.file_transfer import MAX_PARALLEL, retry_unreachable
from orchestrator.client.file_upload import send_folder

if TYPE_CHECKING:
    from orchestrator.client.client import Client
    from orchestrator.views.checkpoints import CheckpointDestination, IncomingView

Data = dict[str, Any]
Progress = Callable[[int, int], None]
Chunk = tuple[str, int]
CHUNK_BYTES = 8 << 20
MANIFEST = "MANIFEST.json"
MAX_MANIFEST_BYTES = 256 << 20
RUNNING_COPY_WAIT_S = 20.0
"""Seconds to wait for an interrupted copy of the same checkpoint, until its node gives it up."""


def upload_checkpoint(client: "Client", source: str, target: str, progress: Progress) -> Data:
    """Copy a checkpoint of this machine into POOL:FOLDER. Only chunks that are missing there are sent."""
    started_s = time.monotonic()
    folder = _find_newest(Path(source).expanduser())
    text = _read(folder / MANIFEST, MAX_MANIFEST_BYTES)

    def run() -> Data:
        destination = client.checkpoints.destination(target)
        begin_reply = _begin_copy(client, destination, folder.name, text)
        sent_bytes = 0
        if not begin_reply["arrived"]:
            try:
                sent_bytes = _send_chunks(
                    client,
                    destination,
                    folder,
                    [(str(chunk["file"]), int(chunk["index"])) for chunk in begin_reply["missing"]],
                    begin_reply,
                    progress,
                )
                client.checkpoints.commit_upload(destination["node"], destination["folder"], folder.name)
            except BaseException:
                with suppress(PolyfleetError):  # the first error is the one to raise
                    client.checkpoints.interrupt_upload(destination["node"], destination["folder"], folder.name)
                raise
        path = f"{destination['pool']}:{destination['folder']}/{folder.name}"
        result = {
            "source": str(folder),
            "target": path,
            "transferred_bytes": sent_bytes,
            "already_there": begin_reply["arrived"],
        }
        return result | {name: begin_reply[name] for name in ("step", "files", "bytes")} | {"verified": True}

    return retry_unreachable(client, run) | {"seconds": time.monotonic() - started_s}


def download_checkpoint(client: "Client", source: str, target: str, progress: Progress) -> Data:
    """Copy a checkpoint of a pool into a folder of this machine. Chunks that are already there are not sent."""
    from workers.checkpoint.format.manifest import FOLDER
    from workers.checkpoint.tools import run_in_child

    started_s, root = time.monotonic(), Path(target).expanduser()

    def run() -> Data:
        reply = client.checkpoints.read_manifest(source)
        ref, text = unquote(reply.headers["Polyfleet-Checkpoint"]), reply.content
        name = PurePosixPath(ref.partition(":")[2]).name
        if not FOLDER.fullmatch(name):
            raise UserError(f"the name of {ref} is not that of a checkpoint", "name a folder step-…")
        with tempfile.NamedTemporaryFile(prefix="polyfleet-manifest-") as manifest:
            manifest.write(text)
            manifest.flush()
            arguments = {"root": str(root), "name": name, "manifest": manifest.name}
            begin_reply = run_in_child("missing", arguments)
            fetched = _fetch_chunks(client, ref, Path(begin_reply["folder"]), begin_reply, progress)
            arrived = run_in_child("arrive", arguments)
        result = {
            "source": ref,
            "target": arrived["path"],
            "transferred_bytes": fetched,
            "already_there": begin_reply["arrived"],
        }
        return result | {name: begin_reply[name] for name in ("step", "files", "bytes")} | {"verified": True}

    return retry_unreachable(client, run) | {"seconds": time.monotonic() - started_s}


def import_local(client: "Client", source: str, target: str, options: Data, progress: Progress, key: str = "") -> Data:
    """Import a file or folder of this machine in another format into POOL:FOLDER. It is sent to a node, where a
    separate process with limits reads it, because its content is untrusted.
    """
    local = Path(source).expanduser()
    if not os.path.lexists(local):
        raise NotFound(f"no {source!r} on this machine", "name a file or a folder")
    where = f"{socket.gethostname()}\n{local.resolve()}\n{target}"
    upload = hashlib.sha256(where.encode("utf-8", "replace")).hexdigest()[:24]

    def run() -> Data:
        destination = client.checkpoints.destination(target)
        sent_bytes = send_folder(client, destination["node"], upload, local, progress)
        upload_location = f"{destination['pool']}:.uploads/{upload}" + ("" if local.is_dir() else f"/{local.name}")
        arguments = {"source": upload_location, "root": f"{destination['pool']}:{destination['folder']}", **options}
        try:
            result = client.checkpoints.import_(**arguments, progress=progress, key=key)
        except UserError as e:
            with suppress(PolyfleetError):  # an upload that was refused or does not fit need not stay there
                client.files.discard_upload(upload, destination["node"])
            raise type(e)(*(_with_source_name(text, upload_location, source) for text in e.args)) from None
        client.files.discard_upload(upload, destination["node"])
        return {
            **result,
            "notes": [_with_source_name(note, upload_location, source) for note in result["notes"]],
            "transferred_bytes": sent_bytes,
        }

    with _one_import_at_a_time(
        local, lambda: client.notify(f"another import of {local} is running; this one starts after it")
    ):
        return retry_unreachable(client, run)


@contextmanager
def _one_import_at_a_time(local: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Let imports of one file or folder run one after the other: two imports to one target share an upload, which the
    first discards when it ends. A source that cannot be opened is reported when it is read.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            descriptor = os.open(local, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            file_lock.acquire_or_wait(descriptor, on_wait)
            stack.callback(file_lock.release, descriptor)
        yield


def _with_source_name(text: str, upload_location: str, source: str) -> str:
    """Replace the path of the upload in `text` by the path that the user wrote."""
    return text.replace(upload_location, source)


def _find_newest(path: Path) -> Path:
    """The checkpoint at `path`, or the newest in that folder that is not marked as damaged."""
    from workers.checkpoint.tools import run_in_child

    if (path / MANIFEST).is_file():
        return path.resolve()
    if not path.is_dir():
        raise NotFound(f"no checkpoint at {path}", "name a folder step-…, or a folder that contains some")
    result = run_in_child("newest", {"root": str(path.resolve())}, follow_links=True)
    if not result["path"]:
        remedy = "name a folder step-…; import files of other formats with `polyfleet checkpoint import`"
        raise NotFound(f"no checkpoint at {path}", remedy)
    return Path(result["path"])


def _begin_copy(client: "Client", destination: "CheckpointDestination", name: str, text: bytes) -> "IncomingView":
    """Begin a copy; wait until an interrupted one of the same checkpoint ended. Raises Conflict if it still runs."""
    deadline = time.monotonic() + RUNNING_COPY_WAIT_S
    while True:
        try:
            return client.checkpoints.begin_upload(destination["node"], destination["folder"], name, text)
        except Conflict:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def _send_chunks(
    client: "Client",
    destination: "CheckpointDestination",
    folder: Path,
    missing: list[Chunk],
    begin_reply: "IncomingView",
    progress: Progress,
) -> int:
    from workers.checkpoint.format.manifest import FILE

    def send(chunk: Chunk) -> int:
        if not FILE.fullmatch(chunk[0]):
            raise FleetError(f"the server requested {chunk[0]!r}, which is not a file of a checkpoint")
        data = _read(folder / chunk[0], CHUNK_BYTES, chunk[1] * CHUNK_BYTES)
        client.checkpoints.send_chunk(destination["node"], destination["folder"], folder.name, *chunk, data)
        return len(data)

    absent = sum(min(CHUNK_BYTES, _size(folder / file) - index * CHUNK_BYTES) for file, index in missing)
    present_bytes = max(begin_reply["bytes"] - absent, 0)
    return _transfer_chunks(
        send, missing, lambda done: progress(min(present_bytes + done, begin_reply["bytes"]), begin_reply["bytes"])
    )


def _size(path: Path) -> int:
    """Size of a file; 0 if it does not exist, because reading it raises that error."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _fetch_chunks(client: "Client", ref: str, folder: Path, begin_reply: Data, progress: Progress) -> int:
    chunks = [(str(file), int(index)) for file, index, _ in begin_reply["chunks"]]
    sizes = {(str(file), int(index)): int(size) for file, index, size in begin_reply["chunks"]}

    def fetch(chunk: Chunk) -> int:
        data = client.checkpoints.read_chunk(ref, *chunk).content
        if len(data) != sizes[chunk]:
            raise FleetError(
                f"{ref}/{chunk[0]} has changed: a chunk has {len(data)} bytes instead of {sizes[chunk]} bytes"
            )
        _write(folder, chunk, data)
        return len(data)

    present_bytes = begin_reply["bytes"] - sum(sizes.values())
    return _transfer_chunks(fetch, chunks, lambda done: progress(present_bytes + done, begin_reply["bytes"]))


def _transfer_chunks(do: Callable[[Chunk], int], chunks: list[Chunk], progress: Callable[[int], None]) -> int:
    """Transfer chunks, MAX_PARALLEL at a time to limit memory. Return the bytes in total. The first error stops it."""
    done_bytes, remaining = 0, iter(chunks)
    with ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="chunks") as pool:
        running = {pool.submit(do, chunk) for chunk in _first_chunks(remaining)}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            try:
                done_bytes += sum(one.result() for one in ended)
                progress(done_bytes)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
            running |= {pool.submit(do, chunk) for _, chunk in zip(ended, remaining, strict=False)}
    return done_bytes


def _first_chunks(chunks: Iterator[Chunk]) -> list[Chunk]:
    return [chunk for _, chunk in zip(range(MAX_PARALLEL), chunks, strict=False)]


def _read(path: Path, max_bytes: int, offset: int = 0) -> bytes:
    """Read a regular file. Links are followed, because the user of this machine named the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as e:
        raise UserError(
            f"{path} cannot be read: {e.strerror}",
            "run `polyfleet checkpoint verify` to check that the checkpoint is complete",
        ) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UserError(
                f"{path} is not a regular file",
                "run `polyfleet checkpoint verify` to check that the checkpoint is complete",
            )
        data = bytearray()
        while len(data) < max_bytes and (piece := os.pread(descriptor, max_bytes - len(data), offset + len(data))):
            data += piece
        return bytes(data)
    finally:
        os.close(descriptor)


def _write(folder: Path, chunk: Chunk, data: bytes) -> None:
    """Write a chunk at its offset in a file that the tool created. The tool reads it back before it counts as valid.
    An OSError names the file, so that a full disk is not searched elsewhere.
    """
    path, start = folder / chunk[0], chunk[1] * CHUNK_BYTES
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(descriptor, view[done:], start + done)
        if hasattr(os, "posix_fadvise"):  # the kernel starts to write it to the disk while other chunks arrive
            os.posix_fadvise(descriptor, start, len(view), os.POSIX_FADV_DONTNEED)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None
    finally:
        os.close(descriptor)
