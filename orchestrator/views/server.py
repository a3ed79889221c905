"""The server itself: liveness, version, health."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from orchestrator.views.fleet import FindingView


class LivenessView(TypedDict):
    """The server responds."""

    ok: Literal[True]
    proof: NotRequired[str]
    """Response to the `challenge` of the request."""


class VersionView(TypedDict):
    """Version and process of the server."""

    version: str
    protocol: int
    """Version of the messages between server and agents."""
    pid: int
    home: str
    started_at: str
    """ISO 8601 in UTC."""


class StoppingView(TypedDict):
    """The server is about to stop."""

    stopping: Literal[True]


class ControllerHealthView(TypedDict):
    """State of the controller."""

    turn_age_s: float
    """Seconds since its last cycle began."""
    doing: str
    failing: str
    """Error of the last cycle."""
    failures: int
    trouble: str
    """Why no fleet is served, for `trouble_s` seconds."""
    trouble_s: float
    holding: str
    """Why no job is placed."""
    overtaken: bool
    """Whether another server controls the fleet."""
    policy_fault: str
    policy: str
    gap: float
    """0 to 1: upper bound of what another decision than the last full one could gain, by the measure of `policy`."""


class NodeHealthView(TypedDict):
    """State of a node."""

    node: str
    lost: str
    ready: bool
    silent_s: float
    unknown: list[str]
    """Attempts there that are not in the job store."""
    unmade: str
    """Why it has no agent."""


class StoreHealthView(TypedDict):
    """State of the job store."""

    where: str
    error: str
    failed_s: float
    """Seconds for which it could not be written."""
    size_bytes: int | None
    free_bytes: int | None
    damaged: list[str]
    """Names of damaged rows; `damaged_rows` is the number of all."""
    damaged_rows: int
    reports_lost: int


class BlockedView(TypedDict):
    """A call into Ray that has exceeded its time limit."""

    name: str
    waiting_s: float


class LeakView(TypedDict):
    """Devices that are held for no attempt."""

    holder: str
    """An attempt, a reservation, or Ray."""
    reason: str
    node: str


class RepairView(TypedDict):
    """A restart by the server."""

    repaired_at: str
    """ISO 8601 in UTC."""
    node: str
    """Name of the node, or of the part of the fleet."""
    message: str


class HealthSnapshotView(TypedDict):
    """State of the server and its fleet."""

    controller: ControllerHealthView
    store: StoreHealthView
    blocked: list[BlockedView]
    exhausted: bool
    """Whether all threads for calls into Ray are blocked."""
    nodes: list[NodeHealthView]
    leaks: list[LeakView]
    repairs: list[RepairView]
    """Restarts of the last ten minutes."""
    not_repaired: list[str]
    """Why lost nodes are not restarted now."""
    replaced: bool
    """Whether the job store is another one than the fleet was started with."""
    repairing: bool
    """Whether the server restarts lost nodes."""


class HealthView(HealthSnapshotView):
    """State of the server and its fleet, with what follows from it."""

    findings: list[FindingView]
    jobs: dict[str, int]
    """Number of jobs in each state."""
