"""Estimate the remaining time of a job on a number of devices of a kind. Pure.

Sources, best first: its own reports, its user's declaration, earlier jobs of its workload, or as long as it has run.
Its speed, on a kind where it has not reported one, is its own on another kind, scaled by a benchmark or by what other
jobs of its workload reported on both, or else what another job reported there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cluster.catalogue import matches_pattern
from orchestrator.core.model import Job, Progress, Running
from orchestrator.core.throughput import History, Throughput

Source = Literal["declared", "reported", "history", "attained"]

StepRates = Mapping[tuple[str, int], tuple[float, str]]
"""By kind and number of devices: steps per second, and the other job that reported them or ""."""

INFINITE = float("inf")
MIN_REMAINING_S = 1.0
MAX_REMAINING_S = 100 * 365 * 86400.0
MAX_STEPS_PER_S = 1e12
MIN_ATTAINED_S = 300.0
"""Assumed duration on one device of a job without any evidence."""

MIN_PROGRESS = 0.05
"""Fraction of all steps from which on the mean rate over all attempts is used; before, starts dominate it."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence for the duration of a job. `attained`: device-seconds by kind so far, the live attempt included."""

    throughput: Throughput = field(default_factory=Throughput)
    progress: Progress = field(default_factory=Progress)
    history: History = field(default_factory=History)
    attained: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Remaining:
    """Remaining time, at least MIN_REMAINING_S. `steps_per_s` is the speed on which it is based, 0 if unknown.

    `speed_of`: the other job that reported this speed, "" if it is the job's own.
    """

    seconds: float
    source: Source
    steps_per_s: float = 0.0
    speed_of: str = ""

    @property
    def sentence(self) -> str:
        """Text such as `about 2 h 10 min left at 3.1 steps/s (reported)`."""
        if self.source == "attained":
            return f"unknown; {_text(self.seconds)} assumed (attained)"
        speed = f" at {self.steps_per_s:.3g} steps/s" if self.steps_per_s else ""
        of_other = f"; speed reported by job {self.speed_of}" if self.speed_of else ""
        return f"about {_text(self.seconds)} left{speed} ({self.source}{of_other})"


def remaining(job: Job, kind: str, devices: int, evidence: Evidence) -> Remaining:
    """Return the remaining time on `devices` devices of `kind` on all nodes, assuming linear scaling.

    If a job has run for longer than declared, or than earlier jobs, the next source is used.
    """
    devices = max(1, devices)
    return (
        _from_steps(job, kind, devices, evidence)
        or _from_work(job, kind, devices, evidence)
        or Remaining(_bounded(max(_attained(job, kind, evidence), MIN_ATTAINED_S) / devices), "attained")
    )


def attained(progress: Progress, running: Running | None, ran_s: float) -> dict[str, float]:
    """Return the device-seconds of a job by kind. `running` is its live attempt, which has run for `ran_s`."""
    by_kind = dict(progress.ran_on)
    if running is not None and ran_s > 0:
        kind = running.allocation[0][0].partition("/")[2]
        devices = sum(len(numbers) for _, numbers in running.allocation)
        by_kind[kind] = by_kind.get(kind, 0.0) + ran_s * devices
    return by_kind


def has_evidence(job: Job, kind: str, evidence: Evidence) -> bool:
    """Return True if `remaining` on this kind has real evidence, and does not assume that kinds are equally fast."""
    kinds = {at for at, _ in _reported_rates(job, kind, evidence)}
    if (evidence.progress.of or job.work.steps) and kinds:
        return kind in kinds or any(_measured_ratio(job, kind, other, evidence) is not None for other in kinds)
    if job.work.hours:
        at = _kind_of(job.work.on, job, kind, evidence)
        return at == kind or _measured_ratio(job, at, kind, evidence) is not None
    usual = evidence.history.of(job)
    return kind in usual or any(_measured_ratio(job, other, kind, evidence) is not None for other in usual)


