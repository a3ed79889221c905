"""Lines of a benchmark run, one type for each value of `line`: see docs/benchmark-format.md."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from orchestrator.views.benchmark_results import ResultLine
from orchestrator.views.benchmarks import BenchmarkRequestView, StoredLine, TargetView
from orchestrator.views.values import JsonObject


class RequestedTarget(TypedDict):
    """Devices for which a job is submitted."""

    name: str
    kind: str
    pools: list[str]
    node: str
    """The node that was requested, or empty."""
    each: bool
    """Whether every device of the node is measured."""


class RequestedJob(TypedDict):
    """A job that holds a node for a run."""

    wanted: RequestedTarget
    spec: JsonObject


class StartedLine(StoredLine):
    """A run was started."""

    line: Literal["started"]
    format: int
    run: str
    request: BenchmarkRequestView
    code_archive: NotRequired[str]
    content_sha: NotRequired[str]
    digest: NotRequired[str]
    """Hash of the request: a repeated request with the same key must have the same one."""
    jobs: list[RequestedJob]


class TargetsLine(StoredLine):
    """The devices that are measured, with their nodes once these are chosen; the last such line counts."""

    line: Literal["targets"]
    targets: list[TargetView]


class TargetFacts(TypedDict, total=False):
    """Facts of a device under test."""

    kind: str
    pool: str
    node: str
    number: int
    job: str
    host: str
    device: JsonObject
    emulated: bool
    torch: str
    versions: dict[str, str]
    threads: int
    timer: str
    timer_overhead_s: float
    cache_bytes: int
    energy: str
    """Source of energy measurements."""
    counts_energy: bool
    pid: int
    price_per_hour: float | None
    price_source: str


class TargetLine(StoredLine):
    """The session of a target responds for the first time."""

    line: Literal["target"]
    target: str
    host: str
    """The same for targets on one machine."""
    facts: TargetFacts


class LostLine(StoredLine):
    """A target never started."""

    line: Literal["lost"]
    target: str
    reason: str


class CaseLine(StoredLine):
    """All results of a case are complete."""

    line: Literal["case"]
    case: str
    rounds: int


class EndedLine(StoredLine):
    """A run has ended."""

    line: Literal["ended"]
    state: Literal["SUCCEEDED", "FAILED", "CANCELLED"]
    reason: str


class BaselineLine(StoredLine):
    """A run became the baseline of later runs."""

    line: Literal["baseline"]


BenchmarkLine = StartedLine | TargetsLine | TargetLine | LostLine | ResultLine | CaseLine | EndedLine | BaselineLine
