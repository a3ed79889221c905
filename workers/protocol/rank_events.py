"""Events of ranks in events.jsonl, checked by the agent and again by the server.

User code can write to that file, too. An event whose fields have other types or bounds than those here is ignored.
Standard library only.
"""

from dataclasses import dataclass
from typing import Any

from cluster.input.untrusted_files import UnreadableFile, parse_json
from workers.protocol.message_fields import MAX_COUNT, Fields, InvalidMessage, is_count, is_number, is_text

MAX_LINE_BYTES = 64 << 10
MAX_PATH_LENGTH = 4096
MAX_STEP = MAX_COUNT
MAX_TIME_S = 253_370_764_800.0
"""The year 9999: later times have no date."""
KINDS = ("report", "checkpoint", "note", "phase")
REQUIRED_FIELDS = ("t", "rank", "type")


@dataclass(frozen=True, slots=True)
class RankEvent:
    """An event of a rank.

    `type`: one of KINDS; `t`: the rank's wall clock in epoch seconds; `data`: other fields. `at` is the byte after its
    line in the attempt's events file, which identifies the event.
    """

    type: str
    rank: int
    t: float
    at: int
    data: dict[str, Any]

    def to_plain(self) -> dict[str, Any]:
        return {"type": self.type, "rank": self.rank, "t": self.t, "at": self.at, "data": self.data}

    @classmethod
    def parse(cls, data: Any, since_s: float = 0.0, until_s: float = MAX_TIME_S) -> "RankEvent":
        """Parse an event. Raises InvalidMessage.

        A time outside of the two limits, in epoch seconds, becomes the nearer limit: the clock may be set while
        attempts run, and the event counts nevertheless.
        """
        fields = Fields(data, cls.__slots__)
        return cls._check(fields.count("at"), fields.object("data"), data, since_s, until_s)

    @classmethod
    def from_line(cls, line: bytes, at: int, since_s: float, until_s: float) -> "RankEvent":
        """Parse a line of events.jsonl that ends at byte `at`; see `parse`. Raises InvalidMessage."""
        if len(line) > MAX_LINE_BYTES:
            raise InvalidMessage(f"is longer than {MAX_LINE_BYTES} bytes")
        try:
            fields = parse_json(line, "the event")
        except UnreadableFile as e:
            raise InvalidMessage(e.reason) from None
        if not isinstance(fields, dict):
            raise InvalidMessage("is not a JSON object")
        data = {name: value for name, value in fields.items() if name not in REQUIRED_FIELDS}
        return cls._check(at, data, fields, since_s, until_s)

    @classmethod
    def _check(
        cls, at: int, data: dict[str, Any], fields: dict[str, Any], since_s: float, until_s: float
    ) -> "RankEvent":
        t, rank, kind = (fields.get(name) for name in REQUIRED_FIELDS)
        if not is_number(t):
            raise InvalidMessage("has no time `t` that is a finite number")
        if not 0.0 <= t <= MAX_TIME_S:
            raise InvalidMessage(f"has the time {t:.6g}, which is not a date")
        if not is_count(rank):
            raise InvalidMessage("has no `rank` that is an integer")
        if kind not in KINDS:
            raise InvalidMessage(f"has a `type` that is none of {', '.join(KINDS)}")
        if error := {"report": _report_error, "checkpoint": _checkpoint_error}.get(kind, _accept)(data):
            raise InvalidMessage(error)
        return cls(kind, rank, min(max(t, since_s), until_s), at, data)


def _accept(_: dict[str, Any]) -> str:
    """Accept any data: notes and phases stay on the node."""
    return ""


def _report_error(data: dict[str, Any]) -> str:
    if not is_count(data.get("step")):
        return f"has no `step` that is an integer from 0 to {MAX_STEP}"
    invalid = [name for name, value in data.items() if not (is_text(name) and _is_scalar(value))]
    return f"has a value of {invalid[0][:40]!r} that is not a single number, text or null" if invalid else ""


def _checkpoint_error(data: dict[str, Any]) -> str:
    path = data.get("path")
    if not is_count(data.get("step")):
        return f"has no `step` that is an integer from 0 to {MAX_STEP}"
    if not is_text(path) or not 0 < len(path) <= MAX_PATH_LENGTH or "\0" in path:
        return "has no `path` of a checkpoint"
    numbers = [data[name] for name in ("bytes", "seconds", "blocked_s") if name in data]
    return (
        ""
        if all(is_number(number) and number >= 0 for number in numbers)
        else "has a `bytes`, `seconds` or `blocked_s` that is not a finite number of at least 0"
    )


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool) or is_number(value) or is_text(value)
