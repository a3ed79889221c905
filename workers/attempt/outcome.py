"""How an attempt ended, decided from what its supervisor saw."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cluster.untrusted_files import UnreadableFile, open_untrusted, parse_json
from workers.attempt.oom import OomMonitor, size
from workers.message_fields import LONGEST_TEXT, is_count
from workers.messages import Failure

MOST_NOTE_BYTES = 1 << 20

TERMINATED = frozenset({-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGKILL})
"""Exit codes of a rank that ended by the signals we send to preempt it, also as a shell passes them on."""
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
ENDED_BY = {"cancel": "cancelled", "fence": "fenced", "lease": "lost"}
OF_A_CHILD = ("user", "oom", "internal", "storage", "nan")
"""Kinds of failure that a rank tells of itself."""
WRITERS_ERRORS = ("PytorchStreamWriter", "inline_container")
"""Of torch.save, which does not say what the system told it."""


class FailedRank(NamedTuple):
    """A rank that failed. `said` is what its child wrote, None without; `printed` the line on stderr that says why,
    `says_full` whether one of its last lines tells of a full disk, `disk` which one was full when it ended.
    `peak_bytes` is the most that one of its processes held.
    """

    rank: int
    node: str
    pid: int
    code: int
    said: Any
    printed: str
    says_full: bool
    disk: str
    peak_bytes: int


class Preemption(NamedTuple):
    """What is known of ranks that were to save and stop: those that still ran when they were `asked`, by number;
    whether a rank `noted` that it stopped early; those that told that their work is `done`. `command`: they are a
    user's command, not a task of ours.
    """

    asked: frozenset[int] = frozenset()
    noted: bool = False
    done: frozenset[int] = frozenset()
    command: bool = False


def state(why: str, codes: dict[int, int], ranks: int, preemption: Preemption) -> str:
    """`why` is what ended it: "" (its ranks), failed, preempt, cancel, fence or lease. `ranks` were to run; one that
    was never started has no code.
    """
    if why in ENDED_BY:
        return ENDED_BY[why]
    if why == "preempt" and _stopped_early(codes, ranks, preemption):
        return "preempted"
    return "failed" if any(codes.values()) else "succeeded"


def _stopped_early(codes: dict[int, int], ranks: int, known: Preemption) -> bool:
    """An exit code alone does not tell: programs that save on SIGTERM end with 0 as well as with 1 (torchrun does).

    So the work counts as done where every rank had ended before it was asked, or says so. A task of ours that raises
    has failed; of a command that was asked, nobody knows whether it would have ended so otherwise.
    """
    if known.noted:
        return True
    bad = {rank for rank, code in codes.items() if code != 0 and code not in TERMINATED}
    if bad - known.asked if known.command else bad:
        return False
    unfinished = known.asked - known.done
    return any(codes.values()) or len(codes) < ranks or any(rank in unfinished for rank in codes)


def first_bad(codes: dict[int, int]) -> int:
    """The lowest rank that failed by itself, else the lowest that we ended."""
    return min((code in TERMINATED, rank) for rank, code in codes.items() if code != 0)[1]


def noted(events: Path, asked_at: float) -> tuple[bool, frozenset[int]]:
    """Whether a rank noted that it stopped early because it was asked to, and which ranks noted that their work is
    done: about the last thing that a rank notes. `asked_at` is the time (seconds since 1970) of the first SIGTERM.
    """
    try:
        with open_untrusted(events) as descriptor:
            end = os.fstat(descriptor).st_size
            data = os.pread(descriptor, MOST_NOTE_BYTES, max(0, end - MOST_NOTE_BYTES))
    except (OSError, UnreadableFile):
        return False, frozenset()
    notes = [_note(line) for line in data.split(b"\n") if b'"preempted"' in line or b'"done"' in line]
    done = frozenset(note["rank"] for note in notes if _is_done(note, asked_at) and is_count(note.get("rank")))
    return any(note.get("preempted") is True for note in notes), done


def _is_done(note: dict[str, Any], asked_at: float) -> bool:
    """A function that returned after SIGTERM without our handler having had it (`sigterm`) has a handler of its own,
    and may have returned because of that: nobody knows whether its work is done.
    """
    at = note.get("t")
    before = isinstance(at, int | float) and at <= asked_at
    return note.get("done") is True and (before or note.get("sigterm") is True)


def _note(line: bytes) -> dict[str, Any]:
    """Empty for what is none."""
    try:
        note = parse_json(line, "a note")
    except UnreadableFile:
        return {}
    return note if isinstance(note, dict) and note.get("type") == "note" else {}


def cause(seen: FailedRank, memory: OomMonitor) -> Failure:
    """What the kernel did goes before what the rank said, and that before what its exit code tells."""
    found = (
        _said(seen) if isinstance(seen.said, dict) else failure_from_exit(seen.rank, seen.node, seen.code, seen.printed)
    )
    if seen.code in KILLED and memory.killed(seen.pid if seen.code == -signal.SIGKILL else 0):
        who = f"rank {seen.rank}" if seen.code == -signal.SIGKILL else f"a process of rank {seen.rank}"
        found = _of_kind(found, "oom", f"{who} was killed by the kernel because memory ran out")
    elif found.kind != "oom" and memory.killed_in_attempt():
        found = _of_kind(found, "oom", f"{found.message}; the kernel killed a process because memory ran out")
    elif seen.said is None and (seen.says_full or seen.disk):
        found = _of_kind(found, "storage", found.message)
    if found.kind == "oom":
        held = f"it held {size(seen.peak_bytes)}" if seen.peak_bytes else ""
        return _of_kind(found, "oom", _joined(f"{found.message}: ", held, memory.limit()))
    if found.kind == "storage" and seen.disk and seen.disk not in found.message:
        return _of_kind(found, "storage", f"{found.message}; {seen.disk}")
    return found


def _said(seen: FailedRank) -> Failure:
    """By the rank itself."""
    kind = seen.said["kind"] if seen.said.get("kind") in OF_A_CHILD else "user"
    message, trace = (str(seen.said.get(name, ""))[:LONGEST_TEXT] for name in ("message", "traceback"))
    if kind == "user" and seen.disk and any(word in message for word in WRITERS_ERRORS):
        kind = "storage"
    return Failure(seen.rank, seen.node, kind, message, trace, seen.code)


def _of_kind(found: Failure, kind: str, message: str) -> Failure:
    return replace(found, kind=kind, message=message[:LONGEST_TEXT])


def _joined(begin: str, *parts: str) -> str:
    return begin + ", ".join(filter(None, parts))


def failure_from_exit(rank: int, node: str, code: int, printed: str) -> Failure:
    """What can be said of a rank that left only an exit code and what it printed on stderr."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return Failure(rank, node, "signal", f"rank {rank} was killed by {name}", exit_code=code)
    said = f": {printed}" if printed else ""
    return Failure(rank, node, "user", f"rank {rank} ended with exit code {code}{said}"[:LONGEST_TEXT], exit_code=code)
