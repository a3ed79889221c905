"""Time-limited permission for an attempt to run. An expired lease is never renewed.

Its clock continues while the machine sleeps (CLOCK_BOOTTIME), so leases have expired when it wakes up. The record is
written in place, into a block that was allocated with the first one, so that a full disk does not end an attempt.
"""

import os
import time
import zlib
from pathlib import Path

from cluster.input.untrusted_files import UnreadableFile, read_bytes
from workers.processes import process_tree
from workers.protocol import reserved_files

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
MAX_FILE_BYTES = 64
READS = 3
"""Attempts to read a record that looks damaged: it may have been half-written at that moment."""


def now_s() -> float:
    return time.clock_gettime(CLOCK)


def _record(deadline_s: float) -> bytes:
    """Encode deadline, boot id and checksum in fields of fixed width."""
    text = f"{deadline_s:018.3f} {process_tree.boot():8.8}".encode()
    return b"%b %08x\n" % (text, zlib.crc32(text))


def _read(path: Path) -> float | None:
    """Read the deadline: 0 for a lease from before a reboot; None if there is no record or it is damaged."""
    for _ in range(READS):
        try:
            record = read_bytes(path, MAX_FILE_BYTES)
        except (OSError, UnreadableFile):
            return None
        text, _, checksum = record.rpartition(b" ")
        if checksum == b"%08x\n" % zlib.crc32(text):
            deadline, _, boot = text.decode().partition(" ")
            return float(deadline) if boot == f"{process_tree.boot():8.8}" else 0.0
    return None


def deadline_s(path: Path) -> float:
    """Time at which the lease ends; 0, which is long past, if there is none."""
    return _read(path) or 0.0


def is_expired(path: Path) -> bool:
    return now_s() >= deadline_s(path)


def write(path: Path, lease_s: float, requested_s: float | None = None) -> None:
    """Let the lease end `lease_s` after `requested_s`, the time of the controller's call (default: now)."""
    record = _record((now_s() if requested_s is None else requested_s) + lease_s)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        descriptor = reserved_files.allocate(path, len(record))
    try:
        os.pwrite(descriptor, record, 0)
    finally:
        os.close(descriptor)


class Lease:
    """A lease as one process sees it over time.

    While the record is damaged, the last deadline that was read counts: damage can prevent a renewal, but cannot
    shorten a lease.
    """

    def __init__(self, path: Path):
        self._path = path
        self._deadline_s = 0.0

    @property
    def deadline_s(self) -> float:
        if (newest_s := _read(self._path)) is not None:
            self._deadline_s = newest_s
        return self._deadline_s

    def is_expired(self) -> bool:
        return now_s() >= self.deadline_s

    def renew(self, lease_s: float, requested_s: float | None = None) -> bool:
        """Extend the lease. Return False, without a change, if it has expired.

        Then the supervisor is killing the ranks, and a newer attempt may have started. Raises OSError if the
        record cannot be written: then the attempt ends with its old deadline, which is all that its supervisor sees.
        """
        now, deadline = now_s(), self.deadline_s
        if now >= deadline:
            return False
        if (now if requested_s is None else requested_s) + lease_s > deadline:
            write(self._path, lease_s, requested_s)
        return True


def try_lock(path: Path) -> int | None:
    """Lock `path` while the returned descriptor, or an inherited copy, is open.

    None if another process holds it.
    """
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_locked(path: Path) -> bool:
    """Return whether a running process holds the lock.

    The kernel releases it at exit, so reused pids do not matter.
    """
    descriptor = try_lock(path)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False
