"""What crosses between controller, agent, supervisor and rank: plain data with a version, and nothing else."""

import math
from dataclasses import dataclass, field
from typing import Any

PROTOCOL = 2
"""Raised when a message changes its meaning. An agent of another protocol is refused at join."""

FENCE_KEY = "polyfleet/fence/{job}"
"""Ray KV key that holds the newest epoch of a job, as decimal text: the second channel of a lease."""

OUTCOMES = ("succeeded", "failed", "preempted", "cancelled", "lost")

FAILURES = ("user", "memory", "signal", "start", "internal", "unreadable", "launch")
"""`unreadable`: the ranks broke a file that the node reads of them. `launch`: no rank was started."""


@dataclass(frozen=True, slots=True)
class Order:
    """Start the ranks of one attempt on one node. Secrets travel beside it, never inside: an order is written to disk.

    One rank per leased device for `train`; for the other tasks one rank per node, which sees all leased devices.
    `visible_as` names devices that the visibility variable knows by another word than their index.
    `arguments` is the task's own JSON (see workers/tasks). `package` is the SHA-256 of the submitted folder's archive,
    "" if none.
    """

    job: str
    epoch: int
    task: str
    backend: str
    kind: str
    emulated: bool
    devices: tuple[int, ...]
    node_rank: int
    nodes: int
    first_rank: int
    ranks: int
    world_size: int
    master_address: str
    master_port: int
    entry: str = ""
    command: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    package: str = ""
    visible_as: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    checkpoint_root: str = ""
    resume_from: str = ""
    keep_checkpoints: int = 3
    precision: str = ""
    batch_size: int = 0
    seed: int = 0
    grace_s: float = 30.0
    lease_s: float = 20.0
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank failed. `traceback` holds the user's own frames only; `kind` is one of FAILURES."""

    rank: int
    node: str
    kind: str
    message: str
    traceback: str = ""
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one node's part of an attempt ended: a state of OUTCOMES, exit codes by global rank, the task's result (rank
    0), the most host memory its ranks held at one time (0: not measured).
    """

    job: str
    epoch: int
    node_rank: int
    state: str
    exit_codes: dict[int, int]
    failure: Failure | None = None
    result: dict[str, Any] = field(default_factory=dict)
    ended_s: float = 0.0
    peak_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """One attempt as its agent sees it: phase is starting, running or ended; `events` are new JSON lines from
    `cursor_before` on.
    """

    job: str
    epoch: int
    node_rank: int
    phase: str
    events: tuple[dict[str, Any], ...]
    cursor: int
    outcome: Outcome | None = None


def outcome_refusal(found: Any, job: str, epoch: int, node_rank: int) -> str:
    """Why `found`, plain data, is no Outcome of that part of an attempt; "" when it is one."""
    named = [found.get(name) for name in ("job", "epoch", "node_rank")] if isinstance(found, dict) else []
    if named != [job, epoch, node_rank]:
        return f"is no outcome of {job}.{epoch}.{node_rank}"
    if found.get("state") not in OUTCOMES:
        return f"has the state {str(found.get('state'))[:40]!r}, which is none of {', '.join(OUTCOMES)}"
    codes, failure, ended_s = found.get("exit_codes"), found.get("failure"), found.get("ended_s", 0.0)
    if not isinstance(codes, dict) or not all(str(k).isdecimal() and type(v) is int for k, v in codes.items()):
        return "has exit codes that are no whole numbers by rank"
    if failure is not None and not (isinstance(failure, dict) and failure.get("kind") in FAILURES):
        return f"has a failure of none of the kinds {', '.join(FAILURES)}"
    if failure and not all(isinstance(failure.get(name, ""), str) for name in ("node", "message", "traceback")):
        return "has a failure that is not told in text"
    if not isinstance(found.get("result", {}), dict):
        return "has a result that is no object"
    if type(found.get("peak_memory_bytes", 0)) is not int:
        return "has a peak of memory that is no whole number"
    return "" if isinstance(ended_s, int | float) and math.isfinite(ended_s) else "has no time of its end"
