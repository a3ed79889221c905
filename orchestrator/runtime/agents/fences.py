"""Fences: the epoch of each job that counts while the server is silent; a channel beside leases.

A fence is in Ray's key-value store, and for nodes on this machine also in a folder, which agents read while Ray's head
does not respond. Changes of one job's fence are made in the order of their requests: a late change may still be made,
so the next one starts when it has returned. Jobs do not wait for each other.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.errors import FleetError
from cluster.fleet.identity import fleet_identity
from cluster.host import fences
from cluster.paths import home
from orchestrator.runtime.agents.ray_calls import RAY, ClusterLeft
from workers.protocol.messages import FENCE_KEY

LIMIT_S = 10.0
RAISE, LOWER, REMOVE = "raise a fence", "lower a fence", "remove a fence"
OnResult = Callable[[Any], None]
"""Called once, in another thread, with the current epoch of the fence or the exception."""


def raise_to(job: str, epoch: int, on_result: OnResult) -> None:
    """Raise a job's fence to at least `epoch`: older attempts stop as soon as their agent reads it."""
    _QUEUE.submit(job, _Change(RAISE, partial(_raise, job, epoch), on_result))


def lower_to(job: str, epoch: int, on_result: OnResult) -> None:
    """Lower a fence from `epoch` + 1 to `epoch`; a fence above that is not changed."""
    _QUEUE.submit(job, _Change(LOWER, partial(_lower, job, epoch), on_result))


def acquire(job: str, epoch: int, is_ours: bool) -> int:
    """Acquire `epoch` for an attempt that is about to start: raise the fence to it and return 0.

    If this or a newer epoch may already have run, change nothing and return the fence's epoch. `is_ours`: a fence at
    `epoch` is allowed, because this server raised it. Raises FleetError after LIMIT_S.
    """
    current_epoch: int = _QUEUE.run(job, RAISE, partial(_acquire, job, epoch, is_ours))
    return current_epoch


def remove(job: str) -> None:
    """Remove the fence of a removed job, of which no attempt can run. Raises FleetError after LIMIT_S."""
    _QUEUE.run(job, REMOVE, partial(_remove, job))


@dataclass(eq=False, slots=True)
class _Change:
    name: str
    make: Callable[[], Any]
    on_result: OnResult


class _PerJobQueue:
    """Per job: the change in progress, and at most one that waits for it. Thread-safe.

    A newer change replaces the waiting one, which gets an error.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_progress: dict[str, _Change] = {}
        self._next: dict[str, _Change] = {}

    def submit(self, job: str, change: _Change) -> None:
        with self._lock:
            current, replaced = self._in_progress.get(job), self._next.get(job)
            (self._in_progress if current is None else self._next)[job] = change
        if current is None:
            self._begin(job, change)
        elif replaced is not None:
            replaced.on_result(_late_error(job, current))

    def run(self, job: str, name: str, make: Callable[[], Any]) -> Any:
        """Make a change in its turn and return its result. Raises its error, or FleetError after LIMIT_S."""
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        change = _Change(name, make, results.put)
        self.submit(job, change)
        try:
            result = results.get(timeout=LIMIT_S)
        except queue.Empty:
            raise _late_error(job, self._give_up(job, change)) from None
        if isinstance(result, BaseException):
            raise result
        return result

    def _give_up(self, job: str, change: _Change) -> _Change:
        """Withdraw `change` unless it has started; return the change in progress that it waited for."""
        with self._lock:
            if self._next.get(job) is change:
                del self._next[job]
            return self._in_progress.get(job, change)

    def _begin(self, job: str, change: _Change) -> None:
        RAY.submit(change.name, change.make, LIMIT_S, partial(self._finish, job, change))

    def _finish(self, job: str, change: _Change, result: Any) -> None:
        was_left = isinstance(result, ClusterLeft)
        with self._lock:
            next_change = self._next.pop(job, None)
            if next_change is None or was_left:
                del self._in_progress[job]
            else:
                self._in_progress[job] = next_change
        change.on_result(result)
        if next_change is not None and was_left:
            next_change.on_result(result)
        elif next_change is not None:
            self._begin(job, next_change)


_QUEUE = _PerJobQueue()
"""One for the process, as there is one Ray connection."""


def _late_error(job: str, change: _Change) -> FleetError:
    remedy = "`polyfleet doctor` shows what the server waits for"
    return FleetError(f"Ray has not answered yet the request to {change.name} of job {job}", remedy)


def _raise(job: str, epoch: int) -> int:
    """Write even if the store has this epoch: a failed change may have written only the folder."""
    epoch = max(_read(job), epoch)
    _change(job, epoch)
    return epoch


def _acquire(job: str, epoch: int, is_ours: bool) -> int:
    current_epoch = _read(job)
    if current_epoch > epoch or (current_epoch == epoch and not is_ours):
        return current_epoch
    _change(job, epoch)
    return 0


def _lower(job: str, epoch: int) -> int:
    """Write also if the store has this epoch, or none: see _raise."""
    current_epoch = _read(job)
    if current_epoch > epoch + 1:
        return current_epoch
    _change(job, epoch)
    return epoch


def _change(job: str, epoch: int) -> None:
    """Write a fence.

    Raises ClusterLeft if the cluster was left: what was read there is not valid for the next one.
    """
    if RAY.is_left:
        raise ClusterLeft("change a fence")
    _write(job, epoch)


def _remove(job: str) -> None:
    from ray.experimental.internal_kv import _internal_kv_del

    fences.remove(fences.local_folder(), job)
    _internal_kv_del(_key(job))


def _key(job: str) -> str:
    return FENCE_KEY.format(fleet=fleet_identity(home()), job=job)


def _read(job: str) -> int:
    from ray.experimental.internal_kv import _internal_kv_get

    value: bytes | None = _internal_kv_get(_key(job))
    return int(value) if value else 0


def _write(job: str, epoch: int) -> None:
    """Write the folder first, which is read second: a fence reported as written is then in both."""
    from ray.experimental.internal_kv import _internal_kv_put

    fences.write(fences.local_folder(), job, epoch)
    _internal_kv_put(_key(job), str(epoch), overwrite=True)
