"""A process of many agents that run nothing: they answer what the controller asks as real ones do, and make up what
attempts tell. Calls come as (number, node, method, arguments), answers go back as (number, result), those of a moment
together: else the process that reads them would wait for Python's lock at each.
"""

import heapq
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from cluster.serialization import to_plain
from cluster.types import Device, NodeFacts
from workers.protocol.messages import PROTOCOL, AttemptStatus, Outcome, RankEvent

DEVICES = 8
STARTS_S = 0.05
STORAGE = "/storage"
FACTS_EVERY_S = 10.0
Data = dict[str, Any]


@dataclass(frozen=True)
class Habits:
    """What attempts do: seconds between two reports, and between two checkpoints."""

    report_s: float = 2.0
    checkpoint_s: float = 60.0


@dataclass
class Attempt:
    job: str
    epoch: int
    root: str
    phase: str = "starting"
    at: int = 0
    step: int = 0
    told: list[RankEvent] = field(default_factory=list)
    outcome: Outcome | None = None

    @property
    def key(self) -> str:
        return f"{self.job}.{self.epoch}.0"

    def tell(self, kind: str, data: Data) -> None:
        self.at += 90
        self.told.append(RankEvent(kind, 0, time.time(), self.at, data))

    def news(self, cursor: int, known: str) -> AttemptStatus | None:
        self.told = [event for event in self.told if event.at > cursor]
        if not self.told and self.phase == known:
            return None
        at = self.told[-1].at if self.told else cursor
        return AttemptStatus(self.job, self.epoch, 0, self.phase, tuple(self.told), at, self.outcome)


@dataclass
class Watch:
    number: int
    cursors: dict[str, int]
    known: dict[str, str]
    until_s: float
    numbers_s: float


@dataclass
class Agent:
    facts: NodeFacts
    attempts: dict[str, Attempt] = field(default_factory=dict)
    watch: Watch | None = None
    told_s: float = 0.0


def facts(name: str) -> NodeFacts:
    kind = "nvidia:H100-80GB"
    devices = tuple(Device("nvidia", kind, n, "NVIDIA H100", total_memory_bytes=80 << 30) for n in range(DEVICES))
    return NodeFacts(
        name, f"ray-{name}", name, "10.0.0.1", "h100", "nvidia", "default", PROTOCOL, {"python": "3.11"}, devices,
        64, 1 << 38, 1 << 38, 1.0, 1 << 40, 1, STORAGE,
    )  # fmt: skip


