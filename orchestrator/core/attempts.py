"""Attempts that may still have processes somewhere: what the controller keeps of them in memory only.

After a restart of the controller they are rebuilt from the log's leases; phases and cursors come back from the agents.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from orchestrator.core.fold import Attempt, Record
from orchestrator.core.progress import Pace
from workers.messages import PHASES, Outcome

ORDER = ("", *PHASES)
"""Phases of a part, in this order only; "" until its node has reported it."""


def ranks_of(task: str, launch: str, devices: int) -> int:
    """On one node with so many devices of it: one for each in a training, and where a command is launched so; else one
    for all of them.
    """
    return devices if task == "train" or (task == "run" and launch == "ranks") else 1


def node_of(devices_id: str) -> str:
    """`xla-0/tpu:emulated` lies on node `xla-0`."""
    return devices_id.partition("/")[0]


def place_of(leases: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    """16 hexadecimal digits."""
    text = ";".join(f"{devices_id}:{','.join(map(str, numbers))}" for devices_id, numbers in leases)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Ran:
    """An attempt that may have left files. `over`: its nodes have told that no process of it is left."""

    epoch: int
    pool: str
    nodes: tuple[str, ...]
    started: bool
    over: bool


OVER = frozenset({"succeeded", "preempted", "cancelled"})
"""Of an attempt on several nodes: all of them have told so."""


def ran(attempts: tuple[Attempt, ...]) -> tuple[Ran, ...]:
    """The newest first."""
    return tuple(
        Ran(a.epoch, a.pool, tuple(node_of(d) for d, _ in a.leases), a.started_s is not None, _is_over(a))
        for a in reversed(attempts)
    )


def _is_over(attempt: Attempt) -> bool:
    """A node that was lost, or that was told to end a part that counts no more, may act for a moment yet."""
    return attempt.outcome in OVER or (attempt.outcome == "failed" and len(attempt.leases) == 1)


@dataclass(frozen=True, slots=True)
class Part:
    """One node's share; `first_rank` is the lowest of its global ranks. `outcome` is set once it ended, or once nothing
    of it can run; `ended_s` is when we learned it, and `heard_s` when its node was asked for the newest list that has
    it, 0 where its newest list has not: neither a node that appears again nor one with an empty disk says anything of
    it. `told`: by its own node, not concluded from its silence.

    `unsure` is "" or why its node may not have it: it ends as lost once that is certain, unless its node reports it,
    or lists it, again. `spoiled` is "" or why what
    its agent told of it cannot be used: it is stopped, and ends as failed.
    """

    node: str
    devices_id: str
    numbers: tuple[int, ...]
    first_rank: int = 0
    phase: str = ""
    cursor: int = 0
    outcome: Outcome | None = None
    ended_s: float = 0.0
    heard_s: float = 0.0
    told: bool = True
    unsure: str = ""
    spoiled: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A node was asked to stop in this way, first at `since_s` and last at `at_s`; `heard` once it has answered, which
    was then at `at_s`. Monotonic seconds.
    """

    how: str
    at_s: float
    heard: bool = False
    since_s: float = 0.0


AFTERMATH_S = 60.0
"""So long after its nodes answer again an attempt may still fail of the connections that had broken."""


@dataclass(frozen=True, slots=True)
class CutOff:
    """Why nodes of an attempt could not be reached, since when, and when they could again (None: they cannot yet)."""

    reason: str
    since_s: float
    over_s: float | None = None

    def explains(self, at_s: float) -> bool:
        """Whether what a part told at that time may follow from it."""
        return self.since_s <= at_s and (self.over_s is None or at_s <= self.over_s + AFTERMATH_S)


@dataclass(frozen=True, slots=True)
class Lowering:
    """A fence is to be taken down: since when, and when that was asked for last. Monotonic seconds."""

    since_s: float
    asked_s: float


@dataclass(frozen=True, slots=True)
class Live:
    """`launching` until the launch has answered. `since_s`: from then on its nodes must know it. `fence_known`: this
    process launched it, or has read that its fence does not stand above it.

    `read_s`: when it was last asked how that fence stands.
    `fence_asked_s` and `fenced_s`: when a fence above its epoch was asked for, and when it stood; `raised_s`: when it
    was first asked for since it was last lowered; `lowering` until it is confirmed that it was. `asked` is by node.
    `cut_off`: why a fence was raised, or its launch failed in part: what its nodes tell while it explains that follows
    from it, whatever we asked them.
    `overruled` is "" or why it does not count any more, whatever its nodes tell. `told_at` is the position of the
    newest stored event of rank 0. `cancelled_s` is since when it is known that its job was cancelled. `pace` is None
    before its first report. Monotonic seconds.
    """

    job: str
    epoch: int
    parts: tuple[Part, ...]
    since_s: float
    launching: bool = False
    told_at: int = 0
    asked: Mapping[str, Asked] = field(default_factory=dict)
    fence_known: bool = True
    read_s: float = 0.0
    fence_asked_s: float | None = None
    fenced_s: float | None = None
    raised_s: float = 0.0
    lowering: Lowering | None = None
    overruled: str = ""
    cut_off: CutOff | None = None
    cancelled_s: float | None = None
    pace: Pace | None = None

    @property
    def key(self) -> str:
        return f"{self.job}.{self.epoch}"

    @property
    def place(self) -> str:
        """Name of its devices together: the same for the next attempt on just these."""
        return place_of(tuple((part.devices_id, part.numbers) for part in self.parts))

    @property
    def over(self) -> bool:
        return not self.launching and all(part.outcome is not None for part in self.parts)

    @property
    def running(self) -> bool:
        return all(part.phase == "running" for part in self.parts)

    def cut(self, why: str, now_s: float) -> "Live":
        """The first reason counts for as long as it explains what its nodes tell."""
        before = self.cut_off
        same = before is not None and before.explains(now_s)
        return replace(self, cut_off=replace(before, over_s=None) if before and same else CutOff(why, now_s))

    def reached(self, now_s: float) -> "Live":
        """All its nodes answer."""
        if self.cut_off is None or self.cut_off.over_s is not None:
            return self
        return replace(self, cut_off=replace(self.cut_off, over_s=now_s))

    def part_key(self, node_rank: int) -> str:
        return f"{self.key}.{node_rank}"

    def with_part(self, node_rank: int, part: Part, told_at: int | None = None) -> "Live":
        parts = (*self.parts[:node_rank], part, *self.parts[node_rank + 1 :])
        return replace(self, parts=parts, told_at=self.told_at if told_at is None else told_at)


def live_of(record: Record, now_s: float, *, launching: bool = False, told_at: int = 0) -> Live | None:
    """The attempt of `record` that may still hold devices, if there is one."""
    attempt = record.live
    if attempt is None:
        return None
    parts: list[Part] = []
    first_rank = 0
    for devices_id, numbers in attempt.leases:
        parts.append(Part(node_of(devices_id), devices_id, numbers, first_rank))
        first_rank += ranks_of(record.job.task, attempt.launch, len(numbers))
    return Live(record.job.id, attempt.epoch, tuple(parts), now_s, launching, told_at)
