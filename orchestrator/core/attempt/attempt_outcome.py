"""Combine the outcomes of all nodes into one end of an attempt: the first cause decides. Pure.

A rank that dies breaks the connections of the other ranks, which then fail too, often before the first failure is
reported. So causes that cannot follow from the failure of another rank take precedence:

1. the output of its ranks cannot be read; an error of the user prevented the start;
2. a supervisor that was killed, according to its node; a node that was lost, unless it still responded after another
part had failed by itself; a failure that no failure of another rank causes, such as a lack of memory;
3. an attempt that its node stopped because it no longer counts: it is lost; 4. a failure of the job's own code, in the
order in which we learned of them; 5. parts that were stopped on request.

The `cause_rank` of a kind of failure is in workers/protocol/failure_kinds.py.
"""

from typing import Any

from orchestrator.core.controller.attempts import AttemptPart, LiveAttempt
from orchestrator.core.jobs.retry import AttemptEnd
from orchestrator.core.timing import CONTACT_AFTER_FAILURE_S
from workers.protocol.failure_kinds import FAILURE_KINDS, failure_kind
from workers.protocol.messages import Failure, Outcome

STOPPED_RANKS = {"preempted": 6, "cancelled": 7, "succeeded": 8}


def combine(attempt: LiveAttempt, candidate: int, stop_reason: str) -> tuple[AttemptEnd, Outcome]:
    """Return the end of the attempt and the decisive outcome. `stop_reason`: why the job was to stop, or ""."""
    parts = [part for part in attempt.parts if part.outcome is not None]
    first_failed_s = min((p.ended_s for p in parts if p.outcome and p.outcome.state == "failed"), default=None)
    rank, decisive = min(
        enumerate(parts), key=lambda item: (_cause_rank(item[1], first_failed_s), item[1].ended_s, item[0])
    )
    outcome = decisive.outcome
    assert outcome is not None
    if outcome.state == "fenced":
        explained = attempt.cut_off is not None and attempt.cut_off.explains(decisive.ended_s)
        why = attempt.cut_off.reason if attempt.cut_off and explained else "another attempt of this job replaced it"
        outcome = lost_outcome(attempt, rank, f"{why}; node {decisive.node} then ended its part")
    failure = outcome.failure
    codes = tuple(code for p in parts if p.outcome for code in _exit_codes(p.outcome))
    failed_nodes = tuple(sorted({p.node for p in parts if p.outcome and p.outcome.state in ("failed", "lost")}))
    blamed_nodes = (decisive.node,) if outcome.state in ("failed", "lost") else failed_nodes
    kind, message = (failure.kind, _cause_message(attempt, rank, decisive, failure)) if failure else ("", "")
    refused = is_user_error(decisive)
    return AttemptEnd(outcome.state, candidate, kind, message, codes, blamed_nodes, stop_reason, refused), outcome


def is_user_error(part: AttemptPart) -> bool:
    """Return True if an error of the user prevented the start; no node has reported the part then."""
    failure = part.outcome.failure if part.outcome else None
    return failure is not None and failure.kind == "user" and not part.is_reported


def _exit_codes(outcome: Outcome) -> list[int]:
    """Return exit codes by rank; [] for a part that was fenced or lost, whose supervisor killed the ranks."""
    return [] if outcome.state in ("fenced", "lost") else [code for _, code in sorted(outcome.exit_codes.items())]


def _cause_message(attempt: LiveAttempt, rank: int, part: AttemptPart, failure: Failure) -> str:
    """Return the failure's message; for a gang, with its node and node rank."""
    if len(attempt.parts) == 1 or f"node {part.node} " in f"{failure.message} ":
        return failure.message
    return f"node {part.node} (node rank {rank}): {failure.message}"


def _cause_rank(part: AttemptPart, first_failed_s: float | None) -> int:
    assert part.outcome is not None
    state, failure = part.outcome.state, part.outcome.failure
    kind_rank = failure_kind(failure.kind if failure else "").cause_rank
    if kind_rank == 1 or is_user_error(part):
        return 1
    if state == "lost":
        silent_since = first_failed_s is None or part.last_listed_s < first_failed_s + CONTACT_AFTER_FAILURE_S
        return 2 if part.is_reported or silent_since else 5
    if state == "fenced":
        return 3
    if state == "failed":
        return kind_rank
    return STOPPED_RANKS[state]


def result_of(attempt: LiveAttempt) -> dict[str, Any]:
    """Return the task's result; global rank 0 is on the first node."""
    first = attempt.parts[0].outcome
    return first.result if first else {}


def peak_of(attempt: LiveAttempt) -> int:
    """Return the largest peak memory of the ranks of one node, in bytes; 0 if it was not measured."""
    return max(part.outcome.peak_memory_bytes if part.outcome else 0 for part in attempt.parts)


def lost_outcome(attempt: LiveAttempt, node_rank: int, message: str, kind: str = "lost") -> Outcome:
    """Make the outcome of a part for which its agent has not reported a usable one."""
    part = attempt.parts[node_rank]
    state = FAILURE_KINDS[kind].part_state
    failure = Failure(part.first_rank, part.node, kind, message)
    return Outcome(attempt.job, attempt.epoch, node_rank, state, {}, failure)
