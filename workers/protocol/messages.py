"""Messages between controller, agent, supervisor and rank: plain data with a version.

Both sides create these classes and read them with `parse`, which checks everything: it raises InvalidMessage, whose
text continues a sentence after the message's name. Standard library only, since supervisors import it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from cluster.input.checkpoint_location import path_error
from workers.protocol.failure_kinds import FAILURE_KINDS
from workers.protocol.message_fields import MAX_TEXT_LENGTH, Fields, InvalidMessage, is_count, is_text
from workers.protocol.rank_events import RankEvent

__all__ = ["FENCE_KEY", "LAUNCHES", "OUTCOMES", "PHASES", "PROTOCOL", "STOPS"]
__all__ += ["CHECKPOINT_FORMATS", "OWN_FOLDER", "AttemptStatus", "Failure", "Order", "Outcome", "RankEvent"]
__all__ += ["InvalidMessage", "ScriptCheckpoint"]

PROTOCOL = 8
"""Version of the messages, raised when one changes its meaning. Agents with another version may not join."""

FENCE_KEY = "polyfleet/{fleet}/fence/{job}"
"""Key in Ray's key-value store of a job's fence: the epoch, as decimal text, below which attempts are superseded."""

OUTCOMES = ("succeeded", "failed", "preempted", "cancelled", "fenced", "lost")
"""`fenced`: the attempt was stopped because it was superseded; `cancelled`: because of its user or a failure."""
STOPS = ("preempt", "cancel", "fence")
"""Kinds of stop of an attempt: it saves first; it is killed; it is killed and ends as `fenced`."""
PHASES = ("starting", "running", "ended")
LAUNCHES = ("node", "ranks")
"""Launch modes of a command: one process per node, or one per allocated device with torchrun's variables."""

OWN_FOLDER = ".polyfleet"
"""Folder in a job's output folder for files of Polyfleet."""
CHECKPOINT_FORMATS = ("auto", "torch", "safetensors", "dcp", "accelerate", "trainer")
"""Formats of a script's checkpoint; `auto`: detected."""

MAX_JOB_ID_LENGTH = 128
MAX_RANKS = 1 << 20
LEASE_S = 10.0
"""The default. tests/orchestrator/core/test_timing.py compares it with other time limits."""
MAX_LEASE_S = 86_400.0
MAX_TIME_S = 1e12


Part = tuple[str, int, int]
"""Job, epoch and node rank, for one node's part of an attempt."""


Mount = tuple[str, str, str]
"""SHA-256 of data (cluster/host/content_cache.py), its path in the job's folder, and, for a single file, its name below
that path ("" if the path is the file's own)."""
MAX_DATA_SOURCES = 32


def _fields_of(message: Any) -> dict[str, Any]:
    return {f.name: getattr(message, f.name) for f in fields(message)}


