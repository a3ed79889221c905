"""Optional rate limit for copies of checkpoints, job files and code archives between machines.

cluster/host/copy_rate.py reads the setting, and paces what nodes send to object stores and get from them.
"""

import threading
import time
from collections.abc import Callable

from cluster.types import HostAddress, NodeFacts


class Pacer:
    """Schedule pieces so that each machine sends and receives at most `bytes_per_s`, one piece at a time.

    Unused time is not credited: there are no bursts after a pause.
    """

    def __init__(self, bytes_per_s: float):
        self._bytes_per_s = bytes_per_s
        self._free_s: dict[str, float] = {}

    def book(self, machines: tuple[str, str], now_s: float, piece_bytes: int) -> float:
        """Book a piece between two machines and return the seconds that it must wait."""
        start_s = max(now_s, *(self._free_s.get(machine, now_s) for machine in machines))
        for machine in machines:
            self._free_s[machine] = start_s + piece_bytes / self._bytes_per_s
        return start_s - now_s


class RateLimit:
    """Make copies wait for the rate limit. Thread-safe."""

    def __init__(
        self,
        bytes_per_s: int | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._pacer = Pacer(bytes_per_s) if bytes_per_s is not None else None
        self._now, self._sleep, self._lock = now, sleep, threading.Lock()

    def wait(self, source: NodeFacts | HostAddress | None, target: NodeFacts | None, piece_bytes: int) -> None:
        """Wait until a piece may be sent. Copies within one machine never wait."""
        if self._pacer is None or source is None or target is None or _machine_key(source) == _machine_key(target):
            return
        with self._lock:
            wait_s = self._pacer.book((_machine_key(source), _machine_key(target)), self._now(), piece_bytes)
        if wait_s > 0:
            self._sleep(wait_s)


def _machine_key(machine: NodeFacts | HostAddress) -> str:
    return f"{machine.host} {machine.address}"
