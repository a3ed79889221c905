"""What ranks tell in events.jsonl: checked by the agent that reads it, and again by the server before it stores it.

User code can write there too. An event holds what is listed here, in these types and bounds, or it does not count.
"""

import math
from typing import Any, TypeGuard

from cluster.untrusted import LARGEST_INTEGER, Unreadable, parse_json

LONGEST_LINE_BYTES = 64 << 10
LONGEST_PATH = 4096
LARGEST_STEP = 2**53
"""What JavaScript counts exactly; far within what the store holds."""
LATEST_S = 253_370_764_800.0
"""The year 9999: later times have no date."""
KINDS = ("report", "checkpoint", "note", "phase")
ALWAYS = ("t", "rank", "type")


def parsed(line: bytes, since_s: float, until_s: float) -> dict[str, Any]:
    """One line as an event. Raises Unreadable, whose `why` says what is wrong with it."""
    if len(line) > LONGEST_LINE_BYTES:
        raise Unreadable("the event", f"is longer than {LONGEST_LINE_BYTES} bytes")
    event = parse_json(line, "the event")
    if why := refusal(event, since_s, until_s):
        raise Unreadable("the event", why)
    checked: dict[str, Any] = event
    return checked


def refusal(event: Any, since_s: float = 0.0, until_s: float = LATEST_S) -> str:
    """Why this is no event that may be stored, "" when it is one. Its time lies between the two, in epoch seconds."""
    if not isinstance(event, dict):
        return "is no JSON object"
    t, kind = event.get("t"), event.get("type")
    if not _is_number(t):
        return "has no time `t` that is a finite number"
    if not since_s <= t <= until_s:
        return f"has the time {t:.6g}, which lies outside of its attempt"
    if not _is_count(event.get("rank")):
        return "has no `rank` that is a whole number"
    if kind not in KINDS:
        return f"has none of the types {', '.join(KINDS)}"
    return {"report": _bad_report, "checkpoint": _bad_checkpoint}.get(kind, _accepted)(event)


def _accepted(_: dict[str, Any]) -> str:
    """Notes and phases stay on the node."""
    return ""


def _bad_report(event: dict[str, Any]) -> str:
    if not _is_count(event.get("step")):
        return f"has no `step` that is a whole number from 0 to {LARGEST_STEP}"
    wrong = [name for name, value in event.items() if not (_is_text(name) and _is_scalar(value))]
    return f"has a value of {wrong[0][:40]!r} that is no single number, text or null" if wrong else ""


def _bad_checkpoint(event: dict[str, Any]) -> str:
    path = event.get("path")
    if not _is_count(event.get("step")):
        return f"has no `step` that is a whole number from 0 to {LARGEST_STEP}"
    if not _is_text(path) or not 0 < len(path) <= LONGEST_PATH or "\0" in path:
        return "has no `path` of a checkpoint"
    measured = [event[name] for name in ("bytes", "seconds", "blocked_s") if name in event]
    return "" if all(_is_number(n) and n >= 0 for n in measured) else "measures its checkpoint in no finite numbers"


def _is_number(value: Any) -> TypeGuard[int | float]:
    if type(value) is int:
        return abs(value) <= LARGEST_INTEGER
    return type(value) is float and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_STEP


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool) or _is_number(value) or _is_text(value)


def _is_text(value: Any) -> TypeGuard[str]:
    """Text that UTF-8 can hold."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
