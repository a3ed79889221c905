"""Story of a job: what the controller did about it, message by message, to explain how its attempts changed. Pure.

Lines are made after each step; the server stores the newest in memory. A message has a line only if changes of attempts
or commands followed from it, so the replies of agents to most polls have none.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.core.controller import commands as c
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.attempts import PartState, StopState, Transition

MAX_TEXT = 300
"""Maximum number of characters of one line: messages of errors may be long."""
DETAILS = {
    "node": "on {}",
    "reservation_name": "reservation {}",
    "reader": "through {}",
    "kind": "{}",
    "number": "(command {})",
    "replies_to": "(reply to command {})",
}
REASONS = ("how", "message", "error", "why", "reason", "text")
"""Fields of messages and commands that a line contains, besides job and attempt. Reasons come after a colon."""
DAY_S = 86_400
MISSING_MESSAGE = "a message that is no longer in memory"


@dataclass(frozen=True, slots=True)
class StoryLine:
    """A message, or after it what followed from it: a changed state or a command.

    `cause`: number of the message, 0 for a note about the server itself. `job`: job that the line names, or "".
    """

    cause: int
    wall_s: float
    kind: Literal["message", "change", "note"]
    job: str
    text: str


@dataclass(frozen=True, slots=True)
class StoryStep:
    """What followed for a job from message number `number` at `wall_s` (seconds since 1970)."""

    number: int
    wall_s: float
    message: str
    changes: tuple[str, ...] = ()


def note(text: str, wall_s: float) -> StoryLine:
    """Return a line about the server itself, which is in the story of every job."""
    return StoryLine(0, wall_s, "note", "", text)


def lines_of(
    messages: Sequence[m.Message],
    last_number: int,
    transitions: Sequence[Transition],
    commands: Sequence[c.Command],
    wall_s: float,
) -> list[StoryLine]:
    """Return the lines of a step: of each message with consequences, then of these. `last_number`: of the last message.

    Commands to store a metric have none: jobs send many, and they are stored.
    """
    changes: dict[int, list[StoryLine]] = {}
    for t in transitions:
        changes.setdefault(t.cause, []).append(StoryLine(t.cause, wall_s, "change", t.job, _transition_text(t)))
    for command in commands:
        if type(command) is not c.StoreReport:
            line = StoryLine(command.cause, wall_s, "change", getattr(command, "job", ""), _text(command))
            changes.setdefault(command.cause, []).append(line)
    lines: list[StoryLine] = []
    for cause in sorted(changes):
        message = messages[cause - last_number - 1]
        lines.append(StoryLine(cause, wall_s, "message", getattr(message, "job", ""), _text(message)))
        lines += changes[cause]
    return lines


def story(lines: Iterable[StoryLine], job: str) -> list[StoryStep]:
    """Return what followed for a job, each with its message, in order, and all notes. "" for all jobs."""
    steps: list[StoryStep] = []
    for message, changes in _by_message(lines):
        texts = tuple(line.text for line in changes if _names(line, job))
        if message.kind == "note" or texts:
            steps.append(StoryStep(message.cause, message.wall_s, message.text, texts))
    return steps


def step_text(number: int, wall_s: float, message: str, changes: Iterable[str]) -> str:
    """Return a step as one line, with its time in UTC."""
    tenths = int(wall_s * 10) % (10 * DAY_S)
    minutes, seconds = divmod(tenths / 10, 60)
    clock = f"{int(minutes) // 60:02}:{int(minutes) % 60:02}:{seconds:04.1f}"
    return " · ".join((f"#{number} {clock} {message}" if number else f"{clock} {message}", *changes))


def _by_message(lines: Iterable[StoryLine]) -> Iterator[tuple[StoryLine, list[StoryLine]]]:
    """Yield messages and notes with what followed. The message of the oldest lines may be dropped already."""
    message, changes = None, list[StoryLine]()
    for line in lines:
        if line.kind == "change" and message is not None:
            changes.append(line)
            continue
        if message is not None:
            yield message, changes
        has_no_message = line.kind == "change"
        message = StoryLine(line.cause, line.wall_s, "message", "", MISSING_MESSAGE) if has_no_message else line
        changes = [line] if has_no_message else []
    if message is not None:
        yield message, changes


def _names(line: StoryLine, job: str) -> bool:
    """Whether a line names a job; only warnings name one in their text alone."""
    if line.job or not job:
        return line.job == job or not job
    return any(text.strip(",:;").partition(".")[0] == job for text in line.text.split())


def _transition_text(t: Transition) -> str:
    subject = f"attempt {t.epoch}"
    if isinstance(t.before, StopState):
        subject = f"stop request of {t.node}"
    elif isinstance(t.before, PartState):
        subject = f"part {t.node}"
    change = t.after if t.after is t.before else f"{t.before} → {t.after}"
    return f"{subject} {change} ({t.event}{f': {_short(t.why)}' if t.why else ''})"


def _text(item: Any) -> str:
    """Return a message or a command in one line."""
    special = SPECIAL.get(type(item))
    return special(item) if special else _named(item, " ".join(_attempt(item)))


def _named(item: Any, *values: str) -> str:
    """Return the name of an item's class, these values, and those of its DETAILS and REASONS."""
    name = "".join(f" {x.lower()}" if x.isupper() else x for x in type(item).__name__).strip()
    details = (form.format(value) for field, form in DETAILS.items() if (value := getattr(item, field, "")))
    what = " ".join(filter(None, (name, *values, *details)))
    return _short(": ".join(filter(None, (what, *(getattr(item, field, "") for field in REASONS)))))


def _attempt(item: Any) -> Iterator[str]:
    job, epoch = getattr(item, "job", ""), getattr(item, "epoch", None)
    if job:
        yield job if epoch is None else f"{job}.{epoch}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT else f"{line[:MAX_TEXT]}…"


def _fence_text(fence: c.Fence) -> str:
    return _named(fence, fence.job, f"lower to {fence.epoch}" if fence.lower else f"at {fence.epoch}")


SPECIAL: dict[type, Callable[[Any], str]] = {
    c.Launch: lambda launch: _named(launch, launch.attempt, "on", ", ".join(launch.nodes)),
    c.Fence: _fence_text,
    m.Heartbeat: lambda beat: f"reply of {beat.node}",
    m.FenceAnswered: lambda reply: _named(reply, reply.job, "" if reply.error else f"at {reply.current_epoch}"),
}
"""Texts of messages and commands that differ from those of others."""
