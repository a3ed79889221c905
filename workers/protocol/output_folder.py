"""The output folder of an attempt, $POLYFLEET_OUTPUT_DIR, and its size limit.

Standard library only, quick to import.

A folder above its limit ends the attempt, as Kubernetes evicts a pod above its limit of ephemeral storage. A supervisor
can measure the folder without privileges; a quota of the file system would need an administrator.
"""

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from cluster.errors import UserError
from workers.protocol import lease

LIMIT_VARIABLE = "POLYFLEET_OUTPUT_LIMIT_BYTES"
FIRST_CHECK_S = 1.0
CHECK_EVERY_S = 10.0
PAUSE_FACTOR = 20.0
"""Pause after measuring, as a multiple of its duration: a folder of a million files costs few percent of a core."""


def output_path(checkpoint_root: Path, epoch: int) -> Path:
    """The output folder of an attempt, beside the job's checkpoints."""
    return checkpoint_root / f"output-{epoch}"


def limit_bytes(environ: Mapping[str, str]) -> int:
    """The pool's limit for the output folder of one job; 0 for none.

    Raises UserError for an invalid setting.
    """
    text = environ.get(LIMIT_VARIABLE, "") or "0"
    if not text.isascii() or not text.isdigit() or int(text[:20]) >= 1 << 60:
        raise UserError(
            f"{LIMIT_VARIABLE} is {text[:40]!r} on this node", "write a number of bytes, such as 50000000000"
        )
    return int(text)


def limit(job_limit_bytes: int, environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the smaller limit of the job's and its pool's (0: none), and a text that says whose it is."""
    pool_limit_bytes = limit_bytes(environ)
    if job_limit_bytes and (not pool_limit_bytes or job_limit_bytes < pool_limit_bytes):
        return job_limit_bytes, "its job allows {} (output_limit)"
    return pool_limit_bytes, f"its pool allows {{}} ({LIMIT_VARIABLE})"


def size_bytes(folder: str) -> int:
    """Size of all files below a folder.

    Does not follow links, and skips files that are removed at that moment.
    """
    total, folders = 0, [folder]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
    return total


class OutputFolder:
    """Watches the size of an output folder, by measuring it in a thread and when the ranks have ended.

    `allowed` says whose limit it is, with {} for its size.
    """

    def __init__(self, folder: str, limit_bytes: int, allowed: str):
        self._folder, self._limit_bytes, self._limit_text = folder, limit_bytes, allowed
        self._size_bytes = 0
        self._next_check_s = lease.now_s() + FIRST_CHECK_S
        self._thread: threading.Thread | None = None

    def check(self) -> str:
        """Return why the attempt must end, by the last measurement; "" if it need not. Does not wait."""
        if not self._limit_bytes:
            return ""
        if lease.now_s() >= self._next_check_s and (self._thread is None or not self._thread.is_alive()):
            self._next_check_s = float("inf")
            self._thread = threading.Thread(target=self._measure, name="outputs", daemon=True)
            self._thread.start()
        return self._limit_error()

    def final_check(self) -> str:
        """Measure now, and return why the attempt has failed; "" if it has not."""
        if self._limit_bytes:
            self._measure()
        return self._limit_error()

    def _measure(self) -> None:
        started_s = lease.now_s()
        self._size_bytes = size_bytes(self._folder)
        duration_s = lease.now_s() - started_s
        self._next_check_s = started_s + duration_s + max(CHECK_EVERY_S, PAUSE_FACTOR * duration_s)

    def _limit_error(self) -> str:
        if not self._limit_bytes or self._size_bytes <= self._limit_bytes:
            return ""
        size, maximum = (f"{count / 2**20:,.1f} MiB" for count in (self._size_bytes, self._limit_bytes))
        return f"its folder POLYFLEET_OUTPUT_DIR has {size}, {self._limit_text.format(maximum)}"

    def remove_empty(self) -> None:
        with suppress(OSError):
            Path(self._folder).rmdir()
