"""The right of an attempt to go on, given for some seconds at a time. A lease that has passed is never given again.

Its clock goes on while the machine sleeps (CLOCK_BOOTTIME), so a machine that wakes up finds its leases gone.
"""

import os
import time
from pathlib import Path

from workers.attempt.records import replace_text

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_s() -> float:
    return time.clock_gettime(CLOCK)


def deadline_s(path: Path) -> float:
    """When the lease ends; 0 when there is none, which is long past."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return 0.0


def passed(path: Path) -> bool:
    return now_s() >= deadline_s(path)


def write(path: Path, lease_s: float, asked_s: float | None = None) -> None:
    """Let the lease end `lease_s` after `asked_s`, the time the controller's word was asked for (default: now)."""
    replace_text(path, f"{(now_s() if asked_s is None else asked_s) + lease_s:.3f}")


def renew(path: Path, lease_s: float, asked_s: float | None = None) -> bool:
    """False, and nothing changes, when it has passed: the supervisor has begun to kill, others may have taken over."""
    if passed(path):
        return False
    if (now_s() if asked_s is None else asked_s) + lease_s > deadline_s(path):
        write(path, lease_s, asked_s)
    return True


def hold(path: Path) -> int | None:
    """Lock `path` while the returned descriptor, or a copy a child inherits, is open. None: somebody else holds it."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_held(path: Path) -> bool:
    """Whether somebody alive holds it. The kernel lets go when the last holder dies: a recycled pid cannot deceive."""
    descriptor = hold(path)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False
