"""Commands of the controller. One may be lost or carried out twice, so it is repeated until its reply arrives."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.attempts import Ran
from orchestrator.core.demand import Request
from orchestrator.core.model import Data
from workers.messages import Order


@dataclass(frozen=True, slots=True)
class Launch:
    """Reserve, raise the fence, copy checkpoint and code, start every part. Answered by Launched or LaunchFailed.

    `orders` are by node rank, without the rendezvous address, the checkpoint to resume from and `data`, which is copied
    to every node. `bundles` are Ray resources by node rank, reserved under the name `place`. `fenced`: the fence may be
    at this epoch already, because we raised it; if not, a fence there means that an attempt of this epoch has run.
    `visited` are the pools that may hold checkpoints of the job, `known` is the newest one that it reported; `patient`:
    the job waits if that cannot be reached. `replicas` are its copies on other machines. `ran` are the previous
    attempts, newest first.
    """

    job: str
    epoch: int
    nodes: tuple[str, ...]
    orders: tuple[Order, ...]
    bundles: tuple[Mapping[str, float], ...]
    pool: str
    place: str
    fence_is_ours: bool = False
    package: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict)
    earlier_pools: tuple[str, ...] = ()
    last_checkpoint: dict[str, Any] | None = None
    resume_from: str = ""
    previous_attempts: tuple[Ran, ...] = ()
    waits_for_checkpoint: bool = False
    data: tuple[Data, ...] = ()
    replicas: tuple[dict[str, Any], ...] = ()

    @property
    def attempt(self) -> str:
        return f"{self.job}.{self.epoch}"


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop an attempt on a node. Answered by Stopped with the same `asked_s` (monotonic).

    `how` is one of workers.messages.STOPS.
    """

    node: str
    job: str
    epoch: int
    how: str
    requested_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Forget:
    """The end of an attempt is stored, so its node may remove the files of its ranks. No reply."""

    node: str
    job: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Invalidate all attempts of `job` older than `epoch`. Answered by Fenced with the same `asked_s` (monotonic).

    `lower`: remove the fence just above attempt `epoch`, so that the attempt counts again. Fences of a job change in
    the order of these commands.
    """

    job: str
    epoch: int
    lower: bool = False
    requested_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Release:
    """Remove the reservation `place` in Ray. Answered by Released with the same `asked_s`."""

    place: str
    requested_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MakeAgent:
    """Find or start the agent of a node. Answered by AgentMade."""

    node: str
    ray_id: str


@dataclass(frozen=True, slots=True)
class RestartAgent:
    """End an agent that does not answer, so that Ray restarts it. No reply: the new agent registers itself."""

    node: str
    ray_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RestartNode:
    """End an idle node so that it is started again, if Ray still holds a stuck reservation there.

    Ray then lists it under a new id; otherwise the reply is NotRestarted.
    """

    node: str
    ray_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class DropAgent:
    """Stop polling the agent of a node that has left the cluster."""

    node: str
    ray_id: str


@dataclass(frozen=True, slots=True)
class RestAgent:
    """End the agent of an unused node, so that the autoscaler can remove the node. No reply."""

    node: str
    ray_id: str


@dataclass(frozen=True, slots=True)
class AskNodes:
    """Request from the autoscaler all nodes that are needed, those in use included. Answered by NodesAsked.

    Each request replaces the one before.
    """

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Store the metrics of a step. `at`: position among the events of its attempt."""

    job: str
    epoch: int
    time_s: float
    at: int
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Copy checkpoint `path` of `pool`, read through node `reader`, to the storage of `node`. Answered by Replicated.

    The newest `keep` copies are kept there.
    """

    job: str
    step: int
    reader: str
    pool: str
    path: str
    node: str
    keep: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Reject a user's request, with a reason and a remedy. `absent`: the named object does not exist."""

    message: str
    remedy: str = ""
    is_missing: bool = False


@dataclass(frozen=True, slots=True)
class Warn:
    """Write a warning to the server's log."""

    text: str


Command = (
    Launch
    | Stop
    | Forget
    | Fence
    | Release
    | MakeAgent
    | RestartAgent
    | RestartNode
    | DropAgent
    | RestAgent
    | AskNodes
    | StoreReport
    | Replicate
    | Refuse
    | Warn
)
