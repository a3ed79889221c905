"""In-memory state of attempts that may still have processes on some node.

After a restart of the controller it is rebuilt from the allocations in the log; agents send phases and cursors again.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from orchestrator.core.jobs.fold import Attempt, Record
from orchestrator.core.jobs.progress import Pace
from orchestrator.core.timing import CUT_OFF_AFTERMATH_S
from workers.protocol.messages import PHASES, Outcome

PHASE_ORDER = ("", *PHASES)
"""Phases of a part in order; "" until its node has reported it."""


def ranks_of(task: str, launch: str, devices: int) -> int:
    """Return the number of ranks on a node: one per device for training and commands with launch `ranks`, else one."""
    return devices if task == "train" or (task == "run" and launch == "ranks") else 1


def node_of(devices_id: str) -> str:
    """Return the node of a devices id: `xla-0` for `xla-0/tpu:emulated`."""
    return devices_id.partition("/")[0]


def allocation_name(allocation: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    """Return a name for these devices: 16 hexadecimal digits, equal for equal allocations."""
    text = ";".join(f"{devices_id}:{','.join(map(str, numbers))}" for devices_id, numbers in allocation)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Transition:
    """Row of a table in core/attempt/attempt_states.py that was applied because of message number `cause`.

    `node` is that of a part or of a stop request, None for the attempt itself; the class of `before` says which of them
    it is. `after` may equal `before`. `why`: the reason, or "".
    """

    cause: int
    job: str
    epoch: int
    node: str | None
    before: StrEnum
    event: str
    after: StrEnum
    why: str = ""


@dataclass(frozen=True, slots=True)
class PreviousAttempt:
    """Previous attempt that may have left files. `is_over`: its nodes have reported that all its processes ended."""

    epoch: int
    pool: str
    nodes: tuple[str, ...]
    started: bool
    is_over: bool


CONFIRMED_ENDS = frozenset({"succeeded", "preempted", "cancelled"})
"""Outcomes that an attempt on several nodes has only if all of them have reported its end."""


def previous_attempts(attempts: tuple[Attempt, ...]) -> tuple[PreviousAttempt, ...]:
    """Return the previous attempts, newest first."""
    return tuple(
        PreviousAttempt(
            a.epoch, a.pool, tuple(node_of(d) for d, _ in a.allocation), a.started_s is not None, _is_over(a)
        )
        for a in reversed(attempts)
    )


def _is_over(attempt: Attempt) -> bool:
    """Return True if no process of the attempt is left. After `lost` or `fenced`, some may run for a moment longer."""
    return attempt.outcome in CONFIRMED_ENDS or (attempt.outcome == "failed" and len(attempt.allocation) == 1)


class PartState(StrEnum):
    UNREPORTED = "UNREPORTED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    UNCONFIRMED = "UNCONFIRMED"
    UNREADABLE = "UNREADABLE"
    ENDED = "ENDED"


@dataclass(frozen=True, slots=True)
class AttemptPart:
    """Part of an attempt on one node; `first_rank` is the lowest of its global ranks.

    core/attempt/transitions.py sets `state`. `last_reported` is UNREPORTED, STARTING or RUNNING, as its node reported
    last: it is the state again once a doubt ends. `outcome` is set once it has ended, or once none of its processes can
    run. `ended_s` is when we learned that. `last_listed_s` is when the node's newest list of attempts was requested, if
    that list contains the part, else 0: a node that returns, or one with an empty disk, proves nothing about it.
    `is_reported`: the outcome came from its own node and was not concluded from silence.

    `doubt` says why an UNCONFIRMED part may not exist on its node: it ends as lost once that is certain, unless its
    node sends a status of it or lists it again. `unreadable_reason` is "" or why the agent's messages about it cannot
    be read: it is stopped and ends as failed.
    """

    node: str
    devices_id: str
    numbers: tuple[int, ...]
    first_rank: int = 0
    state: PartState = PartState.UNREPORTED
    last_reported: PartState = PartState.UNREPORTED
    cursor: int = 0
    outcome: Outcome | None = None
    ended_s: float = 0.0
    last_listed_s: float = 0.0
    is_reported: bool = True
    doubt: str = ""
    unreadable_reason: str = ""

    @property
    def phase(self) -> str:
        """Phase that the controller has of it, of PHASE_ORDER."""
        reported = PartState.ENDED if self.state is PartState.ENDED else self.last_reported
        return "" if reported is PartState.UNREPORTED else reported.lower()


class StopState(StrEnum):
    NONE = "NONE"
    REQUESTED = "REQUESTED"
    ACKNOWLEDGED = "ACKNOWLEDGED"


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Request to a node to stop an attempt, first sent at `since_s` and last at `updated_s` (monotonic).

    `updated_s` of an acknowledged request is the time of the node's reply. core/attempt/transitions.py sets the state.
    """

    state: StopState
    how: str
    updated_s: float
    since_s: float


