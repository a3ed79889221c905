"""What was measured of a workload on a kind, for the planner: rates with intervals and age. Nothing is made up.

A workload is a name: one of the catalogue's (`gpt2`), one a user gave, or `package:SHA` of the folder a job was
submitted with. A training job is matched with training steps, any other with forwards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.catalogue.precision import short_name

if TYPE_CHECKING:
    from orchestrator.core.gang import Option
    from orchestrator.core.model import Job

Key = tuple[str, str, str, str]
"""Workload, mode, kind, precision."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one device. `low` to `high` hold the true rate with 95 %; `at_s` is when it was measured, in `run`."""

    items_per_s: float
    low: float
    high: float
    item: str
    run: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """The newest measurement of each pair."""

    rows: Mapping[Key, Measured] = field(default_factory=dict)

    def of(self, job: "Job", candidate: int, kind: str) -> Measured | None:
        precision = job.candidates[candidate].precision
        mode = "train" if job.task == "train" else "forward"
        return self.rows.get((job.workload, mode, kind, short_name(precision))) if job.workload else None


@dataclass(frozen=True, slots=True)
class Rates:
    """What the options of one job do: items per second where measured, all devices together as if they scaled."""

    job: "Job"
    throughput: Throughput
    best_accelerator: float | None

    @classmethod
    def of(cls, job: "Job", options: "Iterable[Option]", throughput: Throughput) -> "Rates":
        plain = cls(job, throughput, None)
        told = [rate for o in options if not _on_cpu(o) and (rate := plain.measured(o)) is not None]
        return cls(job, throughput, max(told, default=None))

    def measured(self, option: "Option") -> float | None:
        found = self.throughput.of(self.job, option.candidate, option.nodes[0].kind)
        return found.items_per_s * option.count * len(option.nodes) if found else None

    def expected(self, option: "Option") -> float:
        """For ordering only: an accelerator nobody measured counts as just below the best that was measured, and above
        every CPU where none was; a CPU nobody measured comes last.
        """
        rate = self.measured(option)
        if rate is not None:
            return rate
        if _on_cpu(option):
            return 0.0
        return float("inf") if self.best_accelerator is None else self.best_accelerator * (1 - 1e-9)


def _on_cpu(option: "Option") -> bool:
    return option.nodes[0].backend == "cpu"


def sentence(found: Measured | None, now_s: float) -> str:
    """`measured 1234 samples/s [1200, 1260] 2 h ago in bench-12ab34`, or `unmeasured`."""
    if found is None:
        return "unmeasured"
    rate = f"{found.items_per_s:,.4g} {found.item}s/s [{found.low:,.4g}, {found.high:,.4g}]"
    return f"measured {rate} {_ago(now_s - found.at_s)} in {found.run}"


def _ago(seconds: float) -> str:
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / unit_s:.0f} {unit} ago"
    return f"{seconds / 86_400:.0f} days ago"
