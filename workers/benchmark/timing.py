"""Blocks of calls timed by the clock that is right for the device, and what that clock itself costs.

An accelerator of CUDA, ROCm or XPU is timed by its own events; everything else by the host's clock round a block that
a forced synchronisation closes. MPS has events too, but they were unreliable before pytorch#196395.
"""

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend

WITH_EVENTS = ("cuda", "xpu")
LOOKS = 50
Refill = Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class TimedBlock:
    """Parts of `calls` calls each, with the seconds of each by the timer; `cpu_s` of this process in all of them, and
    how often the system took the CPU away. A short part is more often undisturbed than a long one."""

    calls: int
    parts_s: tuple[float, ...]
    cpu_s: float
    preempted: int

    @property
    def call_s(self) -> float:
        """The middle of the parts, per call."""
        return median(self.parts_s) / self.calls


class Timer:
    """`name` says which clock; `overhead_s` is what one empty block takes by it, measured at the start. `case_s` is
    what its user gives a case: no call is warmed up for longer.
    """

    def __init__(self, backend: "BaseBackend"):
        self._backend: BaseBackend | _Closing = backend
        self.case_s = inf
        self._device: Any = torch.get_device_module(backend.device) if backend.device.type in WITH_EVENTS else None
        self.name = f"{backend.device.type} events" if self._device else "host clock, synchronised"
        self.overhead_s = median(self.block(lambda: None, 1).parts_s[0] for _ in range(LOOKS))

    def by_host(self, synchronize: Callable[[], None]) -> "Timer":
        """For work that torch does not see: the host's clock, closed by `synchronize`."""
        other = object.__new__(Timer)
        other._backend, other.case_s, other._device = _Closing(self._backend, synchronize), self.case_s, None
        other.name = "host clock, synchronised"
        other.overhead_s = median(other.block(lambda: None, 1).parts_s[0] for _ in range(LOOKS))
        return other

    def block(self, call: Callable[[], Any], calls: int, parts: int = 1, refill: Refill = None) -> TimedBlock:
        """`refill`, if given, gets ready what the next `calls` use up; that is not timed.

        Every result is held until its step is cut off, so that a lazy device computes it, and no longer: one kept
        beyond that costs the next call fresh memory (a softmax of 4 MB took 1.5 times as long so, on our CPU).
        """
        self._backend.synchronize()
        one = self._by_events if self._device else self._by_host
        taken, cpu_s, preempted = [], 0.0, 0
        for _ in range(parts):
            self._refill(refill, calls)
            before, cpu = _switches(), process_time()
            taken.append(one(call, calls))
            cpu_s, preempted = cpu_s + process_time() - cpu, preempted + _switches() - before
        return TimedBlock(calls, tuple(taken), cpu_s, preempted)

    def _refill(self, refill: Refill, calls: int) -> None:
        if refill is not None:
            refill(calls)
            self._backend.step_boundary()
            self._backend.synchronize()

    def _by_host(self, call: Callable[[], Any], calls: int) -> float:
        boundary = self._backend.step_boundary
        begun = perf_counter()
        for _ in range(calls):
            kept = call()
            boundary()
            del kept
        self._backend.synchronize()
        return perf_counter() - begun

    def _by_events(self, call: Callable[[], Any], calls: int) -> float:
        begin, end = (self._device.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        self._backend.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def alone(self, call: Callable[[], Any], refill: Refill = None) -> float:
        """Seconds from asking for one call until it is done, by the host's clock: what a single request waits."""
        self._backend.synchronize()
        self._refill(refill, 1)
        begun = perf_counter()
        kept = call()
        self._backend.synchronize()
        seconds = perf_counter() - begun
        del kept
        return seconds


class _Closing:
    """What a timer asks of a back end, with another end of a block."""

    def __init__(self, backend: Any, synchronize: Callable[[], None]):
        self.device, self.step_boundary, self.synchronize = backend.device, backend.step_boundary, synchronize


def _switches() -> int:
    """Times that the system took a CPU away from this process. Source: getrusage(2), ru_nivcsw."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if os.name == "posix" else 0
