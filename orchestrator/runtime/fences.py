"""The second channel of a lease: which epoch of a job counts when the server is silent. It lies in Ray's key-value
store, and for nodes of this machine in a folder that is read while Ray's head does not answer.

The fence of a job changes in the order in which that was asked for: a change that is late may still be made, so the
next begins when it has returned. Jobs do not wait for each other.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster import fences
from cluster.errors import FleetError
from cluster.identity import fleet_identity
from cluster.paths import home
from orchestrator.runtime.ray_calls import RAY, ClusterLeft
from workers.messages import FENCE_KEY

LIMIT_S = 10.0
RAISE, LOWER, REMOVE = "raise a fence", "lower a fence", "remove a fence"
Answered = Callable[[Any], None]
"""Gets what stands, or the exception, once, in another thread."""


def raise_to(job: str, epoch: int, answered: Answered) -> None:
    """Attempts of an older epoch stop as soon as their agent reads it. What stands may be higher."""
    _IN_TURN.ask(job, _Change(RAISE, partial(_raise, job, epoch), answered))


def lower_to(job: str, epoch: int, answered: Answered) -> None:
    """Take down a fence that stands just above `epoch`."""
    _IN_TURN.ask(job, _Change(LOWER, partial(_lower, job, epoch), answered))


def take(job: str, epoch: int, ours: bool) -> int:
    """For an attempt that is to start. Where that epoch or a newer one may have run already, nothing changes, and what
    stands is returned; else 0. `ours`: the fence may stand there since we raised it. Raises FleetError after LIMIT_S.
    """
    stands: int = _IN_TURN.run(job, RAISE, partial(_take, job, epoch, ours))
    return stands


def forget(job: str) -> None:
    """Of a job that was removed: nothing of it can run any more. Raises FleetError after LIMIT_S."""
    _IN_TURN.run(job, REMOVE, partial(_forget, job))


@dataclass(eq=False, slots=True)
class _Change:
    name: str
    make: Callable[[], Any]
    answered: Answered


class _InTurn:
    """By job, the change under way and the one that waits for it: the newest counts, and the one before it is answered
    with an error. Safe from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[str, _Change] = {}
        self._next: dict[str, _Change] = {}

    def ask(self, job: str, change: _Change) -> None:
        with self._lock:
            before, replaced = self._under_way.get(job), self._next.get(job)
            (self._under_way if before is None else self._next)[job] = change
        if before is None:
            self._begin(job, change)
        elif replaced is not None:
            replaced.answered(_late(job, before))

    def run(self, job: str, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns or raises."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        change = _Change(name, make, answer.put)
        self.ask(job, change)
        try:
            told = answer.get(timeout=LIMIT_S)
        except queue.Empty:
            raise _late(job, self._give_up(job, change)) from None
        if isinstance(told, BaseException):
            raise told
        return told

    def _give_up(self, job: str, change: _Change) -> _Change:
        """What it waited for; it is not begun any more, if it was not."""
        with self._lock:
            if self._next.get(job) is change:
                del self._next[job]
            return self._under_way.get(job, change)

    def _begin(self, job: str, change: _Change) -> None:
        RAY.ask(change.name, change.make, LIMIT_S, partial(self._returned, job, change))

    def _returned(self, job: str, change: _Change, told: Any) -> None:
        left = isinstance(told, ClusterLeft)
        with self._lock:
            following = self._next.pop(job, None)
            if following is None or left:
                del self._under_way[job]
            else:
                self._under_way[job] = following
        change.answered(told)
        if following is not None and left:
            following.answered(told)
        elif following is not None:
            self._begin(job, following)


_IN_TURN = _InTurn()
"""Ray is one for the whole process, and so is the order of what is asked of it."""


def _late(job: str, change: _Change) -> FleetError:
    remedy = "`polyfleet doctor` tells what the server waits for"
    return FleetError(f"Ray has not answered yet to {change.name}, that of {job}", remedy)


def _raise(job: str, epoch: int) -> int:
    """Also where the store has it: a change that failed may have written the folder alone, which ranks read."""
    epoch = max(_read(job), epoch)
    _change(job, epoch)
    return epoch


def _take(job: str, epoch: int, ours: bool) -> int:
    stands = _read(job)
    if stands > epoch or (stands == epoch and not ours):
        return stands
    _change(job, epoch)
    return 0


def _lower(job: str, epoch: int) -> int:
    """Also where the store has it so, or has none: see _raise."""
    stands = _read(job)
    if stands > epoch + 1:
        return stands
    _change(job, epoch)
    return epoch


def _change(job: str, epoch: int) -> None:
    """What was read of a cluster that was left says nothing about the next one."""
    if RAY.left:
        raise ClusterLeft("change a fence")
    _write(job, epoch)


def _forget(job: str) -> None:
    from ray.experimental.internal_kv import _internal_kv_del

    fences.remove(fences.local_folder(), job)
    _internal_kv_del(_key(job))


def _key(job: str) -> str:
    return FENCE_KEY.format(fleet=fleet_identity(home()), job=job)


def _read(job: str) -> int:
    from ray.experimental.internal_kv import _internal_kv_get

    found: bytes | None = _internal_kv_get(_key(job))
    return int(found) if found else 0


def _write(job: str, epoch: int) -> None:
    """First where it is read second: what was told to be written can be read everywhere."""
    from ray.experimental.internal_kv import _internal_kv_put

    fences.write(fences.local_folder(), job, epoch)
    _internal_kv_put(_key(job), str(epoch), overwrite=True)
