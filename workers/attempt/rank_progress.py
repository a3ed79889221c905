"""The progress of a rank, which it writes in place for its supervisor: `beat-R` in the attempt's shared folder.

A beat is a step of any kind: a report, a question whether to stop, a batch. Standard library only, and light: it is
written in every step (6 µs).
"""

import os
import struct
import threading
import zlib
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cluster.untrusted_files import UnreadableFile, read_bytes
from workers.attempt import lease

RECORD = struct.Struct("<QddqQB")
CHECKSUM = struct.Struct("<I")
KEPT_STEPS = 1000
READS = 3
"""Of a record that looks damaged: it may be the half of one that is just being written."""
PAUSED, SAVING = 1, 2


class RankProgress(NamedTuple):
    """`steps` so far, of the kind of which there were most; the last beat was at `at_s` of the boot clock. `p99_s` is
    the 99th percentile of the last steps, `step` the last reported one (-1: none), `thread` the main thread's number.
    `paused`: does something that is no step; `saving`: writes a checkpoint in the background.
    """

    steps: int
    at_s: float
    p99_s: float
    step: int
    thread: int
    flags: int

    @property
    def paused(self) -> bool:
        return bool(self.flags & PAUSED)

    @property
    def saving(self) -> bool:
        return bool(self.flags & SAVING)


def read(path: Path) -> RankProgress | None:
    """None where there is none, or nothing that could be one."""
    for _ in range(READS):
        try:
            data = read_bytes(path, RECORD.size + CHECKSUM.size)
        except (OSError, UnreadableFile):
            return None
        body, checksum = data[: RECORD.size], data[RECORD.size :]
        if len(checksum) == CHECKSUM.size and CHECKSUM.unpack(checksum)[0] == zlib.crc32(body):
            return RankProgress(*RECORD.unpack(body))
    return None


class ProgressWriter:
    """Those of this rank. Without a path (tests, notebooks) they go nowhere. A full disk costs beats, nothing else."""

    def __init__(self, path: Path | None):
        self._descriptor: int | None = None
        if path is not None:
            with suppress(OSError):
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._counts: dict[str, int] = {}
        self._steps_s: deque[float] = deque()
        self._sorted_s: list[float] = []
        self._at_s: float | None = None
        self._step = -1
        self._pauses = 0
        self._saves = 0
        self._lock = threading.Lock()

    def beat(self, kind: str, step: int | None = None) -> None:
        """One step of this kind."""
        if self._descriptor is None:
            return
        with self._lock:
            now = lease.now_s()
            if self._at_s is not None and not self._pauses:
                self._keep(now - self._at_s)
            self._at_s = now
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._step = self._step if step is None else step
            self._write()

    def _keep(self, step_s: float) -> None:
        if len(self._steps_s) == KEPT_STEPS:
            self._sorted_s.pop(bisect_left(self._sorted_s, self._steps_s.popleft()))
        self._steps_s.append(step_s)
        insort(self._sorted_s, step_s)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, nothing is a step."""
        self._change(pauses=1)
        try:
            yield
        finally:
            self._change(pauses=-1)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, a checkpoint is being written, in any thread."""
        self._change(saves=1)
        try:
            yield
        finally:
            self._change(saves=-1)

    def _change(self, pauses: int = 0, saves: int = 0) -> None:
        if self._descriptor is None:
            return
        with self._lock:
            self._pauses += pauses
            self._saves += saves
            if pauses:
                self._at_s = lease.now_s()
            self._write()

    def _write(self) -> None:
        p99_s = self._sorted_s[min(len(self._sorted_s) - 1, len(self._sorted_s) * 99 // 100)] if self._sorted_s else 0.0
        flags = PAUSED * bool(self._pauses) | SAVING * bool(self._saves)
        steps = max(self._counts.values(), default=0)
        body = RECORD.pack(steps, self._at_s or 0.0, p99_s, self._step, threading.main_thread().ident or 0, flags)
        assert self._descriptor is not None
        with suppress(OSError):
            os.pwrite(self._descriptor, body + CHECKSUM.pack(zlib.crc32(body)), 0)
