"""Kinds of a fleet that accept a recorded job, by its candidates, and its measured rate on each."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cluster.catalogue import EMULATED, model, resolve_kind
from cluster.errors import UserError
from orchestrator.core.model import Candidate, Devices, Job
from orchestrator.core.plan.options import fit
from orchestrator.core.throughput import Throughput
from orchestrator.simulation.fleets import Fleet
from orchestrator.simulation.job_history import JobRun, devices

RULES = (fit.right_kind, fit.right_pool, fit.emulated_only_if_named, fit.enough_memory)
UNKNOWN_BYTES = 1 << 62
"""Memory of a kind that is not in the catalogue: large enough for any job."""

MAX_RATIO = 1e6
"""Maximum ratio of two kinds' rates; a measurement beyond it is ignored."""


@dataclass(frozen=True, slots=True)
class JobRates:
    """Rates of a job.

    `rate`: on each kind of the fleet, relative to the kind where it ran longest; 0 if not accepted.

    `assumed`: at least one rate is 1 because there is no measurement.
    """

    rate: tuple[float, ...]
    assumed: bool


@dataclass(frozen=True, slots=True)
class KindAcceptance:
    """Computes rates. `pools`: the pools that had devices of each kind."""

    fleet: Fleet
    throughput: Throughput
    pools: dict[str, set[str]]

    def rates(self, job: JobRun) -> JobRates:
        gang, rates, assumed = devices(job.longest), [], False
        for kind, count in zip(self.fleet.kinds, self.fleet.devices.tolist(), strict=True):
            want = self._candidate(job, kind, gang) if gang <= count else None
            measured = self._measured(job, kind, want) if want is not None else 0.0
            rates.append(1.0 if measured is None else measured)
            assumed |= measured is None
        return JobRates(tuple(rates), assumed)

    def work_s(self, job: JobRun) -> float:
        """Work of all attempts, in seconds of the job's gang on the kind where it ran longest."""
        gang = devices(job.longest)
        seconds = 0.0
        for attempt in job.attempts:
            measured = self._measured(job, attempt.kind, job.record.candidate_of(attempt))
            seconds += job.lasted_s(attempt) * devices(attempt) / gang * (1.0 if measured is None else measured)
        return seconds

    def _measured(self, job: JobRun, kind: str, want: Candidate) -> float | None:
        """Rate relative to the kind where the job ran longest; None if one of the two was not measured."""
        if kind == job.longest.kind:
            return 1.0
        compared = (want, kind), (job.record.candidate_of(job.longest), job.longest.kind)
        on_kind, on_longest = (
            self.throughput.of(replace(job.record.job, candidates=(candidate,)), 0, at) for candidate, at in compared
        )
        if not (on_kind and on_longest and on_kind.items_per_s > 0 and on_longest.items_per_s > 0):
            return None
        ratio = on_kind.items_per_s / on_longest.items_per_s
        return ratio if 1 / MAX_RATIO <= ratio <= MAX_RATIO else None

    def _candidate(self, job: JobRun, kind: str, gang: int) -> Candidate | None:
        """Return the candidate that ran on this kind last, else the first that allows it with `gang` devices."""
        used = [job.record.candidate_of(a) for a in job.attempts if a.kind == kind]
        if used:
            return used[-1]
        log_job = job.record.job
        return next((want for want in log_job.candidates if self._accepts(log_job, want, kind, gang)), None)

    def _accepts(self, job: Job, want: Candidate, kind: str, gang: int) -> bool:
        """Check a candidate. One for a named node is rejected: the log does not contain what is in that node."""
        pool = want.pool if want.pool in self.pools.get(kind, ()) else "another"
        devices_of_kind = Devices(
            kind, "", pool, "", kind.partition(":")[0], kind, (), gang, _memory_bytes(kind), _emulated(kind)
        )
        is_refused = any(rule(want, devices_of_kind) for rule in RULES) or fit.vendor_change_reason(
            job, devices_of_kind
        )
        is_allowed_count = want.exclusive or want.min_count * want.nodes <= gang <= want.count * want.nodes
        return not is_refused and is_allowed_count and not want.node


def with_full_names(fleet: Fleet, kinds: Iterable[str]) -> Fleet:
    """Replace names of kinds by those in the log or the catalogue. Raises UserError for an unknown name."""
    log_kinds = set(kinds)
    try:
        names = [kind if kind in log_kinds else resolve_kind(kind) for kind in fleet.kinds]
    except UserError as e:
        raise UserError(
            f"--fleet: {e.message}", f"{e.remedy}; the log has {', '.join(sorted(log_kinds)[:20])}"
        ) from None
    if repeated := [kind for kind in names if names.count(kind) > 1]:
        raise UserError(f"--fleet: {repeated[0]} is named twice", f"write {repeated[0]} once, with all its devices")
    return replace(fleet, kinds=tuple(names))


def _memory_bytes(kind: str) -> int:
    card = model(kind)
    memory_gib = (card.memory_gib or (card.memory_gb or 0.0) * 1e9 / 2**30) if card else 0.0
    return int(memory_gib * 2**30) or UNKNOWN_BYTES


def _emulated(kind: str) -> bool:
    return kind.endswith(f":{EMULATED}")
