"""How long a job will take yet on so many devices of a kind: as it reported, as its user declared, as jobs of its
workload took before, or else as long as it has run. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cluster.catalogue import matches_pattern
from orchestrator.core.model import Job, Progress, Running
from orchestrator.core.throughput import History, Throughput

Source = Literal["declared", "reported", "history", "attained"]

INFINITE = float("inf")
LEAST_S = 1.0
MOST_S = 100 * 365 * 86400.0
MOST_STEPS_PER_S = 1e12
LEAST_ATTAINED_S = 300.0
"""What is assumed of a job of which nothing is known, on one device."""

TELLING = 0.05
"""Of all steps: from then on the mean over all its attempts says something. Before, starting weighs most."""


@dataclass(frozen=True, slots=True)
class Known:
    """All that is known of how long a job takes. `attained`: device-seconds by kind that it has run, the live attempt
    included.
    """

    throughput: Throughput = field(default_factory=Throughput)
    progress: Progress = field(default_factory=Progress)
    history: History = field(default_factory=History)
    attained: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Remaining:
    """At least LEAST_S. `steps_per_s` is the speed it is told with, 0 where that is not known."""

    seconds: float
    source: Source
    steps_per_s: float = 0.0

    @property
    def sentence(self) -> str:
        """`about 2 h 10 min left at 3.1 steps/s (reported)`"""
        if self.source == "attained":
            return f"not known; {_words(self.seconds)} assumed (attained)"
        speed = f" at {self.steps_per_s:.3g} steps/s" if self.steps_per_s else ""
        return f"about {_words(self.seconds)} left{speed} ({self.source})"


def remaining(job: Job, kind: str, devices: int, known: Known) -> Remaining:
    """On `devices` devices of `kind`, counted over all nodes; what several devices do is taken as so many times as
    much. Work that was declared or usual and is used up says nothing more: then the next source counts.
    """
    devices = max(1, devices)
    return (
        _of_steps(job, kind, devices, known)
        or _of_work(job, kind, devices, known)
        or Remaining(_bounded(max(_attained(job, kind, known), LEAST_ATTAINED_S) / devices), "attained")
    )


def attained(progress: Progress, running: Running | None, ran_s: float) -> dict[str, float]:
    """Device-seconds by kind of a job, as a snapshot has it: `running` is its live attempt, for `ran_s` so far."""
    found = dict(progress.ran_on)
    if running is not None and ran_s > 0:
        kind = running.leases[0][0].partition("/")[2]
        devices = sum(len(numbers) for _, numbers in running.leases)
        found[kind] = found.get(kind, 0.0) + ran_s * devices
    return found


def is_known(job: Job, kind: str, known: Known) -> bool:
    """Whether `remaining` there was measured, reported or declared, and does not take another kind for as fast."""
    own = {at for at, _ in known.progress.rates}
    if (known.progress.of or job.work.steps) and own:
        return kind in own or any(_measured_ratio(job, kind, other, known) is not None for other in own)
    if job.work.hours:
        at = _kind_of(job.work.on, job, kind, known)
        return at == kind or _measured_ratio(job, at, kind, known) is not None
    usual = known.history.of(job)
    return kind in usual or any(_measured_ratio(job, other, kind, known) is not None for other in usual)


def _of_steps(job: Job, kind: str, devices: int, known: Known) -> Remaining | None:
    told = known.progress
    total = told.of or job.work.steps
    if not total or told.step > total:
        return None
    rate = _rate(job, kind, devices, known) or _mean_rate(job, kind, devices, known, total)
    if not rate:
        return None
    rate = min(rate, MOST_STEPS_PER_S)
    return Remaining(_bounded((total - told.step) / rate), "reported" if told.of else "declared", rate)


def _rate(job: Job, kind: str, devices: int, known: Known) -> float:
    """Steps per second from what it reported there, else from the likest place that it ran on; 0 for none."""
    rates = {place: rate for place, rate in known.progress.rates.items() if 0 < rate < INFINITE}
    if (kind, devices) in rates:
        return rates[kind, devices]
    if not rates:
        return 0.0

    def unlike(place: tuple[str, int]) -> tuple[bool, bool, float, str, int]:
        other, count = place
        unmeasured = _measured_ratio(job, kind, other, known) is None
        return other != kind, unmeasured, max(devices / count, count / devices), *place

    other, count = min(rates, key=unlike)
    return rates[other, count] / count * devices * _ratio(job, kind, other, known)


def _mean_rate(job: Job, kind: str, devices: int, known: Known, total: int) -> float:
    """Over all that it has run; 0 while that says little. A server that has just started knows no other."""
    ran_s = _attained(job, kind, known)
    return known.progress.step / ran_s * devices if ran_s and known.progress.step >= TELLING * total else 0.0


def _of_work(job: Job, kind: str, devices: int, known: Known) -> Remaining | None:
    """From device-seconds: declared, else usual."""
    if job.work.hours:
        device_s = job.work.hours * 3600 * _ratio(job, _kind_of(job.work.on, job, kind, known), kind, known)
        if left := _left(device_s, job, kind, devices, known):
            return Remaining(left, "declared")
    usual = known.history.of(job)
    if not usual:
        return None
    other = min(usual, key=lambda at: (at != kind, _measured_ratio(job, at, kind, known) is None, at))
    left = _left(usual[other] * _ratio(job, other, kind, known), job, kind, devices, known)
    return Remaining(left, "history") if left else None


def _left(device_s: float, job: Job, kind: str, devices: int, known: Known) -> float:
    """0 where nothing is."""
    left = device_s - _attained(job, kind, known)
    return _bounded(left / devices) if left > 0 else 0.0


def _attained(job: Job, kind: str, known: Known) -> float:
    """Device-seconds, as if all of it had run on `kind`."""
    return sum(ran_s * _ratio(job, other, kind, known) for other, ran_s in known.attained.items())


def _ratio(job: Job, kind: str, other: str, known: Known) -> float:
    """How many times as fast a device of `kind` is as one of `other`; 1 where nobody knows."""
    return 1.0 if kind == other else _measured_ratio(job, kind, other, known) or 1.0


def _measured_ratio(job: Job, kind: str, other: str, known: Known) -> float | None:
    """By benchmarks of the workload, else by what the job itself reported on both."""
    fast, slow = (_measured(job, one, known) for one in (kind, other))
    if not (fast and slow):
        fast, slow = (_own(one, known.progress) for one in (kind, other))
    ratio = fast / slow if fast and slow else 0.0
    return ratio if 0 < ratio < INFINITE else None


def _measured(job: Job, kind: str, known: Known) -> float:
    """Of one device. A candidate that is meant for the kind says at what precision; 0 where it was not measured."""
    numbers = range(len(job.candidates))
    meant = [n for n in numbers if any(matches_pattern(pattern, kind) for pattern in job.candidates[n].kinds)]
    found = (known.throughput.of(job, n, kind) for n in (*meant, *numbers))
    return next((told.items_per_s for told in found if told), 0.0) if known.throughput.rows else 0.0


def _own(kind: str, progress: Progress) -> float:
    """Steps per second of one device, where it ran on fewest; 0 for none."""
    rates = [(count, rate / count) for (at, count), rate in progress.rates.items() if at == kind]
    return min(rates)[1] if rates else 0.0


def _kind_of(pattern: str, job: Job, kind: str, known: Known) -> str:
    """`kind` where it is one of the pattern's, else one of its kinds on which the workload was measured."""
    if matches_pattern(pattern, kind):
        return kind
    of_job = {row[2] for row in known.throughput.rows if row[0] == job.workload}
    ran = {at for at, _ in known.progress.rates}
    return min((one for one in of_job | ran if matches_pattern(pattern, one)), default=pattern)


def _bounded(seconds: float) -> float:
    return min(max(seconds, LEAST_S), MOST_S)


def _words(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"
