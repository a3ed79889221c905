"""What the controller wants done. Each may be lost, or be carried out twice: the controller asks again until told."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.attempts import Ran
from orchestrator.core.demand import Request
from orchestrator.core.model import Data
from workers.messages import Order


@dataclass(frozen=True, slots=True)
class Launch:
    """Reserve, raise the fence, bring checkpoint and code, start every part. Answered by Launched or LaunchFailed.

    `orders` are by node rank, without the meeting point, the checkpoint to resume from and `data`, which is brought to
    every node; `bundles` are Ray resources by node rank, reserved under the name `place`. `fenced`: its fence may stand
    at its epoch already, since we raised it so; else an attempt of that epoch has run. `visited` are the pools that may
    hold checkpoints of the job, `known` is the newest one it told; `patient`: where that cannot be reached, the job
    waits for it. `replicas` are the copies that it has on other machines. `ran` are the attempts before, the newest
    first.
    """

    job: str
    epoch: int
    nodes: tuple[str, ...]
    orders: tuple[Order, ...]
    bundles: tuple[Mapping[str, float], ...]
    pool: str
    place: str
    fenced: bool = False
    package: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict)
    visited: tuple[str, ...] = ()
    known: dict[str, Any] | None = None
    resume_from: str = ""
    ran: tuple[Ran, ...] = ()
    patient: bool = False
    data: tuple[Data, ...] = ()
    replicas: tuple[dict[str, Any], ...] = ()

    @property
    def attempt(self) -> str:
        return f"{self.job}.{self.epoch}"


@dataclass(frozen=True, slots=True)
class Stop:
    """`how` is one of workers.messages.STOPS. Answered by Stopped. `asked_s` comes back with the answer (monotonic)."""

    node: str
    job: str
    epoch: int
    how: str
    asked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Forget:
    """The end of an attempt is stored: its node may remove what the ranks wrote. No answer."""

    node: str
    job: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Let nothing of `job` count that is older than `epoch`. Answered by Fenced.

    `lower`: the attempt `epoch` counts again; the fence just above it is taken down. Fences change in the order given.
    `asked_s` comes back with the answer (monotonic).
    """

    job: str
    epoch: int
    lower: bool = False
    asked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Release:
    """Give back what is reserved in Ray under that name. Answered by Released. `asked_s` comes back with the answer."""

    place: str
    asked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MakeAgent:
    """Find or start the agent of a node. Answered by AgentMade."""

    node: str
    ray_id: str


@dataclass(frozen=True, slots=True)
class RestartAgent:
    """End an agent that does not answer, for Ray to start it again. No answer: it says hello."""

    node: str
    ray_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RestartNode:
    """End a node on which nothing runs, for it to be started again, if Ray still reserves resources there for nobody.
    Then Ray lists it under another id; else NotRestarted answers.
    """

    node: str
    ray_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class DropAgent:
    """The node has left: nobody asks its agent any more."""

    node: str
    ray_id: str


@dataclass(frozen=True, slots=True)
class RestAgent:
    """End the agent of a node that nothing uses, so that the autoscaler may take the node away. No answer."""

    node: str
    ray_id: str


@dataclass(frozen=True, slots=True)
class AskNodes:
    """Tell the autoscaler all nodes that are needed, in use or not; it replaces what it was told before. Answered by
    NodesAsked.
    """

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Metrics of a step. `at`: position among the events of its attempt."""

    job: str
    epoch: int
    time_s: float
    at: int
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Copy the checkpoint `path` of `pool`, which node `reader` sees, into the storage of `node`, and keep the newest
    `keep` there. Answered by Replicated.
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
    """To whoever asked: this cannot be done, and what to do instead. `absent`: what was named is not there."""

    message: str
    remedy: str = ""
    absent: bool = False


@dataclass(frozen=True, slots=True)
class Warn:
    """For the log."""

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
