"""The folder of an attempt that its job keeps, $POLYFLEET_OUTPUT_DIR, and its limit. Standard library only, and light.

A folder over its limit ends the attempt, as Kubernetes evicts a pod over its limit of ephemeral storage: what a
supervisor can measure it can stop, where a quota of the file system would need its administrator.
"""

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from cluster.errors import UserError
from workers.attempt import lease

LIMIT = "POLYFLEET_OUTPUT_LIMIT_BYTES"
FIRST_LOOK_S = 1.0
LOOK_EVERY_S = 10.0
REST = 20.0
"""A look of a second is followed by twenty without: a folder of a million files costs few percent of a core."""


def folder_of(checkpoint_root: Path, epoch: int) -> Path:
    """Beside the job's checkpoints."""
    return checkpoint_root / f"output-{epoch}"


def limit_bytes(environ: Mapping[str, str]) -> int:
    """What the pool allows one job's folder on this node, 0 for no limit. Raises UserError."""
    text = environ.get(LIMIT, "") or "0"
    if not text.isascii() or not text.isdigit() or int(text[:20]) >= 1 << 60:
        raise UserError(f"{LIMIT} is {text[:40]!r} on this node", "write bytes, such as 50000000000")
    return int(text)


def limit(of_the_job_bytes: int, environ: Mapping[str, str]) -> tuple[int, str]:
    """The smaller one of the job's and its pool's, 0 for none, and who allows that much."""
    of_the_pool_bytes = limit_bytes(environ)
    if of_the_job_bytes and (not of_the_pool_bytes or of_the_job_bytes < of_the_pool_bytes):
        return of_the_job_bytes, "its job allows {} (output_limit)"
    return of_the_pool_bytes, f"its pool allows {{}} ({LIMIT})"


def size_bytes(folder: str) -> int:
    """Of all files below it. Links are not followed; what vanishes meanwhile is left out."""
    total, waiting = 0, [folder]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
    return total


class Outputs:
    """Measured now and then in a thread, and once more when the ranks have ended. `allowed` says who set the limit,
    with {} for its size.
    """

    def __init__(self, folder: str, limit_bytes: int, allowed: str):
        self._folder, self._limit_bytes, self._allowed = folder, limit_bytes, allowed
        self._size_bytes = 0
        self._due_s = lease.now_s() + FIRST_LOOK_S
        self._measuring: threading.Thread | None = None

    def look(self) -> str:
        """Never waits: "" or why the attempt may not go on, as it was seen last."""
        if not self._limit_bytes:
            return ""
        if lease.now_s() >= self._due_s and (self._measuring is None or not self._measuring.is_alive()):
            self._due_s = float("inf")
            self._measuring = threading.Thread(target=self._measure, name="outputs", daemon=True)
            self._measuring.start()
        return self._refusal()

    def last_look(self) -> str:
        if self._limit_bytes:
            self._measure()
        return self._refusal()

    def _measure(self) -> None:
        began_s = lease.now_s()
        self._size_bytes = size_bytes(self._folder)
        took_s = lease.now_s() - began_s
        self._due_s = began_s + took_s + max(LOOK_EVERY_S, REST * took_s)

    def _refusal(self) -> str:
        if not self._limit_bytes or self._size_bytes <= self._limit_bytes:
            return ""
        held, most = (f"{count / 2**20:,.1f} MiB" for count in (self._size_bytes, self._limit_bytes))
        return f"its folder POLYFLEET_OUTPUT_DIR has {held}, {self._allowed.format(most)}"

    def remove_empty(self) -> None:
        with suppress(OSError):
            Path(self._folder).rmdir()
