"""What was measured of a workload on a kind, for the planner: rates with intervals and age. Nothing is made up.

A workload is a name: one of the catalogue's (`gpt2`), one that a user chose, or `folder:SHA` after the content of
the job's folder. A training job is matched with training steps, any other with forwards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cluster import catalogue
from cluster.catalogue.precision import short_name
from orchestrator.core import roofline
from orchestrator.core.durations import told_s

if TYPE_CHECKING:
    from orchestrator.core.gang import Option
    from orchestrator.core.model import Job

Key = tuple[str, str, str, str]
"""Workload, mode, kind, precision."""


def of_folder(content_sha: str) -> str:
    """Name of a workload to which the user gave none: the content of its folder, without the times of the files."""
    return f"folder:{content_sha[:16]}" if content_sha else ""


def with_code(job: "Job", package: str, content_sha: str) -> "Job":
    """`job` with its code archive. Its workload is named after the archive's content where the user gave no name."""
    workload = job.workload or of_folder(content_sha)
    return replace(job, workload=workload, package=package, content_sha=content_sha)


def name_of(job: "Job") -> str:
    """Of its workload, else of its folder; "" where it has neither."""
    return job.workload or of_folder(job.content_sha)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one device. `low` to `high` hold the true rate with 95 %; `at_s` is when it was measured, in `run`.
    `joules_per_item` is 0 where the device has no counter of energy.
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
    """Of one device, from how kinds differ for `workloads` others (planner/completion.py), or in their published
    figures, from the rate on kind `beside`. Nine of ten true rates lie between `low` and `high`.
    """

    items_per_s: float
    low: float
    high: float
    item: str
    workloads: int
    beside: str = ""

    @property
    def source(self) -> str:
        others = f"{self.workloads} other workloads"
        return f"published figures beside {self.beside}, where it was measured" if self.beside else others


@dataclass(frozen=True, slots=True)
class Throughput:
    """The newest measurement of each pair; `estimates` of pairs that nobody measured, which decide about order only."""

    rows: Mapping[Key, Measured] = field(default_factory=dict)
    estimates: Mapping[Key, Estimated] = field(default_factory=dict)

    def of(self, job: "Job", candidate: int, kind: str) -> Measured | None:
        return self.rows.get(_key(job, candidate, kind)) if job.workload else None

    def estimated(self, job: "Job", candidate: int, kind: str) -> Estimated | None:
        if not job.workload:
            return None
        key = _key(job, candidate, kind)
        return self.estimates.get(key) or self._by_figures(key)

    def _by_figures(self, key: Key) -> Estimated | None:
        """From the fastest of the kinds with which it can be compared."""
        workload, mode, kind, precision = key
        rows = ((other, self.rows.get((workload, mode, other, precision))) for other in catalogue.models())
        known = [(found, other) for other, found in rows if found and roofline.ratio(kind, other, precision)]
        if not known:
            return None
        found, other = max(known, key=lambda one: one[0].items_per_s)
        rate = found.items_per_s * (roofline.ratio(kind, other, precision) or 1.0)
        return Estimated(rate, rate / roofline.WITHIN, rate * roofline.WITHIN, found.item, 0, other)

    def sentence(self, job: "Job", candidate: int, kind: str, now_s: float) -> str:
        """`measured 1234 samples/s [1200, 1260] 2 h ago in bench-12ab34`, an estimate that says it is one, or
        `unmeasured`.
        """
        if (found := self.of(job, candidate, kind)) is not None:
            return f"measured {_rate(found)} {_ago(now_s - found.at_s)} in {found.run}"
        if (guess := self.estimated(job, candidate, kind)) is not None:
            return f"estimated {_rate(guess)} from {guess.source}; not measured here"
        return "unmeasured"


def _key(job: "Job", candidate: int, kind: str) -> Key:
    mode = "train" if job.task == "train" else "forward"
    return job.workload, mode, kind, short_name(job.candidates[candidate].precision)


def _rate(found: Measured | Estimated) -> str:
    return f"{_told(found.items_per_s)} {found.item}s/s [{_told(found.low)}, {_told(found.high)}]"


def _told(rate: float) -> str:
    """With four digits that count: `12,340`, and never an exponent."""
    if rate < 1000:
        return f"{rate:.4g}"
    digits = len(str(int(rate))) - 4
    return f"{round(rate, -digits):,.0f}"