class Agents:
    def __init__(self, line: Connection, nodes: list[str], habits: Habits):
        self.line, self.habits = line, habits
        self.agents = {name: Agent(facts(name)) for name in nodes}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._running: list[tuple[str, str]] = []
        self._answers: list[tuple[int, Any]] = []

    def serve(self) -> None:
        """Until the other side has closed the line."""
        self._later(3600.0, lambda: None)
        try:
            while True:
                wait_s = max(0.0, self._due[0][0] - time.monotonic())
                while self.line.poll(wait_s):
                    self._asked(*self.line.recv())
                    wait_s = 0.0
                while self._due[0][0] <= time.monotonic():
                    heapq.heappop(self._due)[2]()
                if self._answers:
                    self.line.send(self._answers)
                    self._answers = []
        except (EOFError, OSError):
            return

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), do))

    def _asked(self, number: int, node: str, method: str, arguments: tuple[Any, ...]) -> None:
        if method == "end":
            self._answers.append((number, self._end(*arguments)))
            return
        agent = self.agents[node]
        if method == "poll":
            _, cursors, known, timeout_s, _, *numbers_s = arguments
            now = time.monotonic()
            agent.watch = Watch(number, cursors, known, now + timeout_s, now + (numbers_s[0] if numbers_s else 0.0))
            self._look(node)
            self._later(timeout_s, lambda: self._look(node))
            if numbers_s:
                self._later(numbers_s[0], lambda: self._look(node))
            return
        self._answers.append((number, getattr(self, f"_{method}")(node, *arguments[method != "rendezvous_address" :])))

    def _register(self, node: str) -> Data:
        agent = self.agents[node]
        agent.told_s = time.monotonic()
        return {"facts": to_plain(agent.facts), "generation": 0, "epochs": {}, "clock_s": time.monotonic()}

    def _rendezvous_address(self, node: str) -> tuple[str, int]:
        return "10.0.0.1", 29500

    def _start(self, node: str, order: Data, secrets: Data) -> None:
        attempt = Attempt(order["job"], order["epoch"], order["checkpoint_root"])
        self.agents[node].attempts[attempt.key] = attempt
        self._later(STARTS_S, lambda: self._begin(node, attempt))

    def _stop(self, node: str, job: str, epoch: int, how: str) -> None:
        if attempt := self.agents[node].attempts.get(f"{job}.{epoch}.0"):
            self._ended(node, attempt, "cancelled")

    def _remove_shared_files(self, node: str, job: str, epoch: int) -> None:
        self.agents[node].attempts.pop(f"{job}.{epoch}.0", None)

    # -- what attempts do

    def _begin(self, node: str, attempt: Attempt) -> None:
        attempt.phase = "running"
        self._running.append((node, attempt.key))
        self._later(random.random() * self.habits.report_s, lambda: self._report(node, attempt))
        self._later(random.random() * self.habits.checkpoint_s, lambda: self._save(node, attempt))
        self._look(node)

    def _report(self, node: str, attempt: Attempt) -> None:
        if attempt.phase != "running":
            return
        attempt.step += 1
        loss = 3.0 / attempt.step
        attempt.tell("report", {"step": attempt.step, "loss": loss, "tokens_per_s": 12345.6, "lr": 3e-4})
        self._later(self.habits.report_s, lambda: self._report(node, attempt))
        self._look(node)

    def _save(self, node: str, attempt: Attempt) -> None:
        if attempt.phase != "running":
            return
        path = f"{STORAGE}/{attempt.job}/step-{attempt.step}"
        attempt.tell("checkpoint", {"step": attempt.step, "path": path, "bytes": 1 << 30, "seconds": 1.5})
        self._later(self.habits.checkpoint_s, lambda: self._save(node, attempt))
        self._look(node)

    def _end(self, attempts: int) -> None:
        """So many succeed, whichever."""
        for _ in range(min(attempts, len(self._running))):
            number = random.randrange(len(self._running))
            self._running[number], self._running[-1] = self._running[-1], self._running[number]
            node, key = self._running.pop()
            if attempt := self.agents[node].attempts.get(key):
                self._ended(node, attempt, "succeeded")

    def _ended(self, node: str, attempt: Attempt, state: str) -> None:
        if attempt.outcome is None:
            attempt.phase = "ended"
            result = {"steps": attempt.step}
            attempt.outcome = Outcome(attempt.job, attempt.epoch, 0, state, {0: 0}, None, result, time.time(), 1 << 30)
            self._look(node)

    def _look(self, node: str) -> None:
        """Answer the watch of a node at news, as workers/node/agent.py does."""
        agent = self.agents[node]
        if (watch := agent.watch) is None:
            return
        now = time.monotonic()
        found = [a.news(watch.cursors.get(a.key, 0), watch.known.get(a.key, "")) for a in agent.attempts.values()]
        reports = [report for report in found if report is not None]
        at_once = any(r.phase != watch.known.get(f"{r.job}.{r.epoch}.0", "") for r in reports)
        if not at_once and now < watch.until_s and not (reports and now >= watch.numbers_s):
            return
        agent.watch, plain = None, None
        if now - agent.told_s >= FACTS_EVERY_S:
            agent.told_s, plain = now, to_plain(agent.facts)
        told = {"attempts": list(agent.attempts), "unreadable_output": {}, "clock_s": now, "facts": plain}
        self._answers.append((watch.number, {"reports": [r.to_plain() for r in reports], **told}))


def serve(line: Connection, nodes: list[str], habits: Habits) -> None:
    Agents(line, nodes, habits).serve()