def _from_steps(job: Job, kind: str, devices: int, evidence: Evidence) -> Remaining | None:
    progress = evidence.progress
    total = progress.of or job.work.steps
    if not total or progress.step > total:
        return None
    rate, speed_of = _rate(job, kind, devices, evidence)
    rate = rate or _mean_rate(job, kind, devices, evidence, total)
    if not rate:
        return None
    rate = min(rate, MAX_STEPS_PER_S)
    source: Source = "reported" if progress.of else "declared"
    return Remaining(_bounded((total - progress.step) / rate), source, rate, speed_of)


def _rate(job: Job, kind: str, devices: int, evidence: Evidence) -> tuple[float, str]:
    """Return (steps per second on these devices, the other job that reported them or "").

    If none was reported for them, the rate of the most similar kind and number is scaled. Without any rate it is 0.
    """
    rates = _reported_rates(job, kind, evidence)
    if (kind, devices) in rates:
        return rates[kind, devices]
    if not rates:
        return 0.0, ""

    def dissimilarity(settings: tuple[str, int]) -> tuple[bool, bool, float, str, int]:
        other, count = settings
        unmeasured = _measured_ratio(job, kind, other, evidence) is None
        return other != kind, unmeasured, max(devices / count, count / devices), *settings

    other, count = min(rates, key=dissimilarity)
    rate, speed_of = rates[other, count]
    return rate / count * devices * _ratio(job, kind, other, evidence), speed_of


def _reported_rates(job: Job, kind: str, evidence: Evidence) -> StepRates:
    """Return the job's own rates, and on kinds where it has none those of other jobs of its workload.

    Not on a kind whose speed relative to one of its own follows from a benchmark or from other jobs: this ratio holds
    also if other jobs count other steps.
    """
    own, others = _own_rates(evidence), _rates_of_others(job, kind, evidence)
    ran_on = {at for at, _ in own}
    tables = (_benchmarks(job, evidence), _by_device(others))
    elsewhere = {at for at, _ in others} - ran_on
    without_ratio = {at for at in elsewhere if not any(_first_ratio(at, one, tables) for one in ran_on)}
    return {**own, **{(at, count): rate for (at, count), rate in others.items() if at in without_ratio}}


def _own_rates(evidence: Evidence) -> StepRates:
    return {settings: (rate, "") for settings, rate in evidence.progress.rates.items() if 0 < rate < INFINITE}


def _rates_of_others(job: Job, kind: str, evidence: Evidence) -> StepRates:
    """Return the rates of other jobs that ran the workload like a candidate for `kind`."""
    if not evidence.throughput.step_rates:
        return {}
    of_workload = (evidence.throughput.reported(job, n) for n in _candidates_for(job, kind))
    others = next(filter(None, of_workload), {})
    return {settings: (rate.steps_per_s, rate.job) for settings, rate in others.items()}


def _mean_rate(job: Job, kind: str, devices: int, evidence: Evidence, total: int) -> float:
    """Return the mean rate over all attempts, the only one available after a server start; 0 after too few steps."""
    ran_s = _attained(job, kind, evidence)
    return evidence.progress.step / ran_s * devices if ran_s and evidence.progress.step >= MIN_PROGRESS * total else 0.0


def _from_work(job: Job, kind: str, devices: int, evidence: Evidence) -> Remaining | None:
    """Return the remaining time from declared device-seconds, else from those of earlier jobs."""
    if job.work.hours:
        device_s = job.work.hours * 3600 * _ratio(job, _kind_of(job.work.on, job, kind, evidence), kind, evidence)
        if left := _left(device_s, job, kind, devices, evidence):
            return Remaining(left, "declared")
    usual = evidence.history.of(job)
    if not usual:
        return None
    other = min(usual, key=lambda at: (at != kind, _measured_ratio(job, at, kind, evidence) is None, at))
    left = _left(usual[other] * _ratio(job, other, kind, evidence), job, kind, devices, evidence)
    return Remaining(left, "history") if left else None


