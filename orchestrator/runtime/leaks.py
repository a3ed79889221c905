"""Devices that are held for nobody: found, given back where that is safe, and told of where it is not."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.fleet_record import FleetRecord
from orchestrator.core.fold import Record
from orchestrator.core.states import TERMINAL
from orchestrator.runtime import reservations
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.engine import RAY
from orchestrator.runtime.follow import LEASE_MARGIN_S
from orchestrator.runtime.jobs import Jobs
from orchestrator.runtime.live import Live

LOOK_EVERY_S = 60.0
LIMIT_S = 10.0
SOON_S = 10.0
"""What ends in the ordinary way has been put away by then."""


@dataclass(frozen=True, slots=True)
class Leak:
    """An attempt that holds what it should not, and why that is known."""

    attempt: str
    reason: str


def job_of(attempt: str) -> str:
    return attempt.rpartition(".")[0]


def kept_by_ended_jobs(records: Iterable[Record], now_s: float) -> list[Leak]:
    """Jobs that ended while their attempt still has devices: past its lease it has no right to run."""
    found = []
    for record in records:
        job, live = record.job, record.live
        if live is None or job.state not in TERMINAL or record.ended_s is None:
            continue
        limit_s = job.recovery.lease_s + LEASE_MARGIN_S + SOON_S
        if (kept_s := now_s - record.ended_s) > limit_s:
            devices = ", ".join(f"{devices_id} {list(numbers)}" for devices_id, numbers in live.leases)
            reason = f"the job is {job.state} for {kept_s:.0f} s, and its attempt still holds {devices}"
            found.append(Leak(f"{job.id}.{live.epoch}", reason))
    return found


class Leaks:
    """Only the controller's thread calls it, but for `found`."""

    def __init__(
        self, jobs: Jobs, agents: Agents, lives: dict[str, Live], post: Callable[[tuple[Any, ...]], None]
    ) -> None:
        self._jobs, self._agents, self._lives, self._post = jobs, agents, lives, post
        self._next_s = 0.0
        self._over_since: dict[str, float] = {}
        self._released: set[str] = set()
        self._reserved: tuple[Leak, ...] = ()

    def look_now(self) -> None:
        self._next_s = 0.0

    def look(self, fleet: FleetRecord | None, holding: str) -> None:
        """Once a minute, ask Ray what is reserved in our name; the answer is the message ("held", fleet, attempts)."""
        now = time.monotonic()
        over = [live.key for live in self._lives.values() if live.over]
        self._over_since = {key: self._over_since.get(key, now) for key in over}
        if now >= self._next_s and not holding:
            self._next_s = now + LOOK_EVERY_S
            RAY.ask("list reserved devices", reservations.list_held, LIMIT_S, lambda a: self._post(("held", fleet, a)))

    def held(self, fleet: FleetRecord | None, attempts: Any) -> None:
        """A reservation without an attempt goes back. What the store does not know may be another home's."""
        if isinstance(attempts, BaseException):
            return
        living = {live.key for live in self._lives.values()}
        idle = [attempt for attempt in attempts if attempt not in living]
        ours = [a for a in idle if job_of(a) in self._jobs or self._nowhere(a, fleet)]
        again = [Leak(a, "its reservation in Ray, given back, is still there") for a in ours if a in self._released]
        strange = [Leak(a, "it is reserved in Ray, and this database has no such job") for a in idle if a not in ours]
        self._reserved, self._released = (*again, *strange), set(ours)
        for attempt in ours:
            RAY.ask(f"release {attempt}", partial(reservations.give_back, attempt), LIMIT_S, _told_by_the_next_look)

    def _nowhere(self, attempt: str, fleet: FleetRecord | None) -> bool:
        """Of our own fleet, whose nodes all answer, none runs it."""
        nodes = self._agents.items()
        told = bool(nodes) and all(agent.ready for _, agent in nodes)
        running = any(key.startswith(f"{attempt}.") for _, agent in nodes for key in agent.strangers)
        return fleet is not None and fleet.embedded and told and not running

    def found(self) -> list[Leak]:
        """All that is known now."""
        now = time.monotonic()
        stuck = [
            Leak(key, f"all its parts ended {now - since:.0f} s ago, and it is not concluded")
            for key, since in list(self._over_since.items())
            if now - since > SOON_S
        ]
        running = {key.rpartition(".")[0] for _, agent in self._agents.items() for key in agent.unknown}
        reserved = [leak for leak in self._reserved if leak.attempt not in running]  # those are told as such
        return [*kept_by_ended_jobs(self._jobs.all(), time.time()), *stuck, *reserved]


def _told_by_the_next_look(_: Any) -> None: ...
