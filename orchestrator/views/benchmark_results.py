"""Results of a benchmark run: lines `result`, with every sample and the state of the machine."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from orchestrator.views.benchmarks import StoredLine
from orchestrator.views.values import Number


class Accuracy(TypedDict):
    """Comparison with a reference in float64. Errors are absent if there was nothing to compare."""

    ok: bool
    reason: NotRequired[str]
    dtype: NotRequired[str]
    non_finite: NotRequired[int]
    """Number of values that are NaN or infinite on one side only."""
    max_abs: NotRequired[Number]
    max_rel: NotRequired[Number]
    rms_rel: NotRequired[Number]
    ulp_p99: NotRequired[Number]
    """99th percentile of the errors, in ULP."""
    cosine: NotRequired[Number]
    scaled: NotRequired[Number]
    """Largest error, in units of the expected rounding error."""
    rtol: NotRequired[Number]
    atol: NotRequired[Number]
    provenance: NotRequired[str]
    """Source of the tolerances."""
    reference: NotRequired[str]
    """What computed the reference."""


class Block(TypedDict):
    """One round of a measurement."""

    round: int
    calls: int
    """Calls of one part."""
    parts_s: list[float]
    """Time of each part, in seconds."""
    cpu_s: float
    preempted: int
    single_call_s: float
    """Time of one call on its own, in seconds."""
    at: float
    """Seconds since the epoch."""


class BusyProcess(TypedDict):
    """Another process that used CPUs."""

    name: str
    pid: int
    cpus: float


class CpuTimes(TypedDict):
    """CPU times since boot, in seconds."""

    total: float
    busy: float
    steal: float


class CardState(TypedDict):
    """State of an NVIDIA card; null for values that it does not provide."""

    sm_mhz: float | None
    memory_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    slowed_by: list[str]
    """Causes that lowered its clocks."""
    others: list[int]
    """Process ids of other users of the card."""


class HostState(TypedDict):
    """State of a machine at one moment; null for values that its system does not provide."""

    load_1min: float | None
    cpus: int | None
    pressure_cpu: float | None
    """Percent of the last ten seconds in which some task waited for a CPU."""
    pressure_memory: float | None
    cpu_times: CpuTimes
    governor: str
    cpu_mhz: float | None
    temperature_c: float | None
    busiest: list[BusyProcess]
    """Other processes since the state before."""
    device: NotRequired[CardState]


class CaseFacts(TypedDict, total=False):
    """What a case computes, and what was measured or decided before its first round."""

    about: str
    scale: str
    sizes: dict[str, int]
    flops_source: str
    min_bytes: float
    """Bytes that one call moves through memory at least."""
    kernels: str
    accuracy: Accuracy
    inputs_sha256: str
    weights_sha256: str
    """Equal for two targets that computed the same."""
    prepare_s: float
    first_call_s: float
    warmup_calls: int
    warm_call_s: float
    calls_per_part: int
    parts: int
    applied: list[str]
    skipped: dict[str, str]
    changed_in_place: list[str]
    """Inputs and buffers that a call changes, restored before each call."""
    note: str
    collective: str
    """Library of collective operations."""
    timer: str
    peak_memory_bytes: int | None
    energy: dict[str, float]


class ResultLine(StoredLine, CaseFacts):
    """One case on one target in one configuration, with every sample."""

    line: Literal["result"]
    id: str
    """CASE@TARGET/PRECISION/LEVEL; a later result with the same id replaces the earlier one."""
    target: str
    host: str
    case: str
    workload: str
    family: str
    mode: str
    item: str
    items: float | None
    """Number of items that one call processes."""
    flops: float | None
    precision: str
    level: str
    regime: str
    status: Literal["measured", "unsupported", "failed", "wrong", "lost", "skipped"]
    reason: str
    blocks: list[Block]
    control_blocks: list[Block]
    """Blocks of a second measurement, whose difference is the noise."""
    host_before: HostState | None
    host_after: HostState | None
