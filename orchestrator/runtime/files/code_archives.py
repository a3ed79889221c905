"""Code archives (submitted folders): stored by SHA-256, sent to nodes once, removed when unused."""

import hashlib
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.errors import Conflict, NotFound, PolyfleetError
from cluster.host.last_used import LastUsed
from cluster.input import archive_unpack
from cluster.paths import write_durably, write_private
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.checkpoints.bandwidth_limit import RateLimit

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
PIECE_S = 60.0
TRIES = 3


class ServerCodeArchives:
    def __init__(self, folder: Path):
        self._folder, self._uses = folder, LastUsed()
        self._sending: dict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(
            ".incoming-*"
        ):  # uploads of a killed server: only one server uses this home at a time
            unfinished.unlink(missing_ok=True)

    def path(self, sha: str) -> Path:
        """Path of an archive. Raises NotFound if `sha` is not a digest or was never uploaded."""
        path = self._folder / f"{sha}.zip"
        if len(sha) != 64 or set(sha) - set("0123456789abcdef") or not path.is_file():
            raise NotFound(f"no uploaded folder {sha[:12] or '(empty)'}", "submit the job again")
        return path

    def contents(self, sha: str) -> archive_unpack.ArchiveContents:
        """Names and `content_sha` of an uploaded archive; empty for "", a job without a folder.

        Raises NotFound.
        """
        if not sha:
            return archive_unpack.ArchiveContents([], "")
        self._uses.touch(sha)
        archive = self.path(sha)
        if (record := self._read_listing(sha)) is None:  # its file of names was lost or damaged
            self._write_listing(sha, archive)
            record = self._read_listing(sha) or {}
        return archive_unpack.ArchiveContents(**record["contents"])

    def is_stored(self, sha: str) -> bool:
        """Check that an archive is stored with its full size.

        This counts as use, because a submission follows.
        """
        self._uses.touch(sha)
        record, archive = self._read_listing(sha), self._folder / f"{sha}.zip"
        return record is not None and archive.is_file() and archive.stat().st_size == record["bytes"]

    def store(self, sha: str, data: Path) -> None:
        """Move the file `data` into the store; it is durable when this returns.

        The caller has checked its digest.

        Replaces a stored archive with this digest, which may be damaged. Raises UserError if no node could unpack it:
        on a node this would look like a failure of the node, and be retried.
        """
        self._uses.touch(sha)
        self._write_listing(sha, data)
        write_durably(data)
        data.replace(self._folder / f"{sha}.zip")
        write_durably(self._folder)

    def _write_listing(self, sha: str, archive: Path) -> None:
        """Write the archive's size and contents beside it, atomically."""
        record = {"bytes": archive.stat().st_size, "contents": asdict(archive_unpack.read_in_child(archive))}
        write_private(self._listing_path(sha), json.dumps(record))

    def _read_listing(self, sha: str) -> dict[str, Any] | None:
        """The stored "bytes" and "contents" of an archive; None if missing or damaged."""
        try:
            record = json.loads(self._listing_path(sha).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return record if isinstance(record, dict) and "contents" in record else None

    def _listing_path(self, sha: str) -> Path:
        return self._folder / f"{sha}.names"

    def idle(self) -> list[str]:
        """Archives that were not used for an hour."""
        return self._uses.idle(path.stem for path in self._folder.glob("*.zip"))

    def remove(self, names: Iterable[str]) -> None:
        """Remove those of the archives that are still idle."""
        for sha in names:
            with self._uses.remove_if_idle(sha) as idle:
                if idle:
                    (self._folder / f"{sha}.zip").unlink(missing_ok=True)
                    self._listing_path(sha).unlink(missing_ok=True)

    def send(self, sha: str, node: str, agents: Agents, rate_limit: RateLimit | None = None) -> None:
        """Send an archive to `node` unless it is there. The node checks the digest before use.

        After an interruption, the next call sends only the rest. Two launches take turns, because a node accepts the
        pieces of one upload in order only.
        """
        with self._sending[sha, node]:
            if agents.call(node, "has_code_archive", sha):
                return
            for _ in range(TRIES - 1):
                with suppress(Conflict):  # a piece of an interrupted call arrived late
                    self._send(sha, node, agents, rate_limit or RateLimit())
                    return
            self._send(sha, node, agents, rate_limit or RateLimit())

    def _send(self, sha: str, node: str, agents: Agents, rate_limit: RateLimit) -> None:
        archive = self.path(sha)
        size_bytes, target = archive.stat().st_size, agents.facts_of(node)
        arrived = agents.call(node, "arrived_code_archive", sha, timeout_s=PIECE_S)
        with archive.open("rb") as f:
            f.seek(_equal_bytes(archive, arrived))
            is_complete = False
            while not is_complete:
                offset, piece = f.tell(), f.read(PIECE_BYTES)
                is_complete = f.tell() >= size_bytes or not piece
                rate_limit.wait(agents.server_address, target, len(piece))
                agents.call(node, "put_code_archive_part", sha, offset, piece, is_complete, timeout_s=PIECE_S)


def _equal_bytes(archive: Path, arrived: Mapping[str, Any]) -> int:
    """Return how many bytes on the node are the beginning of the archive: all that have arrived, or 0."""
    size_bytes, digest = int(arrived["bytes"]), hashlib.sha256()
    with archive.open("rb") as f:
        for start in range(0, size_bytes, PIECE_BYTES):
            digest.update(f.read(min(PIECE_BYTES, size_bytes - start)))
        is_equal = f.tell() == size_bytes and digest.hexdigest() == arrived["sha256"]
    return size_bytes if is_equal else 0


class UnusedArchives:
    """Removes code archives that nothing uses any more, from this server and from nodes.

    `job_naming` returns a job that uses an archive, or ""; the result is cached, and checked with `exists` (is this job
    in the store?). `in_use` returns archives with other users, such as benchmark runs.
    """

    def __init__(
        self,
        archives: ServerCodeArchives,
        agents: Agents,
        job_naming: Callable[[str], str],
        exists: Callable[[str], bool],
        in_use: Callable[[], set[str]],
    ):
        self._archives, self._agents = archives, agents
        self._job_naming, self._exists, self._in_use = job_naming, exists, in_use
        self._job: dict[str, str] = {}

    def remove(self) -> None:
        """Remove unused archives; one that is used before its removal stays.

        Raises FleetError if the store fails.
        """
        idle_here, idle_on_nodes = self._archives.idle(), dict(self._idle_on_nodes())
        in_use = self._in_use()
        candidates = dict.fromkeys([*idle_here, *(sha for names in idle_on_nodes.values() for sha in names)])
        unused = {sha for sha in candidates if sha not in in_use and not self._is_used(sha)}
        self._archives.remove(unused.intersection(idle_here))
        for node, names in idle_on_nodes.items():
            if to_remove := sorted(unused.intersection(names)):
                self._call_node(node, "remove_code_archives", to_remove)

    def _idle_on_nodes(self) -> Iterable[tuple[str, list[str]]]:
        for node, _ in self._agents.ready():
            yield node, self._call_node(node, "idle_code_archives") or []

    def _call_node(self, node: str, method: str, *arguments: Any) -> Any:
        """Call a node; None if it does not respond. The next `remove` calls it again."""
        try:
            return self._agents.call(node, method, *arguments)
        except PolyfleetError as e:
            log.info("node %s did not remove unused code archives; the server tries again later: %s", node, e)
            return None

    def _is_used(self, sha: str) -> bool:
        job = self._job.pop(sha, "")
        if not job or not self._exists(job):
            job = self._job_naming(sha)
        if job:
            self._job[sha] = job
        return bool(job)
