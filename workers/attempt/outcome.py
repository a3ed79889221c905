"""How an attempt ended, decided from what its supervisor saw."""

import os
import signal
from pathlib import Path

from cluster.untrusted import Unreadable, opened, parse_json
from workers.fields import LONGEST_TEXT
from workers.messages import Failure

MOST_NOTE_BYTES = 1 << 20

TERMINATED = frozenset({-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGKILL})
"""Exit codes of a rank that ended by the signals we send to preempt it, also as a shell passes them on."""


def state(why: str, codes: dict[int, int], noted: bool) -> str:
    """`why` is what ended it: "" (its ranks), failed, preempt, cancel or lease. `noted`: a rank says that it saved."""
    if why in ("cancel", "lease"):
        return {"cancel": "cancelled", "lease": "lost"}[why]
    bad = [code for code in codes.values() if code != 0]
    if why == "preempt" and (noted or (bad and all(code in TERMINATED for code in bad))):
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


def from_exit(rank: int, node: str, code: int, last_err: str) -> Failure:
    """What can be said of a rank that left only an exit code and its last line on stderr."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = ", often the kernel's when memory runs out" if code == -signal.SIGKILL else ""
        return Failure(rank, node, "signal", f"rank {rank} was killed by {name}{hint}", exit_code=code)
    said = f": {last_err}" if last_err else ""
    return Failure(rank, node, "user", f"rank {rank} ended with exit code {code}{said}"[:LONGEST_TEXT], exit_code=code)


def out_of_memory(rank: int, node: str, limit_bytes: int) -> Failure:
    """Of a rank that the kernel killed because memory ran out. `limit_bytes` 0: the machine's own."""
    limit = f"the attempt's limit of {limit_bytes / 2**30:.1f} GiB" if limit_bytes else "the node's memory"
    message = f"rank {rank} was killed by the kernel: {limit} was used up"
    return Failure(rank, node, "oom", message, exit_code=-signal.SIGKILL)
