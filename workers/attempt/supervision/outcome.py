"""Decide how an attempt ended, from what its supervisor observed."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cluster.input.untrusted_files import UnreadableFile, open_untrusted, parse_json
from workers.processes.oom import OomMonitor, format_size
from workers.protocol.failure_kinds import FAILURE_KINDS
from workers.protocol.message_fields import MAX_TEXT_LENGTH, is_count
from workers.protocol.messages import Failure

MAX_NOTE_BYTES = 1 << 20

TERMINATED = frozenset({-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGKILL})
"""Exit codes of a rank that ended by the signals we send to preempt it, also as a shell passes them on."""
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
ENDED_BY = {"cancel": "cancelled", "fence": "fenced", "lease": "lost"}
RANK_FAILURES = tuple(name for name, kind in FAILURE_KINDS.items() if kind.is_reported_by_rank)
"""A tuple, since a rank may write a list or an object as its kind, which no set contains."""
TORCH_SAVE_ERRORS = ("PytorchStreamWriter", "inline_container")
"""Texts in errors of torch.save, which do not contain the system's own error."""


class FailedRank(NamedTuple):
    """A rank that failed.

    `failure_record`: the failure record that it wrote, or None. `printed`: the line on stderr that gives the reason.
    `mentions_full_disk`: one of its last lines mentions a full disk. `full_disk`: describes the disk that was full when
    it ended, or "". `peak_bytes`: the peak memory of its largest process.
    """

    rank: int
    node: str
    pid: int
    code: int
    failure_record: Any
    stderr_reason: str
    mentions_full_disk: bool
    full_disk: str
    peak_bytes: int


class Preemption(NamedTuple):
    """Reaction of the ranks to a request to save and stop.

    `interrupted_ranks`: ranks that still ran when the stop was requested. `has_note`: a rank noted that it stopped
    early. `done_ranks`: ranks that noted that their work is done. `is_command`: they run a user's command, not a task
    of ours.
    """

    interrupted_ranks: frozenset[int] = frozenset()
    has_note: bool = False
    done_ranks: frozenset[int] = frozenset()
    is_command: bool = False


def state(why: str, codes: dict[int, int], ranks: int, preemption: Preemption) -> str:
    """Return the state in which the attempt ended.

    `why` is what ended it: "" (its ranks), failed, preempt, cancel, fence or lease. `ranks` is the number that should
    have run; a rank that was never started has no code.
    """
    if why in ENDED_BY:
        return ENDED_BY[why]
    if why == "preempt" and _stopped_early(codes, ranks, preemption):
        return "preempted"
    return "failed" if any(codes.values()) else "succeeded"


def _stopped_early(codes: dict[int, int], ranks: int, preemption: Preemption) -> bool:
    """Return whether the ranks stopped because of the request, before their work was done.

    Exit codes alone do not show it: programs that save on SIGTERM exit with 0 or with 1 (as torchrun). So the work
    counts as done if every rank had ended before the request, or noted that it was done. A task of ours that raises has
    failed; the exit code of a command may be due to the request.
    """
    if preemption.has_note:
        return True
    failed = {rank for rank, code in codes.items() if code != 0 and code not in TERMINATED}
    if failed - preemption.interrupted_ranks if preemption.is_command else failed:
        return False
    unfinished = preemption.interrupted_ranks - preemption.done_ranks
    return any(codes.values()) or len(codes) < ranks or any(rank in unfinished for rank in codes)


def first_failed_rank(codes: dict[int, int]) -> int:
    """Return the lowest rank that failed by itself, else the lowest one that was ended by our signals."""
    return min((code in TERMINATED, rank) for rank, code in codes.items() if code != 0)[1]


