"""Progress of a rank, for its supervisor: the file `progress-R` in the shared folder, written in place.

A beat is a step of any kind: a call of ctx.report, a check whether to stop, a batch. Standard library only, and fast,
as it is written in every step (6 µs).
"""

import os
import signal
import struct
import threading
import zlib
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cluster.input.untrusted_files import UnreadableFile, read_bytes
from workers.protocol import lease

RECORD = struct.Struct("<QddqQB")
CHECKSUM = struct.Struct("<I")
STEP_WINDOW = 1000
READS = 3
"""Attempts to read a record that looks damaged: it may have been half-written at that moment."""
PAUSED, SAVING = 1, 2
SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + (5 if hasattr(signal, "SIGRTMIN") else 0)
"""Signal that makes a rank write its stacks: one that programs hardly ever use themselves."""


class RankProgress(NamedTuple):
    """Progress of a rank.

    `steps`: number of steps of the most frequent kind; `at_s`: time of the last, by boot clock. `p99_s`: 99th
    percentile of the durations of the last steps; `step`: the last reported one (-1: none); `thread`: id of the main
    thread. `paused`: the rank does something that is not a step; `saving`: it writes a checkpoint in the background.
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
    """Read the progress file; None if there is none or it is damaged."""
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
    """Writes the progress of this rank; nowhere without a path (tests, notebooks).

    Errors of the disk are ignored.
    """

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

    def record_step(self, kind: str, step: int | None = None) -> None:
        """Record one step of this kind."""
        if self._descriptor is None:
            return
        with self._lock:
            now = lease.now_s()
            if self._at_s is not None and not self._pauses:
                self._add_duration(now - self._at_s)
            self._at_s = now
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._step = self._step if step is None else step
            self._write()

    def _add_duration(self, step_s: float) -> None:
        if len(self._steps_s) == STEP_WINDOW:
            self._sorted_s.pop(bisect_left(self._sorted_s, self._steps_s.popleft()))
        self._steps_s.append(step_s)
        insort(self._sorted_s, step_s)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context in which the rank makes no steps."""
        self._change(pauses=1)
        try:
            yield
        finally:
            self._change(pauses=-1)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context in which a checkpoint is being written, in any thread."""
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
