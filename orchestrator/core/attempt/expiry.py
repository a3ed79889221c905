"""When it is certain that no process of a fenced part runs any more, by rules that each prove it. Pure.

They hold once Ray has stored a fence above the attempt: nothing of it is renewed any more (suspicion.py).
"""

from collections.abc import Callable

from orchestrator.core.controller.attempts import LiveAttempt, StopState
from orchestrator.core.controller.draft import Draft
from orchestrator.core.model import Job
from orchestrator.core.states import State
from orchestrator.core.timing import CANCELLED_LEASE_S, LEASE_MARGIN_S, PATIENT_LEASE_S


def is_over(draft: Draft, attempt: LiveAttempt, rank: int) -> bool:
    """Return True if a rule proves that no process of a part runs. Nothing proves it before its fence is stored."""
    return attempt.fenced_s is not None and any(proves(draft, attempt, rank) for proves in PROOFS)


def _has_expired(draft: Draft, attempt: LiveAttempt, rank: int) -> bool:
    return draft.now.s > expires_s(draft, attempt, rank)


def _has_stopped(draft: Draft, attempt: LiveAttempt, rank: int) -> bool:
    """Return True if its node acknowledged a stop that was sent after the fence, and has listed no such part since."""
    part = attempt.parts[rank]
    node, stop = draft.nodes.get(part.node), attempt.stop_requests.get(part.node)
    if node is None or node.list_requested_s is None or stop is None or attempt.fenced_s is None:
        return False
    is_acknowledged = stop.state is StopState.ACKNOWLEDGED and stop.updated_s >= attempt.fenced_s
    return is_acknowledged and node.list_requested_s > stop.updated_s and attempt.part_key(rank) not in node.listed


PROOFS: tuple[Callable[[Draft, LiveAttempt, int], bool], ...] = (_has_expired, _has_stopped)
"""Each of them suffices."""


def expires_s(draft: Draft, attempt: LiveAttempt, rank: int) -> float:
    """Return when the lease of a part has expired, with margin.

    An agent that runs renews the leases on its node. After a raylet restart its node has a second name until Ray
    removes the first, so contact under either name counts.
    """
    name, key = attempt.parts[rank].node, attempt.part_key(rank)
    node, allowed_s = draft.nodes.get(name), lease_s(draft.records[attempt.job].job) + LEASE_MARGIN_S
    renewed_s = max(attempt.fenced_s or draft.now.s, node.last_contact_s if node else 0.0)
    if draft.now.s > renewed_s + allowed_s:  # only now, because this checks all nodes
        second_names = (n for n in draft.nodes.current.values() if n.duplicate_of == name and n.runs(key))
        renewed_s = max([renewed_s, *(n.last_contact_s for n in second_names)])
    return renewed_s + allowed_s


def lease_s(job: Job) -> float:
    """Return how long an attempt may keep running after the last renewal of its lease."""
    full_s = PATIENT_LEASE_S if job.recovery.on_disconnect == "wait" else job.recovery.lease_s
    return min(full_s, CANCELLED_LEASE_S) if job.state is State.CANCELLED else full_s
