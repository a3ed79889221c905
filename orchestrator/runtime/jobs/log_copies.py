"""Copies, in the server's home, of logs from nodes that an autoscaler may remove with their disks.

Logs are then read here, so that reading does not keep a node from being released.

    JOB/EPOCH.RANK/log, log.N   as on the node (cluster/host/log_files.py)

A folder is complete when it has this name: it is renamed once all of it was copied.
"""

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.errors import FleetError, NotFound
from cluster.host import log_files
from cluster.paths import private_dir
from orchestrator.runtime.agents.agents import Agents

MAX_LOG_BYTES = 16 << 20
"""Maximum bytes per rank; of a longer log the beginning and the end are stored."""
FIRST_BYTES = 1 << 20
PAGE_BYTES = 1 << 20
UNFINISHED = "new-"
LOG = "log"


class LogCopies:
    """Log copies in `folder`, which is created on first use. Thread-safe."""

    def __init__(self, folder: Path, agents: Agents):
        self._folder, self._agents = folder, agents

    def copy(self, job: str, epoch: int, rank: int, node: str) -> None:
        """Copy the log of a rank that has ended, unless it is here.

        Raises FleetError if that is not possible now.
        """
        target = self._rank_folder(job, epoch, rank)
        if target.is_dir():
            return
        unfinished = private_dir(self._folder) / f"{UNFINISHED}{uuid.uuid4().hex}"
        try:
            unfinished.mkdir(mode=0o700)
            copy = LogCopyWriter(unfinished / LOG)
            for offset, end_offset in self._ranges(job, epoch, rank, node):
                self._copy_range(copy, (job, epoch, rank), node, offset, end_offset)
            private_dir(target.parent)
            unfinished.rename(target)
        except NotFound:
            return  # the rank printed nothing
        except OSError as e:
            raise FleetError(f"a log of {job} cannot be stored: {e.strerror or e}", "free space at the server") from e
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _ranges(self, job: str, epoch: int, rank: int, node: str) -> tuple[tuple[int, int], ...]:
        """Byte ranges (start, end) of the log to copy."""
        end = int(self._agents.call(node, "log_tail_range", job, epoch, rank, 0)["end"])
        if end <= MAX_LOG_BYTES:
            return ((0, end),)
        return (0, FIRST_BYTES), (end - (MAX_LOG_BYTES - FIRST_BYTES), end)

    def _copy_range(
        self, copy: "LogCopyWriter", rank: tuple[str, int, int], node: str, offset: int, end_offset: int
    ) -> None:
        while True:
            page = self._agents.call(node, "logs", *rank, offset, PAGE_BYTES)
            copy.add(offset, page["data"].encode(), page["next"])
            if page["next"] >= end_offset or not page["more"]:
                return
            offset = page["next"]

    def read(self, job: str, epoch: int, rank: int, offset: int, limit_bytes: int) -> dict[str, Any] | None:
        """Read from a copy, with the result of an agent's `logs`; None if there is no copy."""
        try:
            page = log_files.read(self._rank_folder(job, epoch, rank) / LOG, offset, limit_bytes)
        except FileNotFoundError:
            return None
        text = page.data.decode("utf-8", "replace")
        return {"data": text, "next": page.next, "more": page.more, "ended": not page.more}

    def tail(self, job: str, epoch: int, rank: int, count: int) -> dict[str, int] | None:
        try:
            start, end = log_files.last(self._rank_folder(job, epoch, rank) / LOG, count)
        except FileNotFoundError:
            return None
        return {"start": start, "end": end}

    def is_copied(self, job: str, epoch: int, rank: int) -> bool:
        return self._rank_folder(job, epoch, rank).is_dir()

    def remove_stale(self, exists: Callable[[str], bool]) -> None:
        """Remove logs of jobs that no longer exist."""
        for path in self._jobs():
            if not exists(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _jobs(self) -> Iterator[Path]:
        with suppress(FileNotFoundError):
            yield from [path for path in self._folder.iterdir() if not path.name.startswith(UNFINISHED)]

    def _rank_folder(self, job: str, epoch: int, rank: int) -> Path:
        return self._folder / job / f"{int(epoch)}.{int(rank)}"


class LogCopyWriter:
    """Writes a log copy from pages, possibly with gaps. Byte offsets are those of the original."""

    def __init__(self, path: Path):
        self._path = path
        self._part, self._end = path, 0
        path.touch(0o600)

    def add(self, offset: int, data: bytes, end: int) -> None:
        """Add the page that was read at `offset` and ends at byte `end` of the log.

        After a gap, the agent's page starts with a line on how much is missing. It is dropped here, because reading the
        copy reports the gap again.
        """
        if offset + len(data) != end:
            data = data.partition(b"\n")[2]
        start = end - len(data)
        if start != self._end:
            complete_lines = data.partition(b"\n")[
                2
            ]  # an offset that is not the end of an earlier page may be within a line
            start, data = (start, data) if start != offset else (end - len(complete_lines), complete_lines)
            self._part = self._path.with_name(f"{self._path.name}.{start}")
        with self._part.open("ab") as file:
            file.write(data)
        self._end = end