@dataclass(frozen=True, slots=True)
class Order:
    """Order to start the ranks of one attempt on one node.

    Never contains secrets, as it is written to disk. There is one rank per allocated device for `train`, and for a
    command with `launch` ranks; else one rank per node. Ranks of `train` see one allocated device, others all of them.
    `launch` is used for commands only. `visibility_names`: values of the visibility variable for devices that it does
    not name by their index. `arguments`: the task's own JSON (see workers/tasks; for a command its ScriptCheckpoint, if
    any). `code_archive`: SHA-256 of the code archive, "" if none. `hang_after_s` 0: the rule of the task, -1: never
    (see workers/attempt/supervision/hang_detector.py). `stop_on_nan`: a training ends when its loss is NaN or infinite.
    `output_limit_bytes` 0: no limit of the job. `data` is in the node's cache.
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
    code_archive: str = ""
    visibility_names: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    checkpoint_root: str = ""
    resume_from: str = ""
    keep_checkpoints: int = 3
    precision: str = ""
    batch_size: int = 0
    seed: int = 0
    grace_s: float = 30.0
    lease_s: float = LEASE_S
    hang_after_s: float = 0.0
    stop_on_nan: bool = True
    output_limit_bytes: int = 0
    data: tuple[Mount, ...] = ()
    protocol: int = PROTOCOL

    def to_plain(self) -> dict[str, Any]:
        lists = {
            "devices": list(self.devices),
            "command": list(self.command),
            "data": [list(mount) for mount in self.data],
        }
        return _fields_of(self) | lists

    @classmethod
    def parse(cls, data: Any) -> "Order":
        """Parse an order. `command` may be one text, which a shell then runs."""
        f = Fields(data, cls.__slots__)
        job, epoch, node_rank = _part(f)
        return cls(
            job=job,
            epoch=epoch,
            node_rank=node_rank,
            task=f.text("task", maximum=100),
            backend=f.text("backend", maximum=100),
            kind=f.text("kind", maximum=100),
            emulated=f.flag("emulated"),
            devices=_devices(f.sequence("devices")),
            nodes=f.count("nodes", minimum=1, maximum=MAX_RANKS),
            first_rank=f.count("first_rank", maximum=MAX_RANKS),
            ranks=f.count("ranks", minimum=1, maximum=MAX_RANKS),
            world_size=f.count("world_size", minimum=1, maximum=MAX_RANKS),
            master_address=f.text("master_address", maximum=256),
            master_port=f.count("master_port", maximum=65_535),
            command=_command(f.optional("command")),
            launch=f.choice("launch", LAUNCHES, "node"),
            arguments=f.object("arguments", {}),
            visibility_names=f.texts("visibility_names", {}),
            environment=f.texts("environment", {}),
            entry=f.text("entry", ""),
            code_archive=f.text("code_archive", ""),
            checkpoint_root=f.text("checkpoint_root", ""),
            resume_from=f.text("resume_from", ""),
            precision=f.text("precision", ""),
            keep_checkpoints=f.count("keep_checkpoints", 3),
            batch_size=f.count("batch_size", 0),
            seed=f.count("seed", 0, minimum=-(2**63), maximum=2**64 - 1),
            grace_s=f.number("grace_s", 30.0),
            lease_s=f.number("lease_s", LEASE_S, maximum=MAX_LEASE_S),
            hang_after_s=f.number("hang_after_s", 0.0, minimum=-1.0),
            stop_on_nan=f.flag("stop_on_nan", True),
            output_limit_bytes=f.count("output_limit_bytes", 0),
            data=_mounts(f.sequence("data", ())),
            protocol=f.count("protocol", PROTOCOL),
        )


class ScriptCheckpoint(NamedTuple):
    """Checkpoint of a command: its path in the output folder, and its format, one of CHECKPOINT_FORMATS.

    `found`: it exists and can be resumed from.
    """

    path: str
    format: str = "auto"
    found: bool = False

    def to_plain(self) -> dict[str, Any]:
        return {"checkpoint": self._asdict()}

    @classmethod
    def of(cls, task: str, arguments: Mapping[str, Any]) -> "ScriptCheckpoint | None":
        """Read it from an order's arguments; None if the task is not a command or has none.

        Raises InvalidMessage.
        """
        if task != "run" or "checkpoint" not in arguments:
            return None
        f = Fields(arguments["checkpoint"], cls._fields)
        if refusal := path_error(path := f.text("path")):
            raise InvalidMessage(f"has a checkpoint path that leads out of its folder: {refusal}")
        return cls(path, f.choice("format", CHECKPOINT_FORMATS, "auto"), f.flag("found", False))


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a rank.

    `rank` is its global number, or that of the first rank if all ranks of a node ended. `traceback` has the user's own
    frames only; `kind` is one of FAILURE_KINDS.
    """

    rank: int
    node: str
    kind: str
    message: str
    traceback: str = ""
    exit_code: int | None = None

    def to_plain(self) -> dict[str, Any]:
        return _fields_of(self)

    @classmethod
    def parse(cls, data: Any) -> "Failure":
        f = Fields(data, cls.__slots__)
        code = f.optional("exit_code")
        if code is not None and not is_count(code, -1000, 1 << 32):
            raise InvalidMessage("has an exit code that is not an integer")
        return cls(
            f.count("rank", 0),
            f.text("node", "", maximum=256),
            f.choice("kind", FAILURE_KINDS),
            f.text("message", "", maximum=MAX_TEXT_LENGTH),
            f.text("traceback", "", maximum=MAX_TEXT_LENGTH),
            code,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one node's part of an attempt.

    `state`: one of OUTCOMES; `exit_codes`: by global rank; `result`: of the task, from rank 0; `ended_s`: by the node's
    wall clock; `peak_memory_bytes`: peak host memory of its ranks together (0: not measured).
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
        return _fields_of(self) | {"exit_codes": codes, "failure": self.failure and self.failure.to_plain()}

    @classmethod
    def parse(cls, data: Any) -> "Outcome":
        f = Fields(data, cls.__slots__)
        return cls(
            *_part(f),
            state=f.choice("state", OUTCOMES),
            exit_codes=_exit_codes(f.object("exit_codes")),
            failure=_failure(f.optional("failure")),
            result=f.object("result", {}),
            ended_s=f.number("ended_s", 0.0, minimum=-MAX_TIME_S, maximum=MAX_TIME_S),
            peak_memory_bytes=f.count("peak_memory_bytes", 0),
        )

    @classmethod
    def parse_for(cls, part: Part, data: Any) -> "Outcome":
        """Like `parse`, but also raise InvalidMessage for the outcome of another part of an attempt."""
        if not isinstance(data, dict) or tuple(data.get(name) for name in ("job", "epoch", "node_rank")) != part:
            raise InvalidMessage(f"is not the outcome of {'.'.join(map(str, part))}")
        return cls.parse(data)


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """Status of one attempt, from its agent: a phase of PHASES and new events.

    `cursor` is the end of these events in the events file, in bytes. There is an outcome once the phase is `ended`.
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
        plain = {
            "events": [event.to_plain() for event in self.events],
            "outcome": self.outcome and self.outcome.to_plain(),
        }
        return _fields_of(self) | plain

    @classmethod
    def parse(cls, data: Any) -> "AttemptStatus":
        f = Fields(data, cls.__slots__)
        part, phase, ended = _part(f), f.choice("phase", PHASES), f.optional("outcome")
        if (phase == "ended") != (ended is not None):
            raise InvalidMessage(
                "has ended without an outcome" if ended is None else f"has an outcome in the phase {phase}"
            )
        events = tuple(RankEvent.parse(event) for event in f.sequence("events"))
        outcome = None if ended is None else Outcome.parse_for(part, ended)
        return cls(*part, phase, events, f.count("cursor"), outcome)


def _part(f: Fields) -> Part:
    return (
        f.text("job", minimum=1, maximum=MAX_JOB_ID_LENGTH),
        f.count("epoch"),
        f.count("node_rank", maximum=MAX_RANKS),
    )


def _devices(numbers: tuple[Any, ...]) -> tuple[int, ...]:
    if not all(is_count(number) for number in numbers):
        raise InvalidMessage("has devices that are not integers")
    return numbers


def _mounts(values: tuple[Any, ...]) -> tuple[Mount, ...]:
    valid = [
        value for value in values if isinstance(value, list | tuple) and len(value) == 3 and all(map(is_text, value))
    ]
    if len(valid) != len(values) or len(values) > MAX_DATA_SOURCES:
        raise InvalidMessage(f"has a `data` that is not a list of at most {MAX_DATA_SOURCES} triples of texts")
    return tuple((str(sha256), str(path), str(name)) for sha256, path, name in valid)


def _command(command: Any) -> tuple[str, ...]:
    if isinstance(command, str) and command:
        command = ["/bin/sh", "-c", command]
    if not isinstance(command or [], list | tuple) or not all(is_text(argument) for argument in command or ()):
        raise InvalidMessage("has a `command` that is neither text nor a list of texts")
    return tuple(command or ())


def _exit_codes(codes: dict[str, Any]) -> dict[int, int]:
    if not all(rank.isascii() and rank.isdecimal() and len(rank) < 16 and type(c) is int for rank, c in codes.items()):
        raise InvalidMessage("has exit codes that are not integers by rank")
    return {int(rank): code for rank, code in codes.items()}


def _failure(data: Any) -> Failure | None:
    try:
        return None if data is None else Failure.parse(data)
    except InvalidMessage as e:
        raise InvalidMessage(f"has a failure that {e}") from None
