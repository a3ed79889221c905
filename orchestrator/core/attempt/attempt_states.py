"""State machines of an attempt, of its parts and of its stop requests as tables. Pure.

A row is (state, event) -> the next state, and the command that is then sent. transitions.py changes states by these
rows alone. A pair of state and event that is in no table has no effect, and is in IGNORED_* if it may come. The
simulator and the tests of the controller see every change, and hold it to the tables.

Events of an attempt: `suspected`, a part may have ended without a message about it (suspicion.py); `recovered`, its
nodes respond again; `rejoined`, the server has joined its cluster again; `timed_out`, no reply came within TIMERS;
`fence_clear`, `own_fence_read` and `fence_above`, its fence was read: it is not above the attempt, or is the one that
this server raised, or was raised for a newer attempt; `fence_raised` and `fence_lowered`, Ray has stored it;
`concluded`, every part has ended.
"""

from enum import StrEnum

from orchestrator.core.controller.attempts import AttemptState, PartState, StopRequest, StopState
from orchestrator.core.timing import FENCE_RETRY_S, STOP_OVERDUE_S, STOP_RETRY_S

A, P, S = AttemptState, PartState, StopState

ATTEMPT_MEANING: dict[AttemptState, str] = {
    A.LAUNCHING: "its launch has been sent, and its result has not arrived",
    A.ADOPTED: "of an earlier server, or from before the cluster was joined again: its fence has not been read yet",
    A.CHECKING: "as ADOPTED, and a part is suspect: its fence is being read",
    A.ACTIVE: "counts: its fence is not above it",
    A.FENCING: "a part is suspect: a fence above the attempt has been requested",
    A.FENCED: "Ray has stored that fence: nothing of the attempt starts, is renewed or commits",
    A.LOWERING: "its nodes respond again: the fence is being lowered",
    A.SUPERSEDED: "another server raised its fence: it never counts again",
    A.ENDED: "its end is stored, and it is no longer tracked",
}
PART_MEANING: dict[PartState, str] = {
    P.UNREPORTED: "its node has not reported it to this server",
    P.STARTING: "its node has reported that it starts",
    P.RUNNING: "its node has reported that it runs",
    P.UNCONFIRMED: "its node does not list it, or sent no reply when it was started",
    P.UNREADABLE: "its messages cannot be read: it is being stopped",
    P.ENDED: "final",
}
STOP_MEANING: dict[StopState, str] = {
    S.NONE: "its node has got no request to stop it",
    S.REQUESTED: "the request has been sent, and its node has not replied",
    S.ACKNOWLEDGED: "its node has acknowledged the request",
}

TRACKED = frozenset(A) - {A.ENDED}
CLEAR, OWN, ABOVE, RAISED, LOWERED = "fence_clear", "own_fence_read", "fence_above", "fence_raised", "fence_lowered"

ATTEMPT: dict[tuple[AttemptState, str], tuple[AttemptState, str]] = (
    {
        (A.LAUNCHING, "launched"): (A.ACTIVE, ""),
        (A.LAUNCHING, "launch_failed"): (A.ACTIVE, ""),
        (A.LAUNCHING, "rejoined"): (A.LAUNCHING, ""),
        (A.ADOPTED, CLEAR): (A.ACTIVE, ""),
        (A.ADOPTED, OWN): (A.LOWERING, "lower"),
        (A.ADOPTED, "suspected"): (A.CHECKING, "read"),
        (A.ADOPTED, "timed_out"): (A.ADOPTED, "read"),
        (A.CHECKING, CLEAR): (A.ACTIVE, ""),
        (A.CHECKING, OWN): (A.FENCING, ""),
        (A.CHECKING, "recovered"): (A.ADOPTED, ""),
        (A.CHECKING, "timed_out"): (A.CHECKING, "read"),
        (A.ACTIVE, "suspected"): (A.FENCING, "raise"),
        (A.ACTIVE, OWN): (A.LOWERING, "lower"),
        (A.FENCING, RAISED): (A.FENCED, ""),
        (A.FENCING, "recovered"): (A.LOWERING, "lower"),
        (A.FENCING, "timed_out"): (A.FENCING, "raise"),
        (A.FENCED, "recovered"): (A.LOWERING, "lower"),
        (A.LOWERING, LOWERED): (A.ACTIVE, ""),
        (A.LOWERING, OWN): (A.LOWERING, "lower"),
        (A.LOWERING, "suspected"): (A.FENCING, "raise"),
        (A.LOWERING, "timed_out"): (A.LOWERING, "lower"),
        (A.LOWERING, "rejoined"): (A.LOWERING, "lower"),
    }
    | {(s, "rejoined"): (A.ADOPTED, "read") for s in (A.ADOPTED, A.CHECKING, A.ACTIVE)}
    | {(s, "rejoined"): (A.FENCING, "raise") for s in (A.FENCING, A.FENCED, A.SUPERSEDED)}
    | {(s, ABOVE): (A.SUPERSEDED, "") for s in A if s in TRACKED - {A.LAUNCHING}}
    | {(s, "concluded"): (A.ENDED, "remove") for s in A if s in TRACKED - {A.LAUNCHING}}
)
"""Commands: read = Fence(epoch), raise = Fence(epoch + 1), lower = Fence(epoch, lower=True), remove = RemoveFiles."""

