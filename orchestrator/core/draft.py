"""The controller's state, and a step of it under way: a draft copies what it changes, so that a step that cannot be
stored, or that fails, leaves nothing behind.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from orchestrator.core.attempts import Live
from orchestrator.core.commands import Command, Warn
from orchestrator.core.fold import Record, apply, ignored
from orchestrator.core.messages import Now
from orchestrator.core.model import Event, Plan
from orchestrator.core.nodes import Node
from orchestrator.core.states import TERMINAL

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Kept:
    """A reservation that is to go back: of which attempt, since when, and when that was asked for last."""

    attempt: str
    since_s: float
    asked_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Overtaken:
    """How far a job is whose log is an older copy (see core/overtaken.py): up to which epoch (`floor`) others may have
    used, the fence that is asked for (`epoch`, since `since_s`, last at `asked_s`), and when it stood above `floor`.
    """

    floor: int = -1
    epoch: int = -1
    since_s: float = 0.0
    asked_s: float = 0.0
    stood_s: float | None = None


@dataclass(frozen=True, slots=True)
class Control:
    """`records` are the open jobs: not ended, or with an attempt that may still run; `lives` those attempts, by job.

    `drained`: node -> reason. `paused_until_s`: by job. `releasing`: places whose reservation is to go back.
    `raised`: by job, where we last raised its fence above an attempt. `overtaken`: jobs of which attempts have run that
    the log does not know. `trouble` is why nothing can be placed, "" when it can; `joined` is whether we are in the
    fleet's cluster, `joined_s` since when. `ticked_s` is of the newest tick. `changed`: a plan may find something new.
    Monotonic seconds.
    """

    records: Mapping[str, Record] = field(default_factory=dict)
    lives: Mapping[str, Live] = field(default_factory=dict)
    on_node: Mapping[str, frozenset[str]] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    drained: Mapping[str, str] = field(default_factory=dict)
    paused_until_s: Mapping[str, float] = field(default_factory=dict)
    releasing: Mapping[str, Kept] = field(default_factory=dict)
    raised: Mapping[str, int] = field(default_factory=dict)
    overtaken: Mapping[str, Overtaken] = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    planned_s: float = 0.0
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
        self.releasing = Table(control.releasing)
        self.raised = Table(control.raised)
        self.overtaken = Table(control.overtaken)
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
            releasing=self.releasing.now,
            raised=self.raised.now,
            overtaken=self.overtaken.now,
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
        before = self.records.get(event.job)
        if reason := ignored(before, event):
            return reason
        after = apply(before, event)
        assert after is not None
        self.events.append(event)
        self.keep(after)
        self.change(changed=True)
        return ""

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
            self.raised.pop(record.job.id)
            self.overtaken.pop(record.job.id)
            return
        self.records[record.job.id] = record
        if not record.job.overtaken:
            self.overtaken.pop(record.job.id)
        elif record.job.id not in self.overtaken:
            self.overtaken[record.job.id] = Overtaken()