def _left(device_s: float, job: Job, kind: str, devices: int, evidence: Evidence) -> float:
    """Return the remaining seconds, 0 if the job has run for longer than `device_s`."""
    left = device_s - _attained(job, kind, evidence)
    return _bounded(left / devices) if left > 0 else 0.0


def _attained(job: Job, kind: str, evidence: Evidence) -> float:
    """Return the device-seconds of the job so far, converted to `kind`."""
    return sum(ran_s * _ratio(job, other, kind, evidence) for other, ran_s in evidence.attained.items())


def _ratio(job: Job, kind: str, other: str, evidence: Evidence) -> float:
    """Return the speed of a device of `kind` relative to one of `other`; 1 if unknown."""
    return 1.0 if kind == other else _measured_ratio(job, kind, other, evidence) or 1.0


def _measured_ratio(job: Job, kind: str, other: str, evidence: Evidence) -> float | None:
    """Return the relative speed from benchmarks of the workload, else from reported rates on both kinds: those of one
    job rather than of several, which may count different steps.
    """
    return _first_ratio(kind, other, _tables(job, kind, evidence))


def _tables(job: Job, kind: str, evidence: Evidence) -> Iterator[Callable[[str], float]]:
    yield _benchmarks(job, evidence)
    yield _by_device(_own_rates(evidence))
    if others := _rates_of_others(job, kind, evidence):
        yield _by_device(others)
        yield _by_device(_reported_rates(job, kind, evidence))


def _first_ratio(kind: str, other: str, tables: Iterable[Callable[[str], float]]) -> float | None:
    """Return the ratio of two kinds in the first table of rates that has both; None if there is none."""
    for rate_on in tables:
        fast, slow = rate_on(kind), rate_on(other)
        if fast and slow and 0 < fast / slow < INFINITE:
            return fast / slow
    return None


def _benchmarks(job: Job, evidence: Evidence) -> Callable[[str], float]:
    return lambda kind: _measured(job, kind, evidence)


def _by_device(rates: StepRates) -> Callable[[str], float]:
    return lambda kind: _device_rate(kind, rates)


def _measured(job: Job, kind: str, evidence: Evidence) -> float:
    """Return the measured rate of one device, 0 if unmeasured.

    The precision is preferably that of a candidate for this kind.
    """
    rows = (evidence.throughput.of(job, n, kind) for n in (*_candidates_for(job, kind), *range(len(job.candidates))))
    return next((row.items_per_s for row in rows if row), 0.0) if evidence.throughput.rows else 0.0


def _candidates_for(job: Job, kind: str) -> list[int]:
    """Return the numbers of the candidates that accept `kind`, or of all if none does."""
    numbers = range(len(job.candidates))
    matching = [n for n in numbers if any(matches_pattern(pattern, kind) for pattern in job.candidates[n].kinds)]
    return matching or list(numbers)


def _device_rate(kind: str, rates: StepRates) -> float:
    """Return the reported steps per second per device, from the run with the fewest devices; 0 for none."""
    on_kind = [(count, rate / count) for (at, count), (rate, _) in rates.items() if at == kind]
    return min(on_kind)[1] if on_kind else 0.0


def _kind_of(pattern: str, job: Job, kind: str, evidence: Evidence) -> str:
    """Return `kind` if it matches the pattern, else a matching kind on which the workload was measured."""
    if matches_pattern(pattern, kind):
        return kind
    of_job = {row[2] for row in evidence.throughput.rows if row[0] == job.workload}
    ran = {at for at, _ in _reported_rates(job, kind, evidence)}
    return min((one for one in of_job | ran if matches_pattern(pattern, one)), default=pattern)


def _bounded(seconds: float) -> float:
    return min(max(seconds, MIN_REMAINING_S), MAX_REMAINING_S)


def _text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"
