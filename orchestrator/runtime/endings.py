"""Several nodes' outcomes are one ending of an attempt. Pure."""

from typing import Any

from orchestrator.core.retry import Ended
from orchestrator.runtime.live import Live
from workers.messages import Failure

# What one node saw decides for all, in this order: its neighbours were then stopped by us.
GRAVEST_FIRST = ("failed", "lost", "preempted", "cancelled", "succeeded")


def combine(live: Live, candidate: int) -> tuple[Ended, dict[str, Any]]:
    """The ending, and the outcome (plain data) of the node that decided it. A state that is none of ours decides
    first, and is a failure of kind `unreadable`.
    """
    outcomes = [_known(part.ended) for part in live.parts if part.ended is not None]
    decisive = min(outcomes, key=lambda o: GRAVEST_FIRST.index(o["state"]) - (_kind(o) == "unreadable"))
    failure = decisive["failure"] or {}
    codes = tuple(code for outcome in outcomes for _, code in sorted(outcome["exit_codes"].items()))
    return Ended(decisive["state"], candidate, failure.get("kind", ""), failure.get("message", ""), codes), decisive


def _known(outcome: dict[str, Any]) -> dict[str, Any]:
    if outcome["state"] in GRAVEST_FIRST:
        return outcome
    message = f"the attempt ended in the unknown state {str(outcome['state'])[:40]!r}"
    return outcome | {"state": "failed", "failure": Failure(0, "", "unreadable", message).to_plain()}


def _kind(outcome: dict[str, Any]) -> str:
    return str((outcome["failure"] or {}).get("kind", ""))


def result_of(live: Live) -> dict[str, Any]:
    """What the task returned: global rank 0 lives on the first node."""
    first = live.parts[0].ended or {}
    result: dict[str, Any] = first.get("result", {})
    return result


def peak_of(live: Live) -> int:
    """Bytes of memory that the ranks of the node with most held at one time; 0 where nobody measured it."""
    peaks: list[int] = [(part.ended or {}).get("peak_memory_bytes", 0) for part in live.parts]
    return max(peaks)