@dataclass(frozen=True, slots=True)
class CutOff:
    """Period in which nodes of an attempt were unreachable, and why. `until_s` is its end, None while it lasts."""

    reason: str
    since_s: float
    until_s: float | None = None

    def explains(self, at_s: float) -> bool:
        """Return True if a failure at that time may be a consequence of this disconnection."""
        return self.since_s <= at_s and (self.until_s is None or at_s <= self.until_s + CUT_OFF_AFTERMATH_S)


class AttemptState(StrEnum):
    LAUNCHING = "LAUNCHING"
    ADOPTED = "ADOPTED"
    CHECKING = "CHECKING"
    ACTIVE = "ACTIVE"
    FENCING = "FENCING"
    FENCED = "FENCED"
    LOWERING = "LOWERING"
    SUPERSEDED = "SUPERSEDED"
    ENDED = "ENDED"


UNFENCED = frozenset({AttemptState.LAUNCHING, AttemptState.ADOPTED, AttemptState.ACTIVE})
"""States in which no change of the fence is requested and none is above the attempt."""


@dataclass(frozen=True, slots=True)
class FenceRequest:
    """Request about the fence above an attempt. Monotonic seconds.

    `since_s`: when it was first sent to raise or to lower the fence, or to read it before it is raised. `sent_s`: when
    it was last sent. `stored_s`: when Ray had stored a fence above the attempt.
    """

    since_s: float
    sent_s: float
    stored_s: float | None = None


@dataclass(frozen=True, slots=True)
class LiveAttempt:
    """Attempt that may still run. Times are monotonic seconds.

    core/attempt/transitions.py sets `state` and `fence`, which is None in the states of UNFENCED. `since_s`: from then
    on, its nodes must list it. `read_s`: when the newest request to read the fence of an ADOPTED attempt was sent.
    `stop_requests` are stop requests by node. `cut_off`: why a fence was raised or its launch failed in part; failures
    reported while `cut_off` explains them are attributed to it, whatever stop we requested. `superseded_reason` is ""
    or why the attempt does not count any more, whatever outcome its nodes send. `last_event_at` is the position of the
    newest stored event of rank 0. `cancelled_s` is when we learned that its job was cancelled. `pace` is None before
    its first report.
    """

    job: str
    epoch: int
    parts: tuple[AttemptPart, ...]
    since_s: float
    state: AttemptState
    last_event_at: int = 0
    stop_requests: Mapping[str, StopRequest] = field(default_factory=dict)
    read_s: float = 0.0
    fence: FenceRequest | None = None
    superseded_reason: str = ""
    cut_off: CutOff | None = None
    cancelled_s: float | None = None
    pace: Pace | None = None

    @property
    def key(self) -> str:
        return f"{self.job}.{self.epoch}"

    @property
    def allocation_name(self) -> str:
        """Name of its set of devices, the same for another attempt on exactly these devices."""
        return allocation_name(tuple((part.devices_id, part.numbers) for part in self.parts))

    @property
    def is_over(self) -> bool:
        return self.state is not AttemptState.LAUNCHING and all(part.state is PartState.ENDED for part in self.parts)

    @property
    def raised_fence(self) -> FenceRequest | None:
        """Request to raise a fence above it, also while that fence is read first; None once it is lowered."""
        return None if self.state is AttemptState.LOWERING else self.fence

    @property
    def fenced_s(self) -> float | None:
        """When Ray had stored a fence above it; None if no such fence counts."""
        return self.fence.stored_s if self.fence else None

    @property
    def is_running(self) -> bool:
        return all(part.phase == "running" for part in self.parts)

    def begin_cut_off(self, why: str, now_s: float) -> "LiveAttempt":
        """Begin or extend a disconnection. The first reason stays as long as it explains failures."""
        previous = self.cut_off
        still_explains = previous is not None and previous.explains(now_s)
        return replace(
            self, cut_off=replace(previous, until_s=None) if previous and still_explains else CutOff(why, now_s)
        )

    def end_cut_off(self, now_s: float) -> "LiveAttempt":
        """End the disconnection, because all nodes respond."""
        if self.cut_off is None or self.cut_off.until_s is not None:
            return self
        return replace(self, cut_off=replace(self.cut_off, until_s=now_s))

    def part_key(self, node_rank: int) -> str:
        return f"{self.key}.{node_rank}"

    def with_part(self, node_rank: int, part: AttemptPart, position: int | None = None) -> "LiveAttempt":
        parts = (*self.parts[:node_rank], part, *self.parts[node_rank + 1 :])
        return replace(self, parts=parts, last_event_at=self.last_event_at if position is None else position)


def attempt_of(record: Record, now_s: float, state: AttemptState) -> LiveAttempt | None:
    """Return the attempt of `record` that may still hold devices, in its first state, or None."""
    attempt = record.live_attempt
    if attempt is None:
        return None
    launch = record.candidate_of(attempt).launch
    parts: list[AttemptPart] = []
    first_rank = 0
    for devices_id, numbers in attempt.allocation:
        parts.append(AttemptPart(node_of(devices_id), devices_id, numbers, first_rank))
        first_rank += ranks_of(record.job.task, launch, len(numbers))
    return LiveAttempt(record.job.id, attempt.epoch, tuple(parts), now_s, state)