@dataclass(frozen=True, slots=True)
class History:
    """Device-seconds that jobs took to success, by kind: the median of the last ones of each (workload, task). A
    workload is named as above. `tried` is the sum of all that ended, however they did.
    """

    rows: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)
    tried: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)

    def of(self, job: "Job") -> Mapping[str, float]:
        found = self.rows.get((job.workload, job.task)) if job.workload else None
        return found or self.rows.get((of_folder(job.content_sha), job.task)) or {}

    def tried_by(self, job: "Job") -> Mapping[str, float]:
        return self.tried.get((name_of(job), job.task), {})


@dataclass(frozen=True, slots=True)
class Rates:
    """What the options of one job do: items per second, all devices together as if they scaled. Where nothing was
    measured, but jobs of the workload have ended, they are in jobs per second. `over`: kinds that were tried for long
    enough (see exploration.py).
    """

    job: "Job"
    throughput: Throughput
    took: Mapping[str, float]
    items: float
    over: frozenset[str]
    best: float | None = None
    best_accelerator: float | None = None

    @classmethod
    def of(
        cls,
        job: "Job",
        options: "Iterable[Option]",
        throughput: Throughput,
        history: History | None = None,
        over: frozenset[str] = frozenset(),
    ) -> "Rates":
        options = list(options)
        took = history.of(job) if history else {}
        plain = cls(job, throughput, took, _items(job, options, throughput, took), over)
        told = [(rate, _on_cpu(o)) for o in options if (rate := plain.known(o)) is not None]
        best = max((rate for rate, _ in told), default=None)
        return replace(plain, best=best, best_accelerator=max((r for r, on_cpu in told if not on_cpu), default=None))

    def measured(self, option: "Option") -> float | None:
        found = self.throughput.of(self.job, option.candidate, option.nodes[0].kind)
        return found.items_per_s * _devices(option) if found else None

    def known(self, option: "Option") -> float | None:
        """Measured, else as jobs of the workload took there."""
        rate, took = self.measured(option), self.took.get(option.nodes[0].kind, 0.0)
        return self.items / took * _devices(option) if rate is None and self.items and took else rate

    def joules_per_item(self, option: "Option") -> float:
        """0 where that was not measured."""
        found = self.throughput.of(self.job, option.candidate, option.nodes[0].kind)
        return found.joules_per_item if found else 0.0

    def expected(self, option: "Option") -> float:
        """For ordering only. What nobody measured counts as it is estimated; where it is not, an accelerator counts as
        just below the best that is known, and above every CPU where none is; a CPU comes last. So does a kind that was
        tried for long enough, where another is known.
        """
        if (rate := self.known(option)) is not None:
            return rate
        if self.best is not None and option.nodes[0].kind in self.over:
            return 0.0
        guess = self.throughput.estimated(self.job, option.candidate, option.nodes[0].kind)
        if guess is not None:
            return guess.items_per_s * _devices(option)
        if _on_cpu(option):
            return 0.0
        return float("inf") if self.best_accelerator is None else self.best_accelerator * (1 - 1e-9)

    def is_tried(self, option: "Option") -> bool:
        """Whether it comes before one that is known, although nobody knows how fast it is."""
        return self.known(option) is None and self.best is not None and self.expected(option) > self.best

    def sentence(self, option: "Option", now_s: float) -> str:
        """Of one device, as Throughput has it; also what jobs of the workload took there."""
        kind = option.nodes[0].kind
        told = self.throughput.sentence(self.job, option.candidate, kind, now_s)
        if told == "unmeasured" and (took := self.took.get(kind)):
            return f"jobs of this workload took about {told_s(took)} on one device here"
        return told


def _items(job: "Job", options: "Iterable[Option]", throughput: Throughput, took: Mapping[str, float]) -> float:
    """How much work a job of the workload is: items where a kind on which jobs ended was measured; 1 job where none of
    the options was; else 0: these numbers cannot be compared.
    """
    for kind in sorted(took):
        for candidate in range(len(job.candidates)):
            if found := throughput.of(job, candidate, kind):
                return found.items_per_s * took[kind]
    return 0.0 if any(throughput.of(job, o.candidate, o.nodes[0].kind) for o in options) else 1.0


def _devices(option: "Option") -> int:
    return option.count * len(option.nodes)


def _on_cpu(option: "Option") -> bool:
    return option.nodes[0].backend == "cpu"


def _ago(seconds: float) -> str:
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / unit_s:.0f} {unit} ago"
    return f"{seconds / 86_400:.0f} days ago"