def read_notes(events: Path, requested_at: float) -> tuple[bool, frozenset[int]]:
    """Read the last notes: whether a rank stopped early on request, and which ranks are done.

    `requested_at` is the time of the first SIGTERM, in seconds since 1970.
    """
    try:
        with open_untrusted(events) as descriptor:
            end = os.fstat(descriptor).st_size
            data = os.pread(descriptor, MAX_NOTE_BYTES, max(0, end - MAX_NOTE_BYTES))
    except (OSError, UnreadableFile):
        return False, frozenset()
    notes = [_note(line) for line in data.split(b"\n") if b'"preempted"' in line or b'"done"' in line]
    done_ranks = frozenset(
        note["rank"] for note in notes if _is_done(note, requested_at) and is_count(note.get("rank"))
    )
    return any(note.get("preempted") is True for note in notes), done_ranks


def _is_done(note: dict[str, Any], requested_at: float) -> bool:
    """Return whether a note says that a rank's work is done.

    It does not count if the function returned after SIGTERM and our handler had not run (`sigterm`): then user code has
    its own handler, which may be the reason why it returned.
    """
    at = note.get("t")
    is_before_stop = isinstance(at, int | float) and at <= requested_at
    return note.get("done") is True and (is_before_stop or note.get("sigterm") is True)


def _note(line: bytes) -> dict[str, Any]:
    """Parse a note; {} for any other line."""
    try:
        note = parse_json(line, "a note")
    except UnreadableFile:
        return {}
    return note if isinstance(note, dict) and note.get("type") == "note" else {}


def cause(rank: FailedRank, memory: OomMonitor) -> Failure:
    """Return the cause of a failure: a kill by the kernel, else the rank's own report, else its exit code."""
    failure = (
        _reported_failure(rank)
        if isinstance(rank.failure_record, dict)
        else failure_from_exit(rank.rank, rank.node, rank.code, rank.stderr_reason)
    )
    if rank.code in KILLED and memory.was_killed(rank.pid if rank.code == -signal.SIGKILL else 0):
        process = f"rank {rank.rank}" if rank.code == -signal.SIGKILL else f"a process of rank {rank.rank}"
        failure = _with_kind(failure, "oom", f"{process} was killed by the kernel because memory ran out")
    elif failure.kind != "oom" and memory.has_kill_in_attempt():
        failure = _with_kind(failure, "oom", f"{failure.message}; the kernel killed a process because memory ran out")
    elif rank.failure_record is None and (rank.mentions_full_disk or rank.full_disk):
        failure = _with_kind(failure, "storage", failure.message)
    if failure.kind == "oom":
        peak = f"it used {format_size(rank.peak_bytes)}" if rank.peak_bytes else ""
        return _with_kind(failure, "oom", _joined(f"{failure.message}: ", peak, memory.limit()))
    if failure.kind == "storage" and rank.full_disk and rank.full_disk not in failure.message:
        return _with_kind(failure, "storage", f"{failure.message}; {rank.full_disk}")
    return failure


def _reported_failure(rank: FailedRank) -> Failure:
    """Failure that the rank itself reported."""
    kind = rank.failure_record["kind"] if rank.failure_record.get("kind") in RANK_FAILURES else "user"
    message, stacks = (str(rank.failure_record.get(name, ""))[:MAX_TEXT_LENGTH] for name in ("message", "traceback"))
    if kind == "user" and rank.full_disk and any(pattern in message for pattern in TORCH_SAVE_ERRORS):
        kind = "storage"
    return Failure(rank.rank, rank.node, kind, message, stacks, rank.code)


def _with_kind(failure: Failure, kind: str, message: str) -> Failure:
    return replace(failure, kind=kind, message=message[:MAX_TEXT_LENGTH])


def _joined(first: str, *parts: str) -> str:
    return first + ", ".join(filter(None, parts))


def failure_from_exit(rank: int, node: str, code: int, printed: str) -> Failure:
    """Failure of a rank that left only an exit code and output on stderr."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return Failure(rank, node, "signal", f"rank {rank} was killed by {name}", exit_code=code)
    details = f": {printed}" if printed else ""
    return Failure(
        rank, node, "user", f"rank {rank} ended with exit code {code}{details}"[:MAX_TEXT_LENGTH], exit_code=code
    )
