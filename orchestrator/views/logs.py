"""Logs of jobs, and commands run beside them."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from orchestrator.views.jobs import JobState
from orchestrator.views.values import StreamEvents

LogCursor = dict[str, int]
"""Bytes that were read, by ATTEMPT.RANK."""


class LogLine(TypedDict):
    """A line that a rank printed."""

    time: str
    """ISO 8601 in UTC, with microseconds."""
    attempt: int
    rank: int
    stream: str
    """stdout or stderr."""
    text: str
    unfinished: NotRequired[Literal[True]]
    """The line was read before its end."""
    continues: NotRequired[Literal[True]]
    """The rest of a line of the same rank and stream."""


class LogEvent(TypedDict):
    """Lines of a job, and where to continue."""

    job: str
    """Id of the job."""
    lines: list[LogLine]
    cursor: LogCursor


class LogPageView(LogEvent):
    """One page of a job's log."""

    ended: bool
    """Whether no more lines will follow."""
    away: list[str]
    """A sentence for each log that is missing, because its node did not respond."""


class LogEnd(TypedDict):
    """The job has ended."""

    state: JobState


class LogEvents(StreamEvents, total=False):
    """Events of `GET /v1/jobs/{ref}/logs/stream`."""

    log: LogEvent
    end: LogEnd


class ExecStarted(TypedDict):
    """A command has started beside a rank."""

    exec: str
    """Id of the command: its input is sent to `/v1/execs/{exec}/input`."""
    job: str
    attempt: int
    rank: int
    node: str


class ExecOutput(TypedDict):
    """A piece of output."""

    stream: str
    data: str
    """The bytes in base64."""


class ExecEnd(TypedDict):
    """The command has ended."""

    code: int | None
    """Exit code; null if the command was stopped."""
    reason: str
    """Why it was stopped."""


class ExecEvents(StreamEvents, total=False):
    """Events of `POST /v1/jobs/{ref}/exec`."""

    started: ExecStarted
    output: ExecOutput
    end: ExecEnd


class ExecInputView(TypedDict):
    """How much input a command has accepted."""

    taken: int
    """Bytes that were accepted since its start."""
    closed: bool
    """Whether it accepts no more."""


class EmptyView(TypedDict):
    """An object without keys: the request was carried out."""
