"""Commands of the controller. One may be lost or carried out twice, so it is repeated until its reply arrives."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.controller.attempts import PreviousAttempt
from orchestrator.core.controller.scaling import Request
from orchestrator.core.model import Data
from workers.protocol.messages import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedCommand:
    """Base of commands. `cause`: number of the message that led to it; `number`: its own. A draft sets both.

    Commands with equal contents are equal.
    """

    cause: int = field(default=0, compare=False, repr=False)
    number: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Launch(NumberedCommand):
    """Reserve, raise the fence, copy checkpoint and code, start every part. Reply: Launched or LaunchFailed.

    `orders` are by node rank, without the rendezvous address, the checkpoint to resume from and `data`, which is copied
    to every node. `bundles` are Ray resources by node rank, reserved under the name `reservation_name`.
    `fence_is_ours`: the fence may be at this epoch already, because we raised it; if not, a fence there means that an
    attempt of this epoch has run. `earlier_pools` are the pools that may hold checkpoints of the job, `last_checkpoint`
    is the newest one that it reported; `waits_for_checkpoint`: the job waits if that cannot be reached. `replicas` are
    its copies on other machines. `previous_attempts` are the previous attempts, newest first.
    """

    job: str
    epoch: int
    nodes: tuple[str, ...]
    orders: tuple[Order, ...]
    bundles: tuple[Mapping[str, float], ...]
    pool: str
    reservation_name: str
    fence_is_ours: bool = False
    code_archive: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict)
    earlier_pools: tuple[str, ...] = ()
    last_checkpoint: dict[str, Any] | None = None
    resume_from: str = ""
    previous_attempts: tuple[PreviousAttempt, ...] = ()
    waits_for_checkpoint: bool = False
    data: tuple[Data, ...] = ()
    replicas: tuple[dict[str, Any], ...] = ()

    @property
    def attempt(self) -> str:
        return f"{self.job}.{self.epoch}"


@dataclass(frozen=True, slots=True)
class Stop(NumberedCommand):
    """Stop an attempt on a node. Reply: StopAnswered with the same `requested_s` (monotonic).

    `how` is one of workers.protocol.messages.STOPS.
    """

    node: str
    job: str
    epoch: int
    how: str
    requested_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RemoveFiles(NumberedCommand):
    """The end of an attempt is stored, so its node may remove the files of its ranks. No reply."""

    node: str
    job: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Fence(NumberedCommand):
    """Invalidate all attempts of `job` older than `epoch`. Reply: FenceAnswered with the same `requested_s`
    (monotonic).

    `lower`: remove the fence just above attempt `epoch`, so that the attempt counts again. Fences of a job change in
    the order of these commands.
    """

    job: str
    epoch: int
    lower: bool = False
    requested_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Release(NumberedCommand):
    """Remove the reservation `reservation_name` in Ray. Reply: ReleaseAnswered with the same `requested_s`."""

    reservation_name: str
    requested_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StartAgent(NumberedCommand):
    """Find or start the agent of a node. Reply: AgentStarted."""

    node: str
    ray_id: str


@dataclass(frozen=True, slots=True)
class RestartAgent(NumberedCommand):
    """End an agent that does not respond, so that Ray restarts it. No reply: the new agent registers itself."""

    node: str
    ray_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RestartNode(NumberedCommand):
    """End an idle node so that it is started again, if Ray still holds a stuck reservation there.

    Ray then lists it under a new id; otherwise the reply is NodeNotRestarted.
    """

    node: str
    ray_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class UnwatchAgent(NumberedCommand):
    """Stop polling the agent of a node that has left the cluster."""

    node: str
    ray_id: str


@dataclass(frozen=True, slots=True)
class EndIdleAgent(NumberedCommand):
    """End the agent of an unused node, so that the autoscaler can remove the node. No reply."""

    node: str
    ray_id: str


@dataclass(frozen=True, slots=True)
class RequestNodes(NumberedCommand):
    """Request from the autoscaler all nodes that are needed, those in use included. Reply: NodeRequestAnswered.

    Each request replaces the one before.
    """

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class StoreReport(NumberedCommand):
    """Store the metrics of a step. `at`: position among the events of its attempt."""

    job: str
    epoch: int
    time_s: float
    at: int
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Replicate(NumberedCommand):
    """Copy checkpoint `path` of `pool`, read through node `reader`, to the storage of `node`. Reply: Replicated.

    Older copies there than the newest `keep` are removed.
    """

    job: str
    step: int
    reader: str
    pool: str
    path: str
    node: str
    keep: int


@dataclass(frozen=True, slots=True)
class Reject(NumberedCommand):
    """Reject a user's request, with a reason and a remedy. `is_missing`: the named object does not exist."""

    message: str
    remedy: str = ""
    is_missing: bool = False


@dataclass(frozen=True, slots=True)
class LogWarning(NumberedCommand):
    """Write a warning to the server's log."""

    text: str


Command = (
    Launch
    | Stop
    | RemoveFiles
    | Fence
    | Release
    | StartAgent
    | RestartAgent
    | RestartNode
    | UnwatchAgent
    | EndIdleAgent
    | RequestNodes
    | StoreReport
    | Replicate
    | Reject
    | LogWarning
)
