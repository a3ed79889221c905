"""State of the controller, and a draft of its next state.

A draft copies what it changes, so a step that fails or cannot be stored has no effect.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from orchestrator.core.controller.attempts import LiveAttempt, Transition
from orchestrator.core.controller.commands import Command, LogWarning, StoreReport
from orchestrator.core.controller.messages import Now
from orchestrator.core.controller.nodes import Node
from orchestrator.core.controller.scaling import Scaling
from orchestrator.core.jobs.fold import Record, apply, ignored_reason
from orchestrator.core.model import Event, Plan, Policy, Progress, Project, Since
from orchestrator.core.placement_slots import PlanMemory
from orchestrator.core.states import TERMINAL, WAITING
from orchestrator.core.step_rates import ReportedRates
from orchestrator.core.throughput import History

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class PendingRelease:
    """Reservation that has to be released: its attempt, since when, and when the release was last requested."""

    attempt: str
    since_s: float
    requested_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class EpochGuard:
    """State of the guard of a job whose log is an older copy (see core/attempt/epoch_guard.py).

    `floor`: highest epoch that other attempts may have used. `epoch`: fence that is requested, since `since_s` and last
    at `requested_s`. `fence_stored_s`: when Ray had stored a fence above `floor`.
    """

    floor: int = -1
    epoch: int = -1
    since_s: float = 0.0
    requested_s: float = 0.0
    fence_stored_s: float | None = None


@dataclass(frozen=True, slots=True)
class CopyState:
    """State of copying a job's newest checkpoint to another machine (see core/step/checkpoint_replication.py).

    The checkpoint of `step` has been copied to node `target` since `since_s`; if `target` is "", no copy is running and
    the next may start at `due_s`. `failures`: number in a row, the last of them to node `failed`.
    """

    target: str = ""
    step: int = -1
    since_s: float = 0.0
    due_s: float = 0.0
    failures: int = 0
    failed: str = ""


@dataclass(frozen=True, slots=True)
class PendingLastCopy:
    """Ended job whose newest checkpoint still has to be copied to another machine, and since when."""

    record: Record
    since_s: float


@dataclass(frozen=True, slots=True)
class Control:
    """Complete state of the controller. Times are monotonic seconds.

    `records` are the open jobs (not ended, or with an attempt that may still run), `attempts` these attempts, by job.
    `on_node`: jobs with an attempt on each node. `drained`: node -> reason. `paused_until_s` and `since`: by job.
    `pending_releases`: by allocation name, reservations that must be released. `raised_fences`: by job, the fence that
    we last raised above an attempt. `epoch_guards`: jobs with attempts that are missing from the log. `copies`,
    `progress` and, for ended jobs, `uncopied`: by job. `step_rates`: of running and ended jobs. `problem`:
    why nothing can be placed, or "". `is_joined`: the controller is in the fleet's cluster, since `joined_s`; `scaling`
    is the state of its autoscaler. `planned_s`: time of the newest plan, `full_plan_s` of the newest full one, in which
    jobs of equal priority could move; `memory` is input of the next plan. `ticked_s`: time of the newest tick.
    `needs_plan`: a new plan may differ from the last one. `messages` and `commands` are the numbers of messages handled
    and commands sent since this controller started.
    """

    records: Mapping[str, Record] = field(default_factory=dict)
    attempts: Mapping[str, LiveAttempt] = field(default_factory=dict)
    on_node: Mapping[str, frozenset[str]] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    drained: Mapping[str, str] = field(default_factory=dict)
    paused_until_s: Mapping[str, float] = field(default_factory=dict)
    since: Mapping[str, Since] = field(default_factory=dict)
    pending_releases: Mapping[str, PendingRelease] = field(default_factory=dict)
    raised_fences: Mapping[str, int] = field(default_factory=dict)
    epoch_guards: Mapping[str, EpochGuard] = field(default_factory=dict)
    copies: Mapping[str, CopyState] = field(default_factory=dict)
    uncopied: Mapping[str, PendingLastCopy] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)
    step_rates: ReportedRates = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)
    history: History = field(default_factory=History)
    scaling: Scaling = field(default_factory=Scaling)
    plan: Plan = field(default_factory=Plan)
    planned_s: float = float("-inf")
    full_plan_s: float = float("-inf")
    memory: PlanMemory = field(default_factory=PlanMemory)
    policy: Policy = field(default_factory=Policy)
    projects: Mapping[str, Project] = field(default_factory=dict)
    ticked_s: float = 0.0
    needs_plan: bool = True
    is_joined: bool = False
    joined_s: float = 0.0
    problem: str = ""
    messages: int = 0
    commands: int = 0


class CopyOnWriteDict(Generic[K, V]):
    """Mapping that copies its base at the first change."""

    def __init__(self, base: Mapping[K, V]):
        self._base = base
        self._own: dict[K, V] | None = None

    @property
    def current(self) -> Mapping[K, V]:
        return self._base if self._own is None else self._own

    def __getitem__(self, key: K) -> V:
        return self.current[key]

    def __contains__(self, key: K) -> bool:
        return key in self.current

    def __iter__(self) -> Iterator[K]:
        return iter(self.current)

    def get(self, key: K) -> V | None:
        return self.current.get(key)

    def items(self) -> list[tuple[K, V]]:
        """Return a list, so that the mapping may be changed while it is iterated over."""
        return list(self.current.items())

    def values(self) -> list[V]:
        return list(self.current.values())

    def __setitem__(self, key: K, value: V) -> None:
        self._changed()[key] = value

    def pop(self, key: K) -> None:
        if key in self.current:
            del self._changed()[key]

    def _changed(self) -> dict[K, V]:
        if self._own is None:
            self._own = dict(self._base)
        return self._own


class Draft:
    """Result of a step so far: changed tables, events to store, and commands to execute once these are stored.

    `cause`: number of the message that is being handled. `transitions`: changes of states of attempts, in order.
    """

    def __init__(self, control: Control, now: Now):
        self.control, self.now = control, now
        self.records = CopyOnWriteDict(control.records)
        self.attempts = CopyOnWriteDict(control.attempts)
        self._on_node = CopyOnWriteDict(control.on_node)
        self.nodes = CopyOnWriteDict(control.nodes)
        self.drained = CopyOnWriteDict(control.drained)
        self.paused_until_s = CopyOnWriteDict(control.paused_until_s)
        self.since = CopyOnWriteDict(control.since)
        self.pending_releases = CopyOnWriteDict(control.pending_releases)
        self.raised_fences = CopyOnWriteDict(control.raised_fences)
        self.epoch_guards = CopyOnWriteDict(control.epoch_guards)
        self.copies = CopyOnWriteDict(control.copies)
        self.uncopied = CopyOnWriteDict(control.uncopied)
        self.progress = CopyOnWriteDict(control.progress)
        self.step_rates = CopyOnWriteDict(control.step_rates)
        self.events: list[Event] = []
        self.commands: list[Command] = []
        self.transitions: list[Transition] = []
        self.cause = control.messages
        self.changes: dict[str, Any] = {}

    def finish(self) -> Control:
        """Return the state after this step."""
        return replace(
            self.control,
            records=self.records.current,
            attempts=self.attempts.current,
            on_node=self._on_node.current,
            nodes=self.nodes.current,
            drained=self.drained.current,
            paused_until_s=self.paused_until_s.current,
            since=self.since.current,
            pending_releases=self.pending_releases.current,
            raised_fences=self.raised_fences.current,
            epoch_guards=self.epoch_guards.current,
            copies=self.copies.current,
            uncopied=self.uncopied.current,
            progress=self.progress.current,
            step_rates=self.step_rates.current,
            messages=self.cause,
            commands=self.control.commands + len(self.commands),
            **self.changes,
        )

    def change(self, **fields: Any) -> None:
        """Set fields of Control that are not tables."""
        self.changes |= fields

    def begin_message(self) -> None:
        """Count a message: what follows has its number as cause."""
        self.cause += 1

    def command(self, *commands: Command) -> None:
        """Add commands, and number them: a reply names the number of its command."""
        first = self.control.commands + len(self.commands) + 1
        self.commands += [replace(c, cause=self.cause, number=first + i) for i, c in enumerate(commands)]

    def store_metrics(self, command: StoreReport) -> None:
        """Add a command that nothing replies to and no story names. Jobs send many: it gets no number of its own."""
        self.commands.append(command)

    def warn(self, text: str) -> None:
        self.command(LogWarning(text))

    def event(self, job: str, event: str, epoch: int, **data: Any) -> str:
        """Record and apply an event of a job. Return "", or why it was ignored and nothing has changed."""
        return self.record(Event(job, event, epoch, self.now.wall_s, data))

    def record(self, event: Event) -> str:
        previous = self.find_record(event.job)
        if reason := ignored_reason(previous, event):
            return reason
        updated = apply(previous, event)
        assert updated is not None
        self.events.append(event)
        self.put_record(updated)
        self.change(needs_plan=True)
        return ""

    def find_record(self, job: str) -> Record | None:
        """Return the record of a job that is open, or that has ended with copies missing; else None."""
        uncopied = self.uncopied.get(job)
        return self.records.get(job) or (uncopied.record if uncopied else None)

    def node_event(self, owner: str, event: str, **data: Any) -> None:
        """Store an event whose owner is not a job, e.g. a node. It changes the state of no job."""
        self.events.append(Event(owner, event, 0, self.now.wall_s, data))

    def add_attempt(self, attempt: LiveAttempt) -> None:
        """Track an attempt from now on."""
        self.attempts[attempt.job] = attempt
        for part in attempt.parts:
            self._on_node[part.node] = self.on_node(part.node) | {attempt.job}

    def remove_attempt(self, attempt: LiveAttempt) -> None:
        """Stop tracking an attempt that has ended."""
        self.attempts.pop(attempt.job)
        for part in attempt.parts:
            self._on_node[part.node] = self.on_node(part.node) - {attempt.job}

    def on_node(self, node: str) -> frozenset[str]:
        """Return the jobs with an attempt on `node`."""
        return self._on_node.get(node) or frozenset()

    def put_record(self, record: Record) -> None:
        """Store a record among the open jobs, or drop it if the job has ended."""
        if record.job.state in TERMINAL and record.live_attempt is None:
            self.records.pop(record.job.id)
            self.paused_until_s.pop(record.job.id)
            self.since.pop(record.job.id)
            self.raised_fences.pop(record.job.id)
            self.epoch_guards.pop(record.job.id)
            self.progress.pop(record.job.id)
            if record.needs_copies:
                existing = self.uncopied.get(record.job.id)
                self.uncopied[record.job.id] = PendingLastCopy(record, existing.since_s if existing else self.now.s)
            else:
                self.drop_copies(record.job.id)
            return
        self._put_since(record)
        self.records[record.job.id] = record
        if not record.job.overtaken:
            self.epoch_guards.pop(record.job.id)
        elif record.job.id not in self.epoch_guards:
            self.epoch_guards[record.job.id] = EpochGuard()

    def _put_since(self, record: Record) -> None:
        job, previous = record.job, self.records.get(record.job.id)
        is_waiting = job.state in WAITING
        if previous is None or (previous.job.state in WAITING) != is_waiting:
            since = self.since.get(job.id)
            self.since[job.id] = Since(since.added_s if since else self.now.s, self.now.s)

    def drop_copies(self, job: str) -> None:
        """Make no more copies for an ended job."""
        self.uncopied.pop(job)
        self.copies.pop(job)
