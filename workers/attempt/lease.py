"""The right of an attempt to go on, given for some seconds at a time. A lease that has passed is never given again.

Its clock goes on while the machine sleeps (CLOCK_BOOTTIME), so a machine that wakes up finds its leases gone. The
record is written in place, into a block that was allocated with the first one: a full disk ends no attempt.
"""

import os
import time
import zlib
from pathlib import Path

from cluster.untrusted_files import UnreadableFile, read_bytes
from workers.attempt import process_tree, reserved_files

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
LONGEST_BYTES = 64
READS = 3
"""Of a record that looks damaged: it may be the half of one that is just being written."""


def now_s() -> float:
    return time.clock_gettime(CLOCK)


def _record(deadline_s: float) -> bytes:
    """Deadline, boot and checksum in fixed columns."""
    text = f"{deadline_s:018.3f} {process_tree.boot():8.8}".encode()
    return b"%b %08x\n" % (text, zlib.crc32(text))


def _read(path: Path) -> float | None:
    """The deadline; 0 for a lease given before the machine started anew; None for no record or a damaged one."""
    for _ in range(READS):
        try:
            record = read_bytes(path, LONGEST_BYTES)
        except (OSError, UnreadableFile):
            return None
        text, _, checksum = record.rpartition(b" ")
        if checksum == b"%08x\n" % zlib.crc32(text):
            deadline, _, boot = text.decode().partition(" ")
            return float(deadline) if boot == f"{process_tree.boot():8.8}" else 0.0
    return None


def deadline_s(path: Path) -> float:
    """When the lease ends; 0 when there is none, which is long past."""
    return _read(path) or 0.0


def expired(path: Path) -> bool:
    return now_s() >= deadline_s(path)


def write(path: Path, lease_s: float, asked_s: float | None = None) -> None:
    """Let the lease end `lease_s` after `asked_s`, the time the controller's word was asked for (default: now)."""
    record = _record((now_s() if asked_s is None else asked_s) + lease_s)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        descriptor = reserved_files.allocated(path, len(record))
    try:
        os.pwrite(descriptor, record, 0)
    finally:
        os.close(descriptor)


class Lease:
    """A lease as one process sees it for some time: a damaged record leaves the last deadline that could be read, so
    that damage can keep a lease from being renewed, but not from lasting as long as it was given for.
    """

    def __init__(self, path: Path):
        self._path = path
        self._deadline_s = 0.0

    @property
    def deadline_s(self) -> float:
        if (found := _read(self._path)) is not None:
            self._deadline_s = found
        return self._deadline_s

    def passed(self) -> bool:
        return now_s() >= self.deadline_s

    def renew(self, lease_s: float, asked_s: float | None = None) -> bool:
        """False, and nothing changes, when it has passed: the supervisor has begun to kill, others may have taken over.
        Raises OSError where the record cannot be written: then the attempt ends, since its supervisor knows no better.
        """
        now, deadline = now_s(), self.deadline_s
        if now >= deadline:
            return False
        if (now if asked_s is None else asked_s) + lease_s > deadline:
            write(self._path, lease_s, asked_s)
        return True


def try_lock(path: Path) -> int | None:
    """Lock `path` while the returned descriptor, or a copy a child inherits, is open. None: somebody else holds it."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether somebody alive holds it. The kernel lets go when the last holder dies: a recycled pid cannot deceive."""
    descriptor = try_lock(path)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False
