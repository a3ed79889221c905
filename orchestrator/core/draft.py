"""The controller's state, and a step of it under way: a draft copies what it changes, so that a step that cannot be
stored, or that fails, leaves nothing behind.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from orchestrator.core.attempts import Live
from orchestrator.core.commands import Command, Warn
from orchestrator.core.demand import Scaling
from orchestrator.core.fold import Record, apply, ignored
from orchestrator.core.messages import Now
from orchestrator.core.model import Event, Plan, Progress, Since
from orchestrator.core.nodes import Node
from orchestrator.core.placement_slots import Memory
from orchestrator.core.policy import Policy, Project
from orchestrator.core.states import TERMINAL, WAITING
from orchestrator.core.throughput import History

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Kept:
    """A reservation that is to go back: of which attempt, since when, and when that was asked for last."""

    attempt: str
    since_s: float
    asked_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Overtaken:
    """How far a job is whose log is an older copy (see core/epoch_guard.py): up to which epoch (`floor`) others may
    have used, the fence that is asked for (`epoch`, since `since_s`, last at `asked_s`), and when it stood above
    `floor`.
    """

    floor: int = -1
    epoch: int = -1
    since_s: float = 0.0
    asked_s: float = 0.0
    stood_s: float | None = None


@dataclass(frozen=True, slots=True)
class Copying:
    """How far the newest checkpoint of a job is copied to another machine (see core/checkpoint_replication.py): the one
    of `step` is on its way to node `target` since `since_s`, or none is ("") and the next may go at `due_s`. `failures`
    in a row, the last of them to node `failed`.
    """

    target: str = ""
    step: int = -1
    since_s: float = 0.0
    due_s: float = 0.0
    failures: int = 0
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Uncopied:
    """An ended job whose newest checkpoint is still to be copied to another machine, since when."""

    record: Record
    since_s: float


@dataclass(frozen=True, slots=True)
class Control:
    """`records` are the open jobs: not ended, or with an attempt that may still run; `lives` those attempts, by job.

    `drained`: node -> reason. `paused_until_s` and `since`: by job. `releasing`: places whose reservation is to go
    back. `raised`: by job, where we last raised its fence above an attempt. `overtaken`: jobs of which attempts have
    run that the log does not know. `copies`, `progress` and, of ended jobs, `uncopied`: by job. `trouble` is why
    nothing can be placed, "" when it can; `joined` is whether we are in the fleet's cluster, `joined_s` since when;
    `scaling` is of its autoscaler. `planned_s` is of the newest plan, `decided_s` of the newest in which equals could
    move; `memory` is for the next. `ticked_s` is of the newest tick. `changed`: a plan may find something new.
    Monotonic seconds.
    """

    records: Mapping[str, Record] = field(default_factory=dict)
    lives: Mapping[str, Live] = field(default_factory=dict)
    on_node: Mapping[str, frozenset[str]] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    drained: Mapping[str, str] = field(default_factory=dict)
    paused_until_s: Mapping[str, float] = field(default_factory=dict)
    since: Mapping[str, Since] = field(default_factory=dict)
    releasing: Mapping[str, Kept] = field(default_factory=dict)
    raised: Mapping[str, int] = field(default_factory=dict)
    overtaken: Mapping[str, Overtaken] = field(default_factory=dict)
    copies: Mapping[str, Copying] = field(default_factory=dict)
    uncopied: Mapping[str, Uncopied] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)
    history: History = field(default_factory=History)
    scaling: Scaling = field(default_factory=Scaling)
    plan: Plan = field(default_factory=Plan)
    planned_s: float = float("-inf")
    decided_s: float = float("-inf")
    memory: Memory = field(default_factory=Memory)
    policy: Policy = field(default_factory=Policy)
    projects: Mapping[str, Project] = field(default_factory=dict)
    ticked_s: float = 0.0
    changed: bool = True
    joined: bool = False
    joined_s: float = 0.0
    trouble: str = ""


class Table(Generic[V]):
    """A mapping by name that is copied at its first change."""

    def __init__(self, base: Mapping[str, V]):
        self._base = base
        self._own: dict[str, V] | None = None

    @property
    def now(self) -> Mapping[str, V]:
        return self._base if self._own is None else self._own

    def __getitem__(self, key: str) -> V:
        return self.now[key]

    def __contains__(self, key: str) -> bool:
        return key in self.now

    def __iter__(self) -> Iterator[str]:
        return iter(self.now)

    def get(self, key: str) -> V | None:
        return self.now.get(key)

    def items(self) -> list[tuple[str, V]]:
        """As they are now: they may be changed meanwhile."""
        return list(self.now.items())

    def values(self) -> list[V]:
        return list(self.now.values())

    def __setitem__(self, key: str, value: V) -> None:
        self._changed()[key] = value

    def pop(self, key: str) -> None:
        if key in self.now:
            del self._changed()[key]

    def _changed(self) -> dict[str, V]:
        if self._own is None:
            self._own = dict(self._base)
        return self._own


class Draft:
    """What a step does so far: changed tables, events to store, commands to carry out once they are stored."""

    def __init__(self, control: Control, now: Now):
        self.control, self.now = control, now
        self.records = Table(control.records)
        self.lives = Table(control.lives)
        self._on_node = Table(control.on_node)
        self.nodes = Table(control.nodes)
        self.drained = Table(control.drained)
        self.paused_until_s = Table(control.paused_until_s)
        self.since = Table(control.since)
        self.releasing = Table(control.releasing)
        self.raised = Table(control.raised)
        self.overtaken = Table(control.overtaken)
        self.copies = Table(control.copies)
        self.uncopied = Table(control.uncopied)
        self.progress = Table(control.progress)
        self.events: list[Event] = []
        self.commands: list[Command] = []
        self.changes: dict[str, Any] = {}

    def ended(self) -> Control:
        """The control after this step."""
        return replace(
            self.control,
            records=self.records.now,
            lives=self.lives.now,
            on_node=self._on_node.now,
            nodes=self.nodes.now,
            drained=self.drained.now,
            paused_until_s=self.paused_until_s.now,
            since=self.since.now,
            releasing=self.releasing.now,
            raised=self.raised.now,
            overtaken=self.overtaken.now,
            copies=self.copies.now,
            uncopied=self.uncopied.now,
            progress=self.progress.now,
            **self.changes,
        )

    def change(self, **fields: Any) -> None:
        """Of Control's plain fields."""
        self.changes |= fields

    def command(self, *commands: Command) -> None:
        self.commands += commands

    def warn(self, text: str) -> None:
        self.commands.append(Warn(text))

    def event(self, job: str, event: str, epoch: int, **data: Any) -> str:
        """Let it happen. Returns "" or why it does not count: then nothing has changed."""
        return self.record(Event(job, event, epoch, self.now.wall_s, data))

    def record(self, event: Event) -> str:
        before = self.known(event.job)
        if reason := ignored(before, event):
            return reason
        after = apply(before, event)
        assert after is not None
        self.events.append(event)
        self.keep(after)
        self.change(changed=True)
        return ""

    def known(self, job: str) -> Record | None:
        """Open, or ended and not copied yet."""
        uncopied = self.uncopied.get(job)
        return self.records.get(job) or (uncopied.record if uncopied else None)

    def note(self, owner: str, event: str, **data: Any) -> None:
        """Of something else than a job: it is stored, and moves none."""
        self.events.append(Event(owner, event, 0, self.now.wall_s, data))

    def begin(self, live: Live) -> None:
        """Follow an attempt from now on."""
        self.lives[live.job] = live
        for part in live.parts:
            self._on_node[part.node] = self.on_node(part.node) | {live.job}

    def end(self, live: Live) -> None:
        """Nothing of that attempt runs any more."""
        self.lives.pop(live.job)
        for part in live.parts:
            self._on_node[part.node] = self.on_node(part.node) - {live.job}

    def on_node(self, node: str) -> frozenset[str]:
        """Jobs with an attempt there."""
        return self._on_node.get(node) or frozenset()

    def keep(self, record: Record) -> None:
        """Among the open jobs, or no longer."""
        if record.job.state in TERMINAL and record.live is None:
            self.records.pop(record.job.id)
            self.paused_until_s.pop(record.job.id)
            self.since.pop(record.job.id)
            self.raised.pop(record.job.id)
            self.overtaken.pop(record.job.id)
            self.progress.pop(record.job.id)
            if record.lacks_copies:
                ended = self.uncopied.get(record.job.id)
                self.uncopied[record.job.id] = Uncopied(record, ended.since_s if ended else self.now.s)
            else:
                self.forget_copies(record.job.id)
            return
        self._keep_since(record)
        self.records[record.job.id] = record
        if not record.job.overtaken:
            self.overtaken.pop(record.job.id)
        elif record.job.id not in self.overtaken:
            self.overtaken[record.job.id] = Overtaken()

    def _keep_since(self, record: Record) -> None:
        job, before = record.job, self.records.get(record.job.id)
        waits = job.state in WAITING
        if before is None or (before.job.state in WAITING) != waits:
            known = self.since.get(job.id)
            self.since[job.id] = Since(known.known_s if known else self.now.s, self.now.s)

    def forget_copies(self, job: str) -> None:
        """Of an ended job: no more are made."""
        self.uncopied.pop(job)
        self.copies.pop(job)
