"""Several nodes' outcomes are one ending of an attempt: the first cause decides. Pure.

A rank that dies breaks its neighbours' connections, and they fail as well, often before anybody knows of the first. So
what cannot follow from a neighbour's death decides before what can:

1. what its ranks wrote cannot be used; what its user got wrong kept it from being started;
2. an attempt whose supervisor was killed, as its node says; a node that was lost, unless it was still heard after
   another part had failed by itself; a rank killed from outside; memory or disk that ran out; a number that is not
   finite; a hang;
3. an attempt that its node stopped because it does not count any more: it is lost;
4. a failure of the job's own code, in the order in which we learned of them;
5. what was stopped because it was asked to.
"""

from typing import Any

from orchestrator.core.attempts import Live, Part
from orchestrator.core.retry import Ended
from workers.messages import Failure, Outcome

PRIMARY = frozenset({"lost", "signal", "oom", "storage", "nan", "hang", "launch"})
HEARD_LATER_S = 3.0
"""A node heard so long after a neighbour had failed did not cause that failure."""

LAST = {"preempted": 6, "cancelled": 7, "succeeded": 8}


def combine(live: Live, candidate: int, asked: str) -> tuple[Ended, Outcome]:
    """The ending, and the outcome of the node that decided it. `asked`: why the job was asked to stop, or ""."""
    parts = [part for part in live.parts if part.outcome is not None]
    first_failed_s = min((p.ended_s for p in parts if p.outcome and p.outcome.state == "failed"), default=None)
    rank, decisive = min(enumerate(parts), key=lambda item: (_class(item[1], first_failed_s), item[1].ended_s, item[0]))
    outcome = decisive.outcome
    assert outcome is not None
    if outcome.state == "fenced":
        explained = live.cut_off is not None and live.cut_off.explains(decisive.ended_s)
        why = live.cut_off.reason if live.cut_off and explained else "another attempt of its job was to take over"
        outcome = lost(live, rank, f"{why}; node {decisive.node} then ended its part")
    failure = outcome.failure
    codes = tuple(code for p in parts if p.outcome for code in _exit_codes(p.outcome))
    bad = tuple(sorted({p.node for p in parts if p.outcome and p.outcome.state in ("failed", "lost")}))
    cause = (decisive.node,) if outcome.state in ("failed", "lost") else bad
    kind, message = (failure.kind, _told(live, rank, decisive, failure)) if failure else ("", "")
    refused = refused_by_user(decisive)
    return Ended(outcome.state, candidate, kind, message, codes, cause, asked, refused), outcome


def refused_by_user(part: Part) -> bool:
    """What its user got wrong kept it from being started: no node has told of it."""
    failure = part.outcome.failure if part.outcome else None
    return failure is not None and failure.kind == "user" and not part.told


def _exit_codes(outcome: Outcome) -> list[int]:
    """By rank. Those of a part that was fenced, or whose lease passed, say how its supervisor stopped it."""
    return [] if outcome.state in ("fenced", "lost") else [code for _, code in sorted(outcome.exit_codes.items())]


def _told(live: Live, rank: int, part: Part, failure: Failure) -> str:
    """Of a gang, which node and rank it was."""
    if len(live.parts) == 1 or f"node {part.node} " in f"{failure.message} ":
        return failure.message
    return f"node {part.node} (node rank {rank}): {failure.message}"


def _class(part: Part, first_failed_s: float | None) -> int:
    assert part.outcome is not None
    state, kind = part.outcome.state, part.outcome.failure.kind if part.outcome.failure else ""
    if kind == "unreadable" or refused_by_user(part):
        return 1
    if state == "lost":
        unheard = first_failed_s is None or part.heard_s < first_failed_s + HEARD_LATER_S
        return 2 if part.told or unheard else 5
    if state == "fenced":
        return 3
    if state == "failed":
        return 2 if kind in PRIMARY else 4
    return LAST[state]


def result_of(live: Live) -> dict[str, Any]:
    """What the task returned: global rank 0 lives on the first node."""
    first = live.parts[0].outcome
    return first.result if first else {}


def peak_of(live: Live) -> int:
    """Bytes of memory that the ranks of the node with most held at one time; 0 where nobody measured it."""
    return max(part.outcome.peak_memory_bytes if part.outcome else 0 for part in live.parts)


def lost(live: Live, node_rank: int, message: str, kind: str = "lost") -> Outcome:
    """Of a part whose agent tells none, or none that can be used."""
    part = live.parts[node_rank]
    state = "lost" if kind in ("lost", "launch") else "failed"
    failure = Failure(part.first_rank, part.node, kind, message)
    return Outcome(live.job, live.epoch, node_rank, state, {}, failure)
