"""Measured throughput of workloads by kind, for the planner: rates with confidence intervals and age.

A workload is a name: one of the catalogue's (`gpt2`), one that a user chose, or `folder:SHA` after the content of
the job's folder. A training job is matched with training steps, any other with forwards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cluster import catalogue
from cluster.catalogue import lookup
from cluster.catalogue.precision import short_name
from orchestrator.core.timing import duration_text

if TYPE_CHECKING:
    from orchestrator.core.model import Job
    from orchestrator.core.plan.options.gang import PlacementOption

Key = tuple[str, str, str, str]
"""Workload, mode, kind, precision."""


def folder_workload(content_sha: str) -> str:
    """Return the name of a workload that the user did not name: a hash of its folder's content, without file times."""
    return f"folder:{content_sha[:16]}" if content_sha else ""


def with_code(job: "Job", package: str, content_sha: str) -> "Job":
    """Return `job` with its code archive. A workload without a name is named after the archive's content."""
    workload = job.workload or folder_workload(content_sha)
    return replace(job, workload=workload, package=package, content_sha=content_sha)


def workload_name(job: "Job") -> str:
    """Return the name of the job's workload, else of its folder; "" if it has neither."""
    return job.workload or folder_workload(job.content_sha)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured rate of one device.

    `low` to `high` is the 95 % confidence interval. It was measured at `at_s` in benchmark run `run`. `joules_per_item`
    is 0 if the device has no energy counter.
    """

    items_per_s: float
    low: float
    high: float
    item: str
    run: str
    at_s: float
    joules_per_item: float = 0.0


@dataclass(frozen=True, slots=True)
class Estimated:
    """Estimated rate of one device; `low` to `high` is a 90 % interval.

    It follows from the differences between kinds for `workloads` other workloads (plan/arrays/completion.py), or
    from published figures and the measured rate on kind `measured_kind`.
    """

    items_per_s: float
    low: float
    high: float
    item: str
    workloads: int
    measured_kind: str = ""

    @property
    def source(self) -> str:
        others = f"{self.workloads} other workloads"
        return f"published figures beside {self.measured_kind}, where it was measured" if self.measured_kind else others


@dataclass(frozen=True, slots=True)
class Throughput:
    """Newest measurement by key. `estimates` are for keys without one; they affect only the order of options."""

    rows: Mapping[Key, Measured] = field(default_factory=dict)
    estimates: Mapping[Key, Estimated] = field(default_factory=dict)

    def of(self, job: "Job", candidate: int, kind: str) -> Measured | None:
        return self.rows.get(_key(job, candidate, kind)) if job.workload else None

    def estimated(self, job: "Job", candidate: int, kind: str) -> Estimated | None:
        if not job.workload:
            return None
        key = _key(job, candidate, kind)
        return self.estimates.get(key) or self._from_figures(key)

    def _from_figures(self, key: Key) -> Estimated | None:
        """Estimate a rate from published figures, based on the fastest comparable kind that was measured."""
        workload, mode, kind, precision = key
        rows = ((other, self.rows.get((workload, mode, other, precision))) for other in catalogue.models())
        comparable = [(row, other) for other, row in rows if row and lookup.speed_ratio(kind, other, precision)]
        if not comparable:
            return None
        best, other = max(comparable, key=lambda pair: pair[0].items_per_s)
        rate = best.items_per_s * (lookup.speed_ratio(kind, other, precision) or 1.0)
        return Estimated(rate, rate / lookup.SPEED_ERROR_FACTOR, rate * lookup.SPEED_ERROR_FACTOR, best.item, 0, other)

    def sentence(self, job: "Job", candidate: int, kind: str, now_s: float) -> str:
        """Return e.g. `measured 1234 samples/s [1200, 1260] 2 h ago in bench-12ab34`, an estimate with its source, or
        `unmeasured`.
        """
        if (measured := self.of(job, candidate, kind)) is not None:
            return f"measured {_rate(measured)} {_ago(now_s - measured.at_s)} in {measured.run}"
        if (estimate := self.estimated(job, candidate, kind)) is not None:
            return f"estimated {_rate(estimate)} from {estimate.source}; not measured here"
        return "unmeasured"


def _key(job: "Job", candidate: int, kind: str) -> Key:
    mode = "train" if job.task == "train" else "forward"
    return job.workload, mode, kind, short_name(job.candidates[candidate].precision)


def _rate(row: Measured | Estimated) -> str:
    return f"{_number_text(row.items_per_s)} {row.item}s/s [{_number_text(row.low)}, {_number_text(row.high)}]"


def _number_text(rate: float) -> str:
    """Return a rate with four significant digits and without an exponent: `12,340`."""
    if rate < 1000:
        return f"{rate:.4g}"
    digits = len(str(int(rate))) - 4
    return f"{round(rate, -digits):,.0f}"


@dataclass(frozen=True, slots=True)
class History:
    """Device-seconds of successful jobs, by kind: the median of the latest ones of each (workload, task).

    `all_runs` is the sum over all ended jobs, whatever their outcome.
    """

    rows: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)
    all_runs: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)

    def of(self, job: "Job") -> Mapping[str, float]:
        by_name = self.rows.get((job.workload, job.task)) if job.workload else None
        return by_name or self.rows.get((folder_workload(job.content_sha), job.task)) or {}

    def all_runs_of(self, job: "Job") -> Mapping[str, float]:
        return self.all_runs.get((workload_name(job), job.task), {})


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the options of one job: items per second of all devices together, assuming linear scaling.

    If nothing was measured but jobs of the workload have ended, rates are in jobs per second. `explored`: kinds that
    were explored for long enough (see plan/exploration.py).
    """

    job: "Job"
    throughput: Throughput
    durations: Mapping[str, float]
    items: float
    explored: frozenset[str]
    best: float | None = None
    best_accelerator: float | None = None

    @classmethod
    def of(
        cls,
        job: "Job",
        options: "Iterable[PlacementOption]",
        throughput: Throughput,
        history: History | None = None,
        explored: frozenset[str] = frozenset(),
    ) -> "Rates":
        options = list(options)
        took = history.of(job) if history else {}
        without_best = cls(job, throughput, took, _items(job, options, throughput, took), explored)
        rates = [(rate, _on_cpu(o)) for o in options if (rate := without_best.observed_rate(o)) is not None]
        best = max((rate for rate, _ in rates), default=None)
        return replace(
            without_best, best=best, best_accelerator=max((r for r, on_cpu in rates if not on_cpu), default=None)
        )

    def measured(self, option: "PlacementOption") -> float | None:
        row = self.throughput.of(self.job, option.candidate, option.nodes[0].kind)
        return row.items_per_s * _devices(option) if row else None

    def observed_rate(self, option: "PlacementOption") -> float | None:
        """Return the measured rate, else one from the duration of ended jobs of the workload on this kind, or None."""
        rate, took = self.measured(option), self.durations.get(option.nodes[0].kind, 0.0)
        return self.items / took * _devices(option) if rate is None and self.items and took else rate

    def joules_per_item(self, option: "PlacementOption") -> float:
        """Return the energy per item in joules, 0 if it was not measured."""
        row = self.throughput.of(self.job, option.candidate, option.nodes[0].kind)
        return row.joules_per_item if row else 0.0

    def expected(self, option: "PlacementOption") -> float:
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

    def is_exploration(self, option: "PlacementOption") -> bool:
        """Return True if this option has no rate and still precedes the one with the best rate."""
        return self.observed_rate(option) is None and self.best is not None and self.expected(option) > self.best

    def sentence(self, option: "PlacementOption", now_s: float) -> str:
        """Describe the rate of one device like `Throughput.sentence`; if unmeasured, the duration of ended jobs."""
        kind = option.nodes[0].kind
        text = self.throughput.sentence(self.job, option.candidate, kind, now_s)
        if text == "unmeasured" and (took := self.durations.get(kind)):
            return f"jobs of this workload took about {duration_text(took)} on one device here"
        return text


def _items(
    job: "Job", options: "Iterable[PlacementOption]", throughput: Throughput, took: Mapping[str, float]
) -> float:
    """Return the size of a job of this workload, in the unit of the rates.

    In items, if a kind on which jobs have ended was measured; 1 (job), if no option was measured; else 0, because the
    two kinds of rates cannot be compared.
    """
    for kind in sorted(took):
        for candidate in range(len(job.candidates)):
            if row := throughput.of(job, candidate, kind):
                return row.items_per_s * took[kind]
    return 0.0 if any(throughput.of(job, o.candidate, o.nodes[0].kind) for o in options) else 1.0


def _devices(option: "PlacementOption") -> int:
    return option.count * len(option.nodes)


def _on_cpu(option: "PlacementOption") -> bool:
    return option.nodes[0].backend == "cpu"


def _ago(seconds: float) -> str:
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / unit_s:.0f} {unit} ago"
    return f"{seconds / 86_400:.0f} days ago"
