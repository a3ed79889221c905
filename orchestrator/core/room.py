"""What is left of the fleet while a plan is made: it starts as the snapshot and shrinks with every decision."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from orchestrator.core.fit import LASTING, refusal
from orchestrator.core.gang import Island, Option, islands
from orchestrator.core.model import Candidate, Devices, Job, Running, Snapshot

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Places:
    """Where a candidate could run if enough were free: devices ids by island. `refused` has the others, with why."""

    islands: dict[Island, tuple[str, ...]]
    refused: dict[tuple[int, str], str]


class Room:
    """`devices`: free is what nobody took or keeps. `soon`: leased by who stops. `kept`: how many for whom. `version`
    grows with every change: what did not fit does not fit as long as it stays.
    """

    def __init__(self, snapshot: Snapshot):
        self.devices: dict[str, Devices] = {d.id: d for d in sorted(snapshot.devices, key=lambda d: d.id)}
        self.running: dict[str, Running] = {r.job: r for r in sorted(snapshot.running, key=lambda r: r.job)}
        self.soon: dict[str, Numbers] = {}
        self.kept: dict[str, dict[str, int]] = {}
        self.version = 0
        self._places: dict[tuple[object, ...], Places] = {}
        for attempt in list(self.running.values()):
            if attempt.stopping:
                self.stop(attempt)

    def places(self, index: int, want: Candidate) -> Places:
        """Found once for all candidates that ask for the same: a queue holds many jobs and few kinds of them."""
        key = (index, *asked(want))
        if key not in self._places:
            refused = {have.id: refusal(want, have, LASTING) for have in self.devices.values()}
            able = islands(want, (have for have in self.devices.values() if not refused[have.id]))
            self._places[key] = Places(
                {island: tuple(have.id for have in nodes) for island, nodes in able.items()},
                {(index, devices_id): why for devices_id, why in refused.items() if why},
            )
        return self._places[key]

    def take(self, option: Option) -> None:
        for devices_id, numbers in option.leases:
            self._without(devices_id, numbers)

    def stop(self, attempt: Running) -> None:
        """Its devices come free soon, and nobody else may count on stopping it."""
        self.version += 1
        del self.running[attempt.job]
        for devices_id, numbers in attempt.leases:
            self.soon[devices_id] = tuple(sorted({*self.soon.get(devices_id, ()), *numbers}))

    def promised(self, devices_id: str) -> int:
        """Devices that are free, or will be without anything more being done."""
        return len(self.devices[devices_id].free) + len(self.soon.get(devices_id, ()))

    def keep(self, job: str, devices_id: str, count: int) -> None:
        """Set `count` devices aside for a job that waits, `soon` ones first, so that free ones are used meanwhile."""
        soon = self.soon.get(devices_id, ())
        if soon:
            self.version += 1
            self.soon[devices_id] = soon[count:]
        idle = sorted(self.devices[devices_id].free)[: max(0, count - len(soon))]
        if idle:
            self._without(devices_id, idle)
            self.kept.setdefault(devices_id, {})[job] = len(idle)

    def note(self, devices_id: str) -> str:
        """For a refusal's sentence: which free devices are not to be had because they wait for somebody."""
        kept = self.kept.get(devices_id, {})
        return "".join(f"; {count} more kept for {job}, which goes first" for job, count in kept.items())

    def shape(self, job: Job) -> tuple[object, ...]:
        """Equal for jobs that a plan treats alike."""
        vendor = "" if job.recovery.cross_vendor else job.backend
        wants = tuple((want.nodes, *asked(want)) for want in job.candidates)
        return (job.priority, job.objective, vendor, job.ordered, job.first_candidate, job.avoid, wants)

    def _without(self, devices_id: str, numbers: Iterable[int]) -> None:
        self.version += 1
        have = self.devices[devices_id]
        self.devices[devices_id] = replace(have, free=tuple(sorted(set(have.free) - set(numbers))))


def asked(want: Candidate) -> tuple[object, ...]:
    """What decides on which devices it may run."""
    return (want.kinds, want.pool, want.node, want.memory_bytes, want.min_count, want.count, want.exclusive)
