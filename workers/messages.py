"""What crosses between controller, agent, supervisor and rank: plain data with a version, and nothing else.

Both sides build these classes and read them with `parse`, which believes nothing: it raises InvalidMessage, whose text
goes on after the message's name. Standard library only, since supervisors import it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from cluster.checkpoint_location import path_error
from workers.message_fields import LONGEST_TEXT, Fields, InvalidMessage, is_count, is_text
from workers.rank_events import RankEvent

__all__ = ["FAILURES", "FENCE_KEY", "LAUNCHES", "OUTCOMES", "PHASES", "PROTOCOL", "STOPS"]
__all__ += ["CHECKPOINT_FORMATS", "OWN_FOLDER", "AttemptStatus", "Failure", "Order", "Outcome", "RankEvent"]
__all__ += ["InvalidMessage", "ScriptCheckpoint"]

PROTOCOL = 6
"""Raised when a message changes its meaning. An agent of another protocol is refused at join."""

FENCE_KEY = "polyfleet/{fleet}/fence/{job}"
"""Of Ray's key-value store: the epoch, as decimal text, below which nothing of the job's attempts counts any more."""

OUTCOMES = ("succeeded", "failed", "preempted", "cancelled", "fenced", "lost")
"""`fenced`: it was stopped because it does not count any more, where `cancelled` is what its user or a failure asked
for.
"""
STOPS = ("preempt", "cancel", "fence")
"""How an attempt may be asked to stop: it saves first; it is killed; it is killed and ends as `fenced`."""
PHASES = ("starting", "running", "ended")
LAUNCHES = ("node", "ranks")
"""How often a command is started: once per node, or once per leased device with torchrun's variables."""

OWN_FOLDER = ".polyfleet"
"""Of a job's folder of files: what we keep there."""
CHECKPOINT_FORMATS = ("auto", "torch", "safetensors", "dcp", "accelerate", "trainer")
"""What the checkpoint of a script may be; `auto`: what it looks like."""

FAILURES = ("user", "oom", "signal", "start", "internal", "unreadable", "launch", "lost", "storage", "nan", "hang")
"""`unreadable`: the ranks broke a file that the node reads of them. `launch`: no rank was started. `storage`: the
node's disk was full, or no checkpoint that the job was to resume from is sound. `nan`: the loss was no number. `hang`:
the ranks made no progress.
"""
LONGEST_JOB = 128
MOST_RANKS = 1 << 20
LONGEST_LEASE_S = 86_400.0
LATEST_S = 1e12


Part = tuple[str, int, int]
"""Job, epoch and node rank: one node's part of an attempt."""


Mount = tuple[str, str, str]
"""SHA-256 of data (cluster/content_cache.py), where in the job's folder it is seen, and the name that a single file
has in there, "" where the path is its own."""
MOST_DATA = 32


def _shallow(message: Any) -> dict[str, Any]:
    return {f.name: getattr(message, f.name) for f in fields(message)}


