"""Rates of a job's options, to order them: measured, reported by other jobs, from ended jobs, or estimated."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from orchestrator.core.model import Job
from orchestrator.core.plan.options.gang import PlacementOption
from orchestrator.core.rate_source import UNMEASURED, from_benchmark, from_durations, from_estimate, from_step_rates
from orchestrator.core.step_rates import nearest_rate
from orchestrator.core.throughput import History, Throughput


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the options of one job: items per second of all devices together, assuming linear scaling.

    If nothing was measured, they are in the steps that jobs of the workload reported, else in jobs per second, if such
    jobs have ended. `items_per_step` and `items` (of a job) convert these, 0 where they cannot be compared. `explored`:
    kinds that were explored for long enough (see plan/exploration.py).
    """

    job: Job
    throughput: Throughput
    durations: Mapping[str, float]
    items_per_step: float
    items: float
    explored: frozenset[str]
    best: float | None = None
    best_accelerator: float | None = None

    @classmethod
    def of(
        cls,
        job: Job,
        options: Iterable[PlacementOption],
        throughput: Throughput,
        history: History | None = None,
        explored: frozenset[str] = frozenset(),
    ) -> "Rates":
        options = list(options)
        took = history.of(job) if history else {}
        per_step = _items_per_step(job, options, throughput)
        items = _items(job, options, throughput, took, per_step)
        without_best = cls(job, throughput, took, per_step, items, explored)
        rates = [(rate, _on_cpu(o)) for o in options if (rate := without_best.observed_rate(o)) is not None]
        best = max((rate for rate, _ in rates), default=None)
        return replace(
            without_best, best=best, best_accelerator=max((r for r, on_cpu in rates if not on_cpu), default=None)
        )

    def measured(self, option: PlacementOption) -> float | None:
        row = self.throughput.of(self.job, option.candidate, option.nodes[0].kind)
        return row.items_per_s * _devices(option) if row else None

    def observed_rate(self, option: PlacementOption) -> float | None:
        """Return the measured rate, else one that jobs of the workload reported on this kind, else one from the
        duration of those that have ended there, or None.
        """
        kind, devices = option.nodes[0].kind, _devices(option)
        if (rate := self.measured(option)) is not None:
            return rate
        if self.items_per_step and (steps := _steps_per_s(self.job, option.candidate, kind, devices, self.throughput)):
            return steps * self.items_per_step * devices
        took = self.durations.get(kind, 0.0)
        return self.items / took * devices if self.items and took else None

    def joules_per_item(self, option: PlacementOption) -> float:
        """Return the energy per item in joules, 0 if it was not measured."""
        row = self.throughput.of(self.job, option.candidate, option.nodes[0].kind)
        return row.joules_per_item if row else 0.0

    def expected(self, option: PlacementOption) -> float:
        """Return a rate for ordering options: the measured or observed rate, else the estimate.

        Without an estimate, an accelerator comes just below the accelerator with the best rate, or first if none has
        one; a CPU comes last. If any option has a rate, kinds that were explored for long enough come last, too.
        """
        if (rate := self.observed_rate(option)) is not None:
            return rate
        if self.best is not None and option.nodes[0].kind in self.explored:
            return 0.0
        estimate = self.throughput.estimated(self.job, option.candidate, option.nodes[0].kind)
        if estimate is not None:
            return estimate.items_per_s * _devices(option)
        if _on_cpu(option):
            return 0.0
        return float("inf") if self.best_accelerator is None else self.best_accelerator * (1 - 1e-9)

    def is_exploration(self, option: PlacementOption) -> bool:
        """Return True if this option has no rate and still precedes the one with the best rate."""
        return self.observed_rate(option) is None and self.best is not None and self.expected(option) > self.best

    def sentence(self, option: PlacementOption, now_s: float) -> str:
        """Describe the rate that orders this option, with its source; "unmeasured" if there is none."""
        kind, devices = option.nodes[0].kind, _devices(option)
        rate = (
            from_benchmark(self.job, option.candidate, kind, self.throughput)
            or from_step_rates(self.job, option.candidate, kind, devices, self.throughput)
            or from_durations(kind, self.durations)
            or from_estimate(self.job, option.candidate, kind, self.throughput)
        )
        return rate.sentence(now_s) if rate else UNMEASURED


def _steps_per_s(job: Job, candidate: int, kind: str, devices: int, throughput: Throughput) -> float:
    """Return the reported steps per second of one device, 0 if there are none.

    If each rank has a batch of its own, a step of more devices is more work, so the rate is that of each of them.
    """
    nearest = nearest_rate(throughput.reported(job, candidate), kind, devices)
    if nearest is None:
        return 0.0
    count, rate = nearest
    return rate.steps_per_s / count if job.candidates[candidate].whole_batch else rate.steps_per_s


def _items_per_step(job: Job, options: Iterable[PlacementOption], throughput: Throughput) -> float:
    """Return the items of one step, from a kind with both rates; 1 (step), if nothing was measured or estimated.

    0 if nothing was reported, or steps cannot be compared with the other rates or between the candidates.
    """
    reported = [throughput.reported(job, candidate) for candidate in range(len(job.candidates))]
    if not any(reported) or len({(want.batch_size, want.whole_batch) for want in job.candidates}) > 1:
        return 0.0
    for candidate, rates in enumerate(reported):
        for kind, devices in sorted(rates):
            if row := throughput.of(job, candidate, kind):
                return row.items_per_s / _steps_per_s(job, candidate, kind, devices, throughput)
    in_items = (throughput.of(job, o.candidate, o.nodes[0].kind) for o in options)
    estimated = (throughput.estimated(job, o.candidate, o.nodes[0].kind) for o in options)
    return 0.0 if any(in_items) or any(estimated) else 1.0


def _items(
    job: Job,
    options: Iterable[PlacementOption],
    throughput: Throughput,
    took: Mapping[str, float],
    items_per_step: float,
) -> float:
    """Return the size of a job of this workload, in the unit of the rates.

    In items or steps, if a kind on which jobs have ended has a rate in them; 1 (job), if no option has one; else 0,
    because the two kinds of rates cannot be compared.
    """

    def rate(candidate: int, kind: str, devices: int) -> float:
        if row := throughput.of(job, candidate, kind):
            return row.items_per_s
        return items_per_step and _steps_per_s(job, candidate, kind, devices, throughput) * items_per_step

    for kind in sorted(took):
        for candidate in range(len(job.candidates)):
            if per_s := rate(candidate, kind, 1):
                return per_s * took[kind]
    return 0.0 if any(rate(o.candidate, o.nodes[0].kind, _devices(o)) for o in options) else 1.0


def _devices(option: PlacementOption) -> int:
    return option.count * len(option.nodes)


def _on_cpu(option: PlacementOption) -> bool:
    return option.nodes[0].backend == "cpu"
