"""Record of one change of the state of an attempt, of one of its parts, or of a stop request."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Transition:
    """Row of a table in core/attempt/attempt_states.py that was applied because of message number `cause`.

    `node` is that of a part or of a stop request, None for the attempt itself; the class of `before` says which of them
    it is. `after` may equal `before`. `why`: the reason, or "".
    """

    cause: int
    job: str
    epoch: int
    node: str | None
    before: StrEnum
    event: str
    after: StrEnum
    why: str = ""
