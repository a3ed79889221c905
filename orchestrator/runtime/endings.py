"""Several nodes' outcomes are one ending of an attempt. Pure."""

from typing import Any

from orchestrator.core.retry import Ended
from orchestrator.runtime.live import Live

# What one node saw decides for all, in this order: its neighbours were then stopped by us.
GRAVEST_FIRST = ("failed", "lost", "preempted", "cancelled", "succeeded")


def combine(live: Live, candidate: int) -> tuple[Ended, dict[str, Any]]:
    """The ending, and the outcome (plain data) of the node that decided it."""
    outcomes = [part.ended for part in live.parts if part.ended is not None]
    decisive = min(outcomes, key=lambda o: GRAVEST_FIRST.index(o["state"]))
    failure = decisive["failure"] or {}
    codes = tuple(code for outcome in outcomes for _, code in sorted(outcome["exit_codes"].items()))
    return Ended(decisive["state"], candidate, failure.get("kind", ""), failure.get("message", ""), codes), decisive


def result_of(live: Live) -> dict[str, Any]:
    """What the task returned: global rank 0 lives on the first node."""
    first = live.parts[0].ended or {}
    result: dict[str, Any] = first.get("result", {})
    return result