@dataclass(frozen=True, slots=True)
class Order:
    """Start the ranks of one attempt on one node. Secrets travel beside it, never inside: an order is written to disk.

    One rank per leased device for `train`, and for a command with `launch` ranks; else one rank per node. All but those
    of `train` see all leased devices. `launch` is read for commands only.
    `visible_as` names devices that the visibility variable knows by another word than their index.
    `arguments` is the task's own JSON (see workers/tasks; of a command its ScriptCheckpoint, if any). `package` is the
    SHA-256 of the submitted folder's archive, "" if none. `hang_after_s` 0: the rule of the task, -1: never (see
    workers/attempt/hang_detector.py). `stop_on_nan`: a training ends at a loss that is no number. `output_limit_bytes`
    0: the job sets none. `data` is in the node's cache.
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
    launch: str = "node"
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
    hang_after_s: float = 0.0
    stop_on_nan: bool = True
    output_limit_bytes: int = 0
    data: tuple[Mount, ...] = ()
    protocol: int = PROTOCOL

    def to_plain(self) -> dict[str, Any]:
        lists = {"devices": list(self.devices), "command": list(self.command), "data": [list(one) for one in self.data]}
        return _shallow(self) | lists

    @classmethod
    def parse(cls, data: Any) -> "Order":
        """`command` may be one text, which a shell then runs."""
        f = Fields(data, cls.__slots__)
        job, epoch, node_rank = _part(f)
        return cls(
            job=job,
            epoch=epoch,
            node_rank=node_rank,
            task=f.text("task", most=100),
            backend=f.text("backend", most=100),
            kind=f.text("kind", most=100),
            emulated=f.flag("emulated"),
            devices=_devices(f.sequence("devices")),
            nodes=f.count("nodes", least=1, most=MOST_RANKS),
            first_rank=f.count("first_rank", most=MOST_RANKS),
            ranks=f.count("ranks", least=1, most=MOST_RANKS),
            world_size=f.count("world_size", least=1, most=MOST_RANKS),
            master_address=f.text("master_address", most=256),
            master_port=f.count("master_port", most=65_535),
            command=_command(f.optional("command")),
            launch=f.word("launch", LAUNCHES, "node"),
            arguments=f.object("arguments", {}),
            visible_as=f.texts("visible_as", {}),
            environment=f.texts("environment", {}),
            entry=f.text("entry", ""),
            package=f.text("package", ""),
            checkpoint_root=f.text("checkpoint_root", ""),
            resume_from=f.text("resume_from", ""),
            precision=f.text("precision", ""),
            keep_checkpoints=f.count("keep_checkpoints", 3),
            batch_size=f.count("batch_size", 0),
            seed=f.count("seed", 0, least=-(2**63), most=2**64 - 1),
            grace_s=f.number("grace_s", 30.0),
            lease_s=f.number("lease_s", 20.0, most=LONGEST_LEASE_S),
            hang_after_s=f.number("hang_after_s", 0.0, least=-1.0),
            stop_on_nan=f.flag("stop_on_nan", True),
            output_limit_bytes=f.count("output_limit_bytes", 0),
            data=_mounts(f.sequence("data", ())),
            protocol=f.count("protocol", PROTOCOL),
        )


class ScriptCheckpoint(NamedTuple):
    """Where in its folder of files a command saves, and one of CHECKPOINT_FORMATS. `found`: there is something there to
    resume from.
    """

    path: str
    format: str = "auto"
    found: bool = False

    def to_plain(self) -> dict[str, Any]:
        return {"checkpoint": self._asdict()}

    @classmethod
    def of(cls, task: str, arguments: Mapping[str, Any]) -> "ScriptCheckpoint | None":
        """A command has no other arguments. Raises InvalidMessage."""
        if task != "run" or "checkpoint" not in arguments:
            return None
        f = Fields(arguments["checkpoint"], cls._fields)
        if why := path_error(path := f.text("path")):
            raise InvalidMessage(f"has a checkpoint's path that leads out of its folder: {why}")
        return cls(path, f.word("format", CHECKPOINT_FORMATS, "auto"), f.flag("found", False))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank failed. `rank` is its global number; where all of a node's part ended, the first there. `traceback`
    holds the user's own frames only; `kind` is one of FAILURES.
    """

    rank: int
    node: str
    kind: str
    message: str
    traceback: str = ""
    exit_code: int | None = None

    def to_plain(self) -> dict[str, Any]:
        return _shallow(self)

    @classmethod
    def parse(cls, data: Any) -> "Failure":
        f = Fields(data, cls.__slots__)
        code = f.optional("exit_code")
        if code is not None and not is_count(code, -1000, 1 << 32):
            raise InvalidMessage("has an exit code that is no whole number")
        return cls(
            f.count("rank", 0),
            f.text("node", "", most=256),
            f.word("kind", FAILURES),
            f.text("message", "", most=LONGEST_TEXT),
            f.text("traceback", "", most=LONGEST_TEXT),
            code,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one node's part of an attempt ended: a state of OUTCOMES, exit codes by global rank, the task's result (rank
    0), the most host memory its ranks held at one time (0: not measured). `ended_s` is the node's wall clock.
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

    def to_plain(self) -> dict[str, Any]:
        codes = {str(rank): code for rank, code in sorted(self.exit_codes.items())}
        return _shallow(self) | {"exit_codes": codes, "failure": self.failure and self.failure.to_plain()}

    @classmethod
    def parse(cls, data: Any) -> "Outcome":
        f = Fields(data, cls.__slots__)
        return cls(
            *_part(f),
            state=f.word("state", OUTCOMES),
            exit_codes=_exit_codes(f.object("exit_codes")),
            failure=_failure(f.optional("failure")),
            result=f.object("result", {}),
            ended_s=f.number("ended_s", 0.0, least=-LATEST_S, most=LATEST_S),
            peak_memory_bytes=f.count("peak_memory_bytes", 0),
        )

    @classmethod
    def parse_of(cls, part: Part, data: Any) -> "Outcome":
        """As `parse`; also raises InvalidMessage for the outcome of another part of an attempt."""
        if not isinstance(data, dict) or tuple(data.get(name) for name in ("job", "epoch", "node_rank")) != part:
            raise InvalidMessage(f"is no outcome of {'.'.join(map(str, part))}")
        return cls.parse(data)


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """One attempt as its agent sees it: a phase of PHASES, new events, and the byte of its events file up to which they
    go. There is an outcome once the phase is `ended`.
    """

    job: str
    epoch: int
    node_rank: int
    phase: str
    events: tuple[RankEvent, ...]
    cursor: int
    outcome: Outcome | None = None

    @property
    def key(self) -> str:
        return f"{self.job}.{self.epoch}.{self.node_rank}"

    def to_plain(self) -> dict[str, Any]:
        told = {
            "events": [event.to_plain() for event in self.events],
            "outcome": self.outcome and self.outcome.to_plain(),
        }
        return _shallow(self) | told

    @classmethod
    def parse(cls, data: Any) -> "AttemptStatus":
        f = Fields(data, cls.__slots__)
        part, phase, ended = _part(f), f.word("phase", PHASES), f.optional("outcome")
        if (phase == "ended") != (ended is not None):
            raise InvalidMessage(
                "has ended without an outcome" if ended is None else f"has an outcome in the phase {phase}"
            )
        events = tuple(RankEvent.parse(event) for event in f.sequence("events"))
        outcome = None if ended is None else Outcome.parse_of(part, ended)
        return cls(*part, phase, events, f.count("cursor"), outcome)


def _part(f: Fields) -> Part:
    return f.text("job", least=1, most=LONGEST_JOB), f.count("epoch"), f.count("node_rank", most=MOST_RANKS)


def _devices(found: tuple[Any, ...]) -> tuple[int, ...]:
    if not all(is_count(number) for number in found):
        raise InvalidMessage("has devices that are not whole numbers")
    return found


def _mounts(values: tuple[Any, ...]) -> tuple[Mount, ...]:
    good = [one for one in values if isinstance(one, list | tuple) and len(one) == 3 and all(map(is_text, one))]
    if len(good) != len(values) or len(values) > MOST_DATA:
        raise InvalidMessage(f"has a `data` that is not at most {MOST_DATA} times three texts")
    return tuple((str(sha256), str(path), str(name)) for sha256, path, name in good)


def _command(found: Any) -> tuple[str, ...]:
    if isinstance(found, str) and found:
        found = ["/bin/sh", "-c", found]
    if not isinstance(found or [], list | tuple) or not all(is_text(word) for word in found or ()):
        raise InvalidMessage("has a `command` that is neither text nor a list of texts")
    return tuple(found or ())


def _exit_codes(found: dict[str, Any]) -> dict[int, int]:
    if not all(rank.isascii() and rank.isdecimal() and len(rank) < 16 and type(c) is int for rank, c in found.items()):
        raise InvalidMessage("has exit codes that are no whole numbers by rank")
    return {int(rank): code for rank, code in found.items()}


def _failure(found: Any) -> Failure | None:
    try:
        return None if found is None else Failure.parse(found)
    except InvalidMessage as e:
        raise InvalidMessage(f"has a failure that {e}") from None
