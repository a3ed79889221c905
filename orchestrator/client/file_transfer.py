"""Copy files between this machine and a job's folder in pieces, each checked by its hash, a few files in parallel.

A file is written beside its final path and renamed once it is complete. Pieces of an earlier try are compared by hash
and not sent again. If the server restarts, the transfer waits for it.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.errors import FleetError
from cluster.input.folder_access import PIECE_BYTES
from cluster.input.folder_entries import FolderEntry
from orchestrator.client.transport import ServerUnreachable

if TYPE_CHECKING:
    from orchestrator.client.client import Client

Data = dict[str, Any]
T = TypeVar("T")
Progress = Callable[[int, int], None]
MAX_PARALLEL = 4
TRIES = 4


@dataclass
class TransferResult:
    """Result of a transfer. `files`: those now at their final paths; `transferred_bytes`: bytes sent for them."""

    job: str
    target: str
    files: list[str] = field(default_factory=list)
    bytes: int = 0
    transferred_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def to_plain(self) -> Data:
        return vars(self)


class ProgressCounter:
    """Progress counter of several threads. An error that `progress` raises ends the transfer."""

    def __init__(self, total: int, progress: Progress | None):
        self._total, self._done, self._progress, self._lock = total, 0, progress, threading.Lock()
        self.transferred = 0

    def add(self, size_bytes: int, transferred: bool) -> None:
        with self._lock:
            self._done += size_bytes
            self.transferred += size_bytes if transferred else 0
            if self._progress is not None:
                self._progress(min(self._done, self._total), self._total)


def list_all_files(client: "Client", ref: str, path: str = "") -> Data:
    """Join all pages of `client.files.list` into one; `job` is the job's id."""
    page = client.files.list(ref, path=path)
    entries = list(page["entries"])
    after = page["after"]
    while after:
        more = client.files.list(page["job"], path=path, after=after)
        entries += more["entries"]
        after = more["after"]
    return {**page, "entries": entries, "after": ""}


def folder_arguments(folder: Mapping[str, Any]) -> Data:
    """Arguments of verbs that name one of a job's folders."""
    return {name: folder[name] for name in ("attempt", "node", "pool")}


def retry_unreachable(client: "Client", run: Callable[[], T]) -> T:
    """Call `run`, again if the server restarts in the meantime: data that has arrived remains."""
    for tries_left in reversed(range(TRIES)):
        try:
            return run()
        except ServerUnreachable as e:
            if not tries_left:
                raise
            client.reconnect(e)
    raise AssertionError("the last try returns or raises")


def transfer_files(do: Callable[[FolderEntry], Any], entries: list[FolderEntry]) -> None:
    """Transfer small files a few at a time, then large ones one by one: their pieces are sent in parallel."""
    run_parallel(do, [entry for entry in entries if entry["bytes"] <= PIECE_BYTES])
    for entry in entries:
        if entry["bytes"] > PIECE_BYTES:
            do(entry)


def run_parallel(do: Callable[[Any], Any], items: "Sequence[Any]") -> list[Any]:
    """Call `do` for each item, MAX_PARALLEL at a time; results are in order. The first error stops the rest."""
    stopped = threading.Event()

    def one(item: Any) -> Any:
        if stopped.is_set():
            raise FleetError("the transfer was stopped", "run the command again: it continues where it stopped")
        try:
            return do(item)
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="files") as pool:
        futures = [pool.submit(one, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
