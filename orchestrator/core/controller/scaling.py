"""State of the autoscaler in the controller: groups of nodes, the demand, and what was requested."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.core.model import Devices

Request = dict[str, dict[str, object]]

NEW_NODE_PREFIX = "+"
"""First character in names of nodes that do not exist yet. No job can request such a name."""


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Group of equal nodes that an autoscaler starts and removes: `min_nodes` to `max_nodes`, `hosts` at a time (a
    slice).

    `resources` are those of one node in Ray's units; the other fields are as in `Devices`. Nodes that have not started
    within `start_timeout_s` count as unavailable; an idle one keeps its agent for `keep_idle_s` (see
    core/fleet/autoscaler.py).
    """

    pool: str
    environment: str
    backend: str
    kind: str
    devices: int
    resources: Mapping[str, float]
    max_nodes: int
    hosts: int = 1
    memory_bytes: int = 0
    price_per_hour: float = 0.0
    emulated: bool = False
    min_nodes: int = 0
    start_timeout_s: float = 600.0
    keep_idle_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Number of `nodes` by pool. `jobs`: pool of the new nodes for each job; `why_not`: reasons for the others."""

    nodes: dict[str, int] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)
    why_not: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PendingNodes:
    """Requested nodes of a pool that have not started: since when (monotonic), and how many were ready then."""

    since_s: float
    ready: int


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Pool whose nodes could not be started: when to request them again (monotonic), and the reason."""

    until_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Scaling:
    """State of this cluster's autoscaler, updated by core/fleet/autoscaler.py. Times are monotonic seconds.

    It may start nodes of `groups`; `startable` are all these nodes. `demand` is the newest demand. `confirmed_request`
    is the last request that Ray has confirmed, None if unknown; `pending_request` is the request sent at `requested_s`
    that has no reply yet. By pool: `failed` contains launch failures that Ray reports, `pending` and `unavailable` what
    we observe. `idle_since_s` is since when a node is unused. `notes` are for `explain`: job -> (candidate number, "")
    -> sentence.
    """

    groups: tuple[NodeGroup, ...] = ()
    startable: tuple[Devices, ...] = ()
    demand: Demand = field(default_factory=Demand)
    confirmed_request: tuple[Request, ...] | None = None
    pending_request: tuple[Request, ...] | None = None
    requested_s: float = float("-inf")
    failed: Mapping[str, str] = field(default_factory=dict)
    pending: Mapping[str, PendingNodes] = field(default_factory=dict)
    unavailable: Mapping[str, Unavailable] = field(default_factory=dict)
    idle_since_s: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Mapping[tuple[int, str], str]] = field(default_factory=dict)
