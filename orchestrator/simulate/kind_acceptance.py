"""Which kinds of a fleet take a job that ran, and at which rate: as it asked to be run, and as benchmarks measured."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cluster.catalogue import EMULATED, model, require_known_kind
from cluster.errors import UserError
from orchestrator.core import fit
from orchestrator.core.model import Candidate, Devices, Job
from orchestrator.core.throughput import Throughput
from orchestrator.simulate.fleets import Fleet
from orchestrator.simulate.job_history import Ran, devices

RULES = (fit.right_kind, fit.right_pool, fit.not_emulated_unasked, fit.enough_memory)
UNKNOWN_BYTES = 1 << 62
"""Of memory: a kind that no catalogue lists is large enough."""

MOST_APART = 1e6
"""No kind is faster than another by more: such a measurement is none."""


@dataclass(frozen=True, slots=True)
class Rated:
    """`rate` of the job's gang on each kind of the fleet, as a multiple of that on the kind where it ran longest; 0
    where it may not run. `assumed`: one of them is 1 because nobody measured it.
    """

    rate: tuple[float, ...]
    assumed: bool


@dataclass(frozen=True, slots=True)
class Accepting:
    """`pools` are those in which devices of each kind were."""

    fleet: Fleet
    throughput: Throughput
    pools: dict[str, set[str]]

    def rated(self, job: Ran) -> Rated:
        gang, rates, assumed = devices(job.longest), [], False
        for kind, count in zip(self.fleet.kinds, self.fleet.devices.tolist(), strict=True):
            candidate = self._candidate(job, kind, gang) if gang <= count else None
            measured = self._measured(job, kind, candidate) if candidate is not None else 0.0
            rates.append(1.0 if measured is None else measured)
            assumed |= measured is None
        return Rated(tuple(rates), assumed)

    def work_s(self, job: Ran) -> float:
        """Of all its attempts, in seconds of its gang on the kind where it ran longest."""
        gang = devices(job.longest)
        seconds = 0.0
        for attempt in job.attempts:
            measured = self._measured(job, attempt.kind, attempt.candidate)
            seconds += job.lasted_s(attempt) * devices(attempt) / gang * (1.0 if measured is None else measured)
        return seconds

    def _measured(self, job: Ran, kind: str, candidate: int) -> float | None:
        """Beside where it ran longest. None where one of the two was not measured."""
        if kind == job.longest.kind:
            return 1.0
        asked = job.record.job
        if max(candidate, job.longest.candidate) >= len(asked.candidates):
            return None  # it has been moved since, to other candidates
        here, there = (
            self.throughput.of(asked, *place)
            for place in ((candidate, kind), (job.longest.candidate, job.longest.kind))
        )
        if not (here and there and here.items_per_s > 0 and there.items_per_s > 0):
            return None
        ratio = here.items_per_s / there.items_per_s
        return ratio if 1 / MOST_APART <= ratio <= MOST_APART else None

    def _candidate(self, job: Ran, kind: str, gang: int) -> int | None:
        """The first with which it may run there, on as many devices."""
        on_it = [a.candidate for a in job.attempts if a.kind == kind]
        if on_it:
            return on_it[-1]
        asked = job.record.job
        fits = (i for i, want in enumerate(asked.candidates) if self._takes(asked, want, kind, gang))
        return next(fits, None)

    def _takes(self, job: Job, want: Candidate, kind: str, gang: int) -> bool:
        """A candidate for one named node is for what is in it, which the log tells of its attempts alone."""
        pool = want.pool if want.pool in self.pools.get(kind, ()) else "another"
        have = Devices(kind, "", pool, "", kind.partition(":")[0], kind, (), gang, _memory_bytes(kind), _emulated(kind))
        refused = any(rule(want, have) for rule in RULES) or fit.other_vendor(job, have)
        counts = want.exclusive or want.min_count * want.nodes <= gang <= want.count * want.nodes
        return not refused and counts and not want.node


def spelled(fleet: Fleet, kinds: Iterable[str]) -> Fleet:
    """With names of kinds as the log has them, or the catalogue. Raises UserError for one that neither knows."""
    known = set(kinds)
    try:
        named = [kind if kind in known else require_known_kind(kind) for kind in fleet.kinds]
    except UserError as e:
        raise UserError(f"--fleet: {e.message}", f"{e.remedy}; the log has {', '.join(sorted(known)[:20])}") from None
    if twice := [kind for kind in named if named.count(kind) > 1]:
        raise UserError(f"--fleet: {twice[0]} is named twice", f"write {twice[0]} once, with all its devices")
    return replace(fleet, kinds=tuple(named))


def _memory_bytes(kind: str) -> int:
    card = model(kind)
    memory_gib = (card.memory_gib or (card.memory_gb or 0.0) * 1e9 / 2**30) if card else 0.0
    return int(memory_gib * 2**30) or UNKNOWN_BYTES


def _emulated(kind: str) -> bool:
    return kind.endswith(f":{EMULATED}")
