"""Logs of attempts on nodes that an autoscaler may take away, kept in the server's home: what lies on such a node alone
goes with it. They are read here from then on, so that reading keeps no node from being given back.

    JOB/EPOCH.RANK/log, log.N   as on the node (cluster/log_files.py)

A folder gets its name by one rename, once all of it was copied.
"""

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster import log_files
from cluster.errors import FleetError, NotFound
from cluster.paths import private_dir
from orchestrator.runtime.agents import Agents

MOST_BYTES = 16 << 20
"""Of one rank: the beginning and the end of a longer log."""
FIRST_BYTES = 1 << 20
PAGE_BYTES = 1 << 20
BEGUN = "new-"
LOG = "log"


class KeptLogs:
    """Below `folder`, which is made on first use. Safe to use from several threads."""

    def __init__(self, folder: Path, agents: Agents):
        self._folder, self._agents = folder, agents

    def keep(self, job: str, epoch: int, rank: int, node: str) -> None:
        """Copy the log of a rank that has ended, unless it is here. Raises FleetError where that cannot be done now."""
        target = self._of(job, epoch, rank)
        if target.is_dir():
            return
        begun = private_dir(self._folder) / f"{BEGUN}{uuid.uuid4().hex}"
        try:
            begun.mkdir(mode=0o700)
            copy = Copy(begun / LOG)
            for offset, until in self._wanted(job, epoch, rank, node):
                self._copy(copy, (job, epoch, rank), node, offset, until)
            private_dir(target.parent)
            begun.rename(target)
        except NotFound:
            return  # it never printed there
        except OSError as e:
            raise FleetError(f"a log of {job} cannot be kept: {e.strerror or e}", "free space at the server") from e
        finally:
            shutil.rmtree(begun, ignore_errors=True)

    def _wanted(self, job: str, epoch: int, rank: int, node: str) -> tuple[tuple[int, int], ...]:
        """From which byte to which."""
        end = int(self._agents.call(node, "log_tail", job, epoch, rank, 0)["end"])
        if end <= MOST_BYTES:
            return ((0, end),)
        return (0, FIRST_BYTES), (end - (MOST_BYTES - FIRST_BYTES), end)

    def _copy(self, copy: "Copy", rank: tuple[str, int, int], node: str, offset: int, until: int) -> None:
        while True:
            page = self._agents.call(node, "logs", *rank, offset, PAGE_BYTES)
            copy.add(offset, page["data"].encode(), page["next"])
            if page["next"] >= until or not page["more"]:
                return
            offset = page["next"]

    def read(self, job: str, epoch: int, rank: int, offset: int, limit_bytes: int) -> dict[str, Any] | None:
        """As an agent answers; None where nothing is kept."""
        try:
            found = log_files.read(self._of(job, epoch, rank) / LOG, offset, limit_bytes)
        except FileNotFoundError:
            return None
        text = found.data.decode("utf-8", "replace")
        return {"data": text, "next": found.next, "more": found.more, "ended": not found.more}

    def tail(self, job: str, epoch: int, rank: int, count: int) -> dict[str, int] | None:
        try:
            start, end = log_files.last(self._of(job, epoch, rank) / LOG, count)
        except FileNotFoundError:
            return None
        return {"start": start, "end": end}

    def has(self, job: str, epoch: int, rank: int) -> bool:
        return self._of(job, epoch, rank).is_dir()

    def remove_unknown(self, exists: Callable[[str], bool]) -> None:
        """Logs of jobs that were removed."""
        for path in self._jobs():
            if not exists(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _jobs(self) -> Iterator[Path]:
        with suppress(FileNotFoundError):
            yield from [path for path in self._folder.iterdir() if not path.name.startswith(BEGUN)]

    def _of(self, job: str, epoch: int, rank: int) -> Path:
        return self._folder / job / f"{int(epoch)}.{int(rank)}"


class Copy:
    """A log whose lines come in pages, maybe with gaps. Offsets stay what they were."""

    def __init__(self, path: Path):
        self._path = path
        self._part, self._end = path, 0
        path.touch(0o600)

    def add(self, asked: int, data: bytes, following: int) -> None:
        """What was answered to `asked`, up to byte `following` of the log. Before lines that follow a gap stands one
        that tells how much is missing: whoever reads this copy is told it again.
        """
        if asked + len(data) != following:
            data = data.partition(b"\n")[2]
        begin = following - len(data)
        if begin != self._end:
            whole = data.partition(b"\n")[2]  # an offset that nobody read before may be within a line
            begin, data = (begin, data) if begin != asked else (following - len(whole), whole)
            self._part = self._path.with_name(f"{self._path.name}.{begin}")
        with self._part.open("ab") as file:
            file.write(data)
        self._end = following