PART: dict[tuple[PartState, str], PartState] = (
    {
        (P.UNREPORTED, "reported_starting"): P.STARTING,
        (P.UNREPORTED, "reported_running"): P.RUNNING,
        (P.UNREPORTED, "start_unanswered"): P.UNCONFIRMED,
        (P.UNREADABLE, "start_unanswered"): P.UNCONFIRMED,
        (P.STARTING, "reported_running"): P.RUNNING,
        (P.UNCONFIRMED, "reported_starting"): P.STARTING,
        (P.UNCONFIRMED, "reported_running"): P.RUNNING,
        (P.UNCONFIRMED, "listed_unreported"): P.UNREPORTED,
        (P.UNCONFIRMED, "listed_starting"): P.STARTING,
        (P.UNCONFIRMED, "listed_running"): P.RUNNING,
        (P.UNCONFIRMED, "listed_unreadable"): P.UNREADABLE,
    }
    | {(s, "not_listed"): P.UNCONFIRMED for s in (P.UNREPORTED, P.STARTING, P.RUNNING, P.UNREADABLE)}
    | {(s, "unreadable"): P.UNREADABLE for s in (P.UNREPORTED, P.STARTING, P.RUNNING, P.UNCONFIRMED)}
    | {(s, "not_started"): P.ENDED for s in (P.UNREPORTED, P.STARTING, P.RUNNING, P.UNREADABLE)}
    | {(s, event): P.ENDED for s in P if s is not P.ENDED for event in ("reported_ended", "expired")}
)
"""`listed_*`: its node's newest list has it, and the last report of it was of that state."""

STOP: dict[tuple[StopState, str], tuple[StopState, str]] = {
    (S.NONE, "wanted"): (S.REQUESTED, "stop"),
    (S.REQUESTED, "answered"): (S.ACKNOWLEDGED, ""),
    (S.REQUESTED, "failed"): (S.REQUESTED, ""),
    (S.REQUESTED, "timed_out"): (S.REQUESTED, "stop"),
    (S.REQUESTED, "mode_changed"): (S.REQUESTED, "stop"),
    (S.REQUESTED, "voided"): (S.NONE, ""),
    (S.ACKNOWLEDGED, "answered"): (S.ACKNOWLEDGED, ""),
    (S.ACKNOWLEDGED, "timed_out"): (S.REQUESTED, "stop"),
    (S.ACKNOWLEDGED, "mode_changed"): (S.REQUESTED, "stop"),
    (S.ACKNOWLEDGED, "voided"): (S.NONE, ""),
}
"""`failed`: due again a second later. `voided`: requests from before a fence, or from another cluster, do not count."""

IGNORED_BY_ATTEMPT: frozenset[tuple[AttemptState, str]] = frozenset(
    {(s, event) for s in TRACKED - {A.LAUNCHING} for event in ("launched", "launch_failed")}
    | {(s, CLEAR) for s in TRACKED - {A.ADOPTED, A.CHECKING}}
    | {(s, RAISED) for s in TRACKED - {A.LAUNCHING, A.FENCING, A.SUPERSEDED}}
    | {(s, OWN) for s in (A.FENCING, A.FENCED)}
    | {(A.LAUNCHING, ABOVE)}
)
"""Replies to requests of an earlier state, and replies that come twice. Nothing reaches an attempt that has ended.

A late reply about the fence of a job that is being launched loses nothing: the launch reads the fence after that
request, and fails if it is above the attempt (runtime/controller/launch.py).
"""

IGNORED_BY_PART: frozenset[tuple[PartState, str]] = frozenset(
    {(P.STARTING, "reported_starting"), (P.RUNNING, "reported_starting"), (P.RUNNING, "reported_running")}
    | {(P.UNREADABLE, "unreadable"), (P.UNCONFIRMED, "not_listed")}
    | {(s, f"listed_{s.lower()}") for s in (P.UNREPORTED, P.STARTING, P.RUNNING, P.UNREADABLE)}
    | {(P.ENDED, e) for e in ("reported_starting", "reported_running", "reported_ended", "unreadable")}
)
"""Reports that are repeated or late, and anything about a part that has ended."""

IGNORED_BY_STOP: frozenset[tuple[StopState, str]] = frozenset(
    {(S.NONE, "answered"), (S.NONE, "failed"), (S.ACKNOWLEDGED, "failed")}
)

TIMERS: dict[StrEnum, float] = {
    A.ADOPTED: FENCE_RETRY_S,
    A.CHECKING: FENCE_RETRY_S,
    A.FENCING: FENCE_RETRY_S,
    A.LOWERING: FENCE_RETRY_S,
    S.REQUESTED: STOP_RETRY_S,
    S.ACKNOWLEDGED: STOP_OVERDUE_S,  # and the grace period of a stop that lets the ranks save
}
"""Seconds in a state after which `timed_out` follows. An ADOPTED attempt is reviewed only in a joined cluster."""

FIRST = {A: frozenset({A.LAUNCHING, A.ADOPTED}), P: frozenset({P.UNREPORTED}), S: frozenset({S.NONE})}


def stop_state(request: StopRequest | None) -> StopState:
    """Return the state of the stop request to a node."""
    return S.NONE if request is None else request.state
