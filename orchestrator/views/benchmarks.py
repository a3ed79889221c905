"""Benchmark runs. Lines of their results: benchmark_lines."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

RunState = Literal["WAITING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"]


class BenchmarkRequestView(TypedDict):
    """What a run measures."""

    cases: list[str]
    """Names, suites or patterns of cases."""
    scale: Literal["quick", "full"]
    precisions: list[Literal["fp32", "bf16", "fp16"]]
    levels: list[Literal["O0", "O1", "O2", "O3"]]
    regimes: list[Literal["hot", "cold"]]
    kernels: list[str]
    """Implementations of operations; the others are compared with the first."""
    rounds: int
    """Minimum rounds of each case; 0: chosen from the number of comparisons."""
    max_rounds: int
    case_s: float
    """Limit for each case, in seconds."""
    max_minutes: float
    """Limit for the run."""
    seed: int
    entry: str
    """The user's own model, instead of `cases`."""
    sample_input: str
    batch_size: int
    train: bool
    pools: list[str]
    kinds: list[str]
    all_devices: bool
    energy: bool
    priority: int
    workload: str


class StoredLine(TypedDict):
    """What every line of a run has."""

    seq: int
    """Number of the line, increasing over all runs."""
    time: float
    """Seconds since the epoch."""


class TargetView(TypedDict):
    """A device that a run measures."""

    target: str
    job: str
    """The job that holds its node; empty before it is submitted."""
    kind: str
    pool: str
    """Its pool; several, separated by commas, before a node was chosen."""
    node: str
    number: NotRequired[int]
    """Number of the device on its node, once the node was chosen."""


class RunProgressView(TypedDict, total=False):
    """The present step of a run; an empty object if there is none."""

    case: str
    number: int
    """Number of the case, from 1."""
    of: int
    """Number of cases."""
    doing: Literal["opening", "measuring"]
    round: int
    """Number of complete rounds."""


class RunView(TypedDict):
    """A benchmark run. Times are ISO 8601 in UTC."""

    format: int
    """Format of its lines."""
    run: str
    request: BenchmarkRequestView
    code_archive: str
    content_sha: str
    """SHA-256 of the content of the submitted folder, or empty."""
    targets: list[TargetView]
    state: RunState
    reason: str
    progress: RunProgressView
    results: int
    """Number of results so far."""
    baseline: bool
    """Whether later runs are compared with it."""
    started_at: str
    ended_at: str | None
