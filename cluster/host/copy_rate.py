"""The user's limit for copies, and the pacing of this machine's traffic with object stores.

The server paces copies between machines itself (orchestrator/runtime/checkpoints/bandwidth_limit.py). Uploads to a
store and downloads from it run in processes of the nodes: those of one machine share a file, in which each books the
time of its pieces.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from cluster.errors import UserError
from cluster.host import file_lock
from cluster.input.sizes import size_bytes
from cluster.paths import home, private_dir

SETTING = "POLYFLEET_COPY_RATE"
MIN_BYTES_PER_S = 10**6
"""At this rate a piece of 8 MiB waits for seconds, not for minutes."""
PIECE_BYTES = 8 << 20


def copy_bytes_per_s(environment: Mapping[str, str] = os.environ) -> int | None:
    """Read the limit in bytes per second into or out of one machine (None: no limit).

    Raises UserError if invalid.
    """
    text = environment.get(SETTING, "").strip()
    if not text:
        return None
    remedy = f"write bytes per second, at least 1MB, e.g. {SETTING}=50MB; leave it out for no limit"
    try:
        rate = size_bytes(text)
    except UserError as e:
        raise UserError(f"{SETTING}: {e.message}", remedy) from None
    if rate < MIN_BYTES_PER_S:
        raise UserError(f"{SETTING}: {text} per second is below the minimum of 1MB", remedy)
    return rate


class StorePacer:
    """Make the processes that share `file` transfer at most `bytes_per_s` together, one piece at a time.

    The file contains the monotonic time at which the piece before ends. Unused time is not credited.
    """

    def __init__(
        self,
        bytes_per_s: int,
        file: Path,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._bytes_per_s, self._file, self._now, self._sleep = bytes_per_s, file, now, sleep

    def wait(self, transfer_bytes: int) -> None:
        """Wait until as many bytes may be transferred, piece by piece, so that others get their turn."""
        for offset in range(0, transfer_bytes, PIECE_BYTES):
            self._book(min(PIECE_BYTES, transfer_bytes - offset))

    def _book(self, piece_bytes: int) -> None:
        """Wait until the piece before has ended. The lock is the queue, so the wait has it."""
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            file_lock.acquire_or_wait(descriptor, lambda: None)
            wait_s = self._end_s(descriptor) - self._now()
            if 0 < wait_s <= PIECE_BYTES / MIN_BYTES_PER_S:  # a longer one was written before this machine started
                self._sleep(wait_s)
            end_s = self._now() + piece_bytes / self._bytes_per_s
            os.pwrite(descriptor, f"{end_s:024.6f}\n".encode(), 0)
            file_lock.release(descriptor)
        finally:
            os.close(descriptor)

    @staticmethod
    def _end_s(descriptor: int) -> float:
        with suppress(ValueError):
            return float(os.pread(descriptor, 64, 0) or b"0")
        return 0.0


def store_pace() -> Callable[[int], None]:
    """Return the function that waits until as many bytes may go to or come from an object store.

    Raises UserError if the setting in this process's environment is invalid.
    """
    rate = copy_bytes_per_s()
    if rate is None:
        return lambda transfer_bytes: None
    return StorePacer(rate, private_dir(home() / "upload-locks") / "rate").wait
