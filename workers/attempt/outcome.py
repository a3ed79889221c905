"""How an attempt ended, decided from what its supervisor saw."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cluster.untrusted import Unreadable, opened, parse_json
from workers.attempt.memory import Memory, size
from workers.fields import LONGEST_TEXT
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


class Seen(NamedTuple):
    """A rank that failed. `said` is what its child wrote, None without; `last_err` its last line on stderr, `says_full`
    whether one of its last lines tells of a full disk, `disk` which one was full when it ended. `peak_bytes` is the
    most that one of its processes held.
    """

    rank: int
    node: str
    pid: int
    code: int
    said: Any
    last_err: str
    says_full: bool
    disk: str
    peak_bytes: int


def state(why: str, codes: dict[int, int], noted: bool, ranks: int) -> str:
    """`why` is what ended it: "" (its ranks), failed, preempt, cancel, fence or lease. `noted`: a rank says that it
    saved. `ranks` were to run; one that was never started has no code.
    """
    if why in ENDED_BY:
        return ENDED_BY[why]
    bad = [code for code in codes.values() if code != 0]
    if why == "preempt":
        stopped = bool(bad) and all(code in TERMINATED for code in bad)
        if noted or stopped or (len(codes) < ranks and not bad):
            return "preempted"
    return "failed" if bad else "succeeded"


def first_bad(codes: dict[int, int]) -> int:
    """The lowest rank that failed by itself, else the lowest that we ended."""
    return min((code in TERMINATED, rank) for rank, code in codes.items() if code != 0)[1]


def noted_preempted(events: Path) -> bool:
    """Whether a rank noted that it stopped early because it was asked to: about the last thing that a rank notes."""
    try:
        with opened(events) as descriptor:
            end = os.fstat(descriptor).st_size
            data = os.pread(descriptor, MOST_NOTE_BYTES, max(0, end - MOST_NOTE_BYTES))
    except (OSError, Unreadable):
        return False
    return any(_is_preempted(line) for line in data.split(b"\n") if b'"preempted"' in line)


def _is_preempted(line: bytes) -> bool:
    try:
        note = parse_json(line, "a note")
    except Unreadable:
        return False
    return isinstance(note, dict) and note.get("type") == "note" and note.get("preempted") is True


def cause(seen: Seen, memory: Memory) -> Failure:
    """What the kernel did goes before what the rank said, and that before what its exit code tells."""
    found = _said(seen) if isinstance(seen.said, dict) else from_exit(seen.rank, seen.node, seen.code, seen.last_err)
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


def _said(seen: Seen) -> Failure:
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


def from_exit(rank: int, node: str, code: int, last_err: str) -> Failure:
    """What can be said of a rank that left only an exit code and its last line on stderr."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return Failure(rank, node, "signal", f"rank {rank} was killed by {name}", exit_code=code)
    said = f": {last_err}" if last_err else ""
    return Failure(rank, node, "user", f"rank {rank} ended with exit code {code}{said}"[:LONGEST_TEXT], exit_code=code)
