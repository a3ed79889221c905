"""Time blocks of calls with the clock that suits the device, and measure that clock's overhead.

CUDA, ROCm and XPU devices are timed by their own events; everything else by the host's clock around a block that ends
with a synchronisation. MPS also has events, but they were unreliable before pytorch#196395.
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
    from workers.devices.backends.base import BaseBackend

WITH_EVENTS = ("cuda", "xpu")
OVERHEAD_SAMPLES = 50
Refill = Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class TimedBlock:
    """Times of parts of `calls` calls each, in seconds; `cpu_s` of this process and the number of preemptions in all of
    them. Parts are short, because a short part is more often undisturbed than a long one."""

    calls: int
    parts_s: tuple[float, ...]
    cpu_s: float
    preempted: int

    @property
    def call_s(self) -> float:
        """Median seconds per call of the parts."""
        return median(self.parts_s) / self.calls


class Timer:
    """`name` is the clock; `overhead_s` the time of an empty block, measured at the start. `case_s` is the user's time
    limit per case: no call is warmed up for longer.
    """

    def __init__(self, backend: "BaseBackend"):
        self._backend: BaseBackend | _WithSynchronize = backend
        self.case_s = inf
        self._device: Any = torch.get_device_module(backend.device) if backend.device.type in WITH_EVENTS else None
        self.name = f"{backend.device.type} events" if self._device else "host clock, synchronised"
        self.overhead_s = median(self.block(lambda: None, 1).parts_s[0] for _ in range(OVERHEAD_SAMPLES))

    def by_host(self, synchronize: Callable[[], None]) -> "Timer":
        """Return a timer for work outside torch: the host's clock, with `synchronize` at the end of a block."""
        other = object.__new__(Timer)
        other._backend, other.case_s, other._device = _WithSynchronize(self._backend, synchronize), self.case_s, None
        other.name = "host clock, synchronised"
        other.overhead_s = median(other.block(lambda: None, 1).parts_s[0] for _ in range(OVERHEAD_SAMPLES))
        return other

    def block(self, call: Callable[[], Any], calls: int, parts: int = 1, refill: Refill = None) -> TimedBlock:
        """Time `parts` parts of `calls` calls. `refill`, which is not timed, prepares the inputs of each part.

        Every result is held until its step boundary, so that a lazy device computes it, and no longer: otherwise the
        next call would need new memory (a softmax of 4 MB then took 1.5 times as long on our CPU).
        """
        self._backend.synchronize()
        time_part = self._by_events if self._device else self._by_host
        times_s, cpu_s, preempted = [], 0.0, 0
        for _ in range(parts):
            self._refill(refill, calls)
            before, cpu = _preemptions(), process_time()
            times_s.append(time_part(call, calls))
            cpu_s, preempted = cpu_s + process_time() - cpu, preempted + _preemptions() - before
        return TimedBlock(calls, tuple(times_s), cpu_s, preempted)

    def _refill(self, refill: Refill, calls: int) -> None:
        if refill is not None:
            refill(calls)
            self._backend.step_boundary()
            self._backend.synchronize()

    def _by_host(self, call: Callable[[], Any], calls: int) -> float:
        boundary = self._backend.step_boundary
        started = perf_counter()
        for _ in range(calls):
            result = call()
            boundary()
            del result
        self._backend.synchronize()
        return perf_counter() - started

    def _by_events(self, call: Callable[[], Any], calls: int) -> float:
        begin, end = (self._device.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        self._backend.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def single_call_s(self, call: Callable[[], Any], refill: Refill = None) -> float:
        """Seconds from the start of one call until it is done, by the host's clock: the latency of one request."""
        self._backend.synchronize()
        self._refill(refill, 1)
        started = perf_counter()
        result = call()
        self._backend.synchronize()
        seconds = perf_counter() - started
        del result
        return seconds


class _WithSynchronize:
    """The back end's interface that a timer uses, with another `synchronize`."""

    def __init__(self, backend: Any, synchronize: Callable[[], None]):
        self.device, self.step_boundary, self.synchronize = backend.device, backend.step_boundary, synchronize


def _preemptions() -> int:
    """Number of times that the kernel preempted this process. Source: getrusage(2), ru_nivcsw."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if os.name == "posix" else 0
