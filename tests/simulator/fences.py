"""Simulated changes of fences: one at a time per job; each may be late, unanswered or in time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulator.server import SimulatedServer


@dataclass(eq=False, slots=True)
class FenceChange:
    """A change of a fence. `write` maps its epoch to the new one; `on_result` gets both, and an error or ""."""

    write: Callable[[int], int]
    on_result: Callable[[int, int, str], None]


class SimulatedFences:
    """Fences of one server process.

    `is_current()`: whether the server still uses this object, not that of a later process.
    """

    def __init__(self, server: "SimulatedServer", is_current: Callable[[], bool]):
        self.server, self.world, self.is_current = server, server.world, is_current
        self._waiting: dict[str, list[FenceChange]] = {}

    def change(self, job: str, change: FenceChange) -> None:
        """Request a change. One per job is in progress at a time; a newer change replaces a waiting one."""
        queue = self._waiting.setdefault(job, [])
        if len(queue) == 2:
            queue.pop().on_result(0, 0, "a newer change replaced it")
        queue.append(change)
        if len(queue) == 1:
            self._begin(job)

    def withdraw(self, job: str, change: FenceChange) -> None:
        """Withdraw a change: drop it if it has not started; one in progress may still be made."""
        change.on_result = lambda before, after, error: None
        if change in (queue := self._waiting.get(job, []))[1:]:
            queue.remove(change)

    def abandon(self) -> None:
        """Fail all changes with an error, because the server has left the cluster."""
        fences, self._waiting = self._waiting, {}
        for change in [change for queue in fences.values() for change in queue]:
            change.on_result(0, 0, "the cluster was left")

    def _begin(self, job: str) -> None:
        change = self._waiting[job][0]
        self.server.later(self.world.rng.uniform(0.002, 0.05), self._write, job, change)

    def _write(self, job: str, change: FenceChange) -> None:
        """Write the fence.

        A head that does not reply may write it later, write it without a reply, or not at all; then the folder alone
        has the new fence, or neither has it.
        """
        ray, rng = self.world.ray, self.world.rng
        if change not in self._waiting.get(job, [])[:1]:
            return
        error = ""
        if self.world.faults.fences_fail and not self.world.healed and rng.random() < self.world.faults.fences_fail:
            if rng.random() < 0.5:
                ray.folder[job] = change.write(ray.fences.get(job, 0))
            self.server.later(0.005, self._finish, job, change, 0, 0, "the fence could not be written")
            return
        if ray.is_away or ray.fences_away:
            if (draw := rng.random()) < 0.2:
                before = ray.fences.get(job, 0)
                ray.folder[job] = after = change.write(before)
                self._arrive(job, change, before, after, (ray.head, self.server.life))
                return
            if draw < 0.8:
                self.server.later(0.5, self._write, job, change)
                return
            error = "the fence cannot be written"
            if draw < 0.9:
                if draw < 0.85:
                    ray.folder[job] = change.write(ray.fences.get(job, 0))
                self.server.later(0.005, self._finish, job, change, 0, 0, error)
                return
        before = ray.fences.get(job, 0)
        ray.folder[job] = after = change.write(before)
        self._set_epoch(job, before, after, self.server.life)
        self.server.later(0.005, self._finish, job, change, before, 0 if error else after, error)

    def _arrive(self, job: str, change: FenceChange, before: int, after: int, sent: tuple[int, int]) -> None:
        """Carry out a request that has reached the head, even if the server has ended or left since.

        A call to a head that is gone ends with an error. `sent`: (head, life of the server) of the request.
        """
        ray, error = self.world.ray, ""
        if ray.is_away or ray.fences_away:
            self.world.after(0.1, self._arrive, job, change, before, after, sent)
            return
        head, life = sent
        if ray.head == head:
            self._set_epoch(job, before, after, life)
        else:
            before, after, error = 0, 0, "the head is gone"
        if self.is_current():
            self.server.later(0.005, self._finish, job, change, before, after, error)

    def _set_epoch(self, job: str, before: int, after: int, life: int) -> None:
        ray = self.world.ray
        ray.fences[job] = after
        if after > before:
            ray.raised_by[job] = life

    def _finish(self, job: str, change: FenceChange, before: int, after: int, error: str) -> None:
        queue = self._waiting.get(job, [])
        if change not in queue[:1]:
            return
        queue.pop(0)
        change.on_result(before, after, error)
        if queue:
            self._begin(job)
        else:
            del self._waiting[job]
