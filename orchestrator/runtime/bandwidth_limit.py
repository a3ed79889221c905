"""How fast checkpoints and files of jobs may go from one machine to another, where the server's owner limits it."""

import os
import threading
import time
from collections.abc import Callable, Mapping

from cluster.errors import UserError
from cluster.types import NodeFacts
from orchestrator.resource_syntax import size_bytes

SETTING = "POLYFLEET_COPY_RATE"
LEAST_BYTES_PER_S = 10**6
"""A piece of 8 MiB then waits for seconds, not for minutes."""


def copy_bytes_per_s(environment: Mapping[str, str] = os.environ) -> int | None:
    """Into or out of one machine; None: no limit. Raises UserError for what is not a rate."""
    wanted = environment.get(SETTING, "").strip()
    if not wanted:
        return None
    remedy = f"write bytes per second, at least 1MB, e.g. {SETTING}=50MB; leave it out for no limit"
    try:
        found = size_bytes(wanted)
    except UserError as e:
        raise UserError(f"{SETTING}: {e.message}", remedy) from None
    if found < LEAST_BYTES_PER_S:
        raise UserError(f"{SETTING}: {wanted} per second is too little", remedy)
    return found


class Pacer:
    """Spaces the pieces of each machine, so that on average no more than `bytes_per_s` go into and out of it, and never
    two at once: what was not used while nothing went is not made up for.
    """

    def __init__(self, bytes_per_s: float):
        self._bytes_per_s = bytes_per_s
        self._free_s: dict[str, float] = {}

    def booked(self, machines: tuple[str, str], now_s: float, piece_bytes: int) -> float:
        """Seconds that a piece between these machines has to wait. It counts from then on."""
        begins_s = max(now_s, *(self._free_s.get(machine, now_s) for machine in machines))
        for machine in machines:
            self._free_s[machine] = begins_s + piece_bytes / self._bytes_per_s
        return begins_s - now_s


class Pace:
    """At which copies go on. Safe to use from many threads."""

    def __init__(
        self,
        bytes_per_s: int | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._pacer = Pacer(bytes_per_s) if bytes_per_s is not None else None
        self._now, self._sleep, self._lock = now, sleep, threading.Lock()

    def wait(self, source: NodeFacts | None, target: NodeFacts | None, piece_bytes: int) -> None:
        """Until a piece may go. Within one machine nothing waits."""
        if self._pacer is None or source is None or target is None or _machine(source) == _machine(target):
            return
        with self._lock:
            wait_s = self._pacer.booked((_machine(source), _machine(target)), self._now(), piece_bytes)
        if wait_s > 0:
            self._sleep(wait_s)


def _machine(facts: NodeFacts) -> str:
    return f"{facts.host} {facts.address}"
