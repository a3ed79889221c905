"""The only module that changes states of attempts: by a row of attempt_states.py, whose command is then sent. Pure.

A pair of state and event that is neither in a table nor in IGNORED_* changes nothing and logs a warning. In tests, it
is a failure.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any, TypeVar

from orchestrator.core.attempt.attempt_states import (
    ATTEMPT,
    IGNORED_BY_ATTEMPT,
    IGNORED_BY_PART,
    IGNORED_BY_STOP,
    PART,
    STOP,
    stop_state,
)
from orchestrator.core.controller.attempts import (
    UNFENCED,
    AttemptPart,
    AttemptState,
    FenceRequest,
    LiveAttempt,
    PartState,
    StopRequest,
    StopState,
    Transition,
)
from orchestrator.core.controller.commands import Fence, RemoveFiles, Stop
from orchestrator.core.controller.draft import Draft
from orchestrator.core.timing import STOP_RETRY_S

A = AttemptState
STOOD = frozenset({A.FENCED, A.SUPERSEDED})
"""States in which Ray has stored a fence above the attempt, and that fence counts."""
REPORTED = frozenset({PartState.UNREPORTED, PartState.STARTING, PartState.RUNNING})
UNEXPECTED = "an event that is in no table of states was ignored"
FAILED_STOP_RETRY_S = 1.0
"""Seconds after which a stop request that could not be delivered is due again."""

State = TypeVar("State", bound=StrEnum)
Next = TypeVar("Next")


def _next(
    draft: Draft,
    table: Mapping[tuple[State, str], Next],
    ignored: frozenset[tuple[State, str]],
    pair: tuple[State, str],
    name: str,
) -> Next | None:
    """Return what the table has for a pair of state and event, or None if the event has no effect."""
    row = table.get(pair)
    if row is None and pair not in ignored:
        draft.warn(f"{UNEXPECTED}: {pair[1]} for {name}, which is {pair[0]}")
    return row


def _record(
    draft: Draft, attempt: LiveAttempt, node: str | None, before: StrEnum, event: str, after: StrEnum, why: str
) -> None:
    draft.transitions.append(Transition(draft.cause, attempt.job, attempt.epoch, node, before, event, after, why))


def move(draft: Draft, job: str, event: str, why: str = "", **data: Any) -> LiveAttempt:
    """Apply an event to an attempt, and send the command of its row. Return the attempt after it.

    `why`: the reason, or "". `data`: fields of LiveAttempt that belong to its next state.
    """
    attempt = draft.attempts[job]
    row = _next(draft, ATTEMPT, IGNORED_BY_ATTEMPT, (attempt.state, event), f"attempt {attempt.key}")
    if row is None:
        return attempt
    state, command = row
    if state is A.ADOPTED:
        data["read_s"] = attempt.fence.sent_s if attempt.fence and not command else draft.now.s
    after = replace(attempt, state=state, fence=_fence_after(attempt, event, state, command, draft.now.s), **data)
    _record(draft, attempt, None, attempt.state, event, state, why or data.get("superseded_reason", ""))
    if state is A.ENDED:
        draft.remove_attempt(attempt)
    else:
        draft.attempts[job] = after
    if command:
        SENDERS[command](draft, after)
    return after


def _fence_after(attempt: LiveAttempt, event: str, state: A, command: str, now_s: float) -> FenceRequest | None:
    """Return the times of a fence in the next state. They begin again for another purpose or cluster."""
    if state in UNFENCED or state is A.ENDED:
        return None
    fence = attempt.fence
    if fence is None or event == "rejoined" or (attempt.state is A.LOWERING) != (state is A.LOWERING):
        fence = FenceRequest(now_s, now_s)
    elif command:
        fence = replace(fence, sent_s=now_s)
    if state not in STOOD:
        return replace(fence, stored_s=None)
    return fence if fence.stored_s is not None else replace(fence, stored_s=now_s)


def _read(draft: Draft, attempt: LiveAttempt) -> None:
    draft.command(Fence(attempt.job, attempt.epoch, requested_s=draft.now.s))


def _raise(draft: Draft, attempt: LiveAttempt) -> None:
    draft.raised_fences[attempt.job] = attempt.epoch + 1
    draft.command(Fence(attempt.job, attempt.epoch + 1, requested_s=draft.now.s))


def _lower(draft: Draft, attempt: LiveAttempt) -> None:
    draft.command(Fence(attempt.job, attempt.epoch, lower=True, requested_s=draft.now.s))


def _remove(draft: Draft, attempt: LiveAttempt) -> None:
    draft.command(*(RemoveFiles(part.node, attempt.job, attempt.epoch) for part in attempt.parts))


SENDERS: Mapping[str, Callable[[Draft, LiveAttempt], None]] = {
    "read": _read,
    "raise": _raise,
    "lower": _lower,
    "remove": _remove,
}


def move_part(draft: Draft, job: str, node_rank: int, event: str, **data: Any) -> None:
    """Apply an event to a part of an attempt. `data`: fields of AttemptPart that belong to its next state."""
    attempt = draft.attempts[job]
    part = attempt.parts[node_rank]
    after = _next(draft, PART, IGNORED_BY_PART, (part.state, event), f"part {attempt.part_key(node_rank)}")
    if after is None:
        return
    if after is not PartState.UNCONFIRMED:
        data["doubt"] = ""
    if after in REPORTED:
        data["last_reported"] = after
    updated = replace(part, state=after, **data)
    _record(draft, attempt, part.node, part.state, event, after, _part_reason(updated))
    draft.attempts[job] = attempt.with_part(node_rank, updated)


def _part_reason(part: AttemptPart) -> str:
    """Return why a part is in its state, or ""."""
    if part.state is PartState.ENDED and part.outcome is not None:
        failure = part.outcome.failure
        return f"{part.outcome.state}, {failure.kind}" if failure else part.outcome.state
    return part.doubt or part.unreadable_reason


def move_stop(draft: Draft, job: str, node: str, event: str, how: str = "") -> None:
    """Apply an event to the stop request of `node`. `how`: mode of a request that is sent."""
    attempt = draft.attempts[job]
    request = attempt.stop_requests.get(node)
    name = f"the request to stop attempt {attempt.key} on {node}"
    row = _next(draft, STOP, IGNORED_BY_STOP, (stop_state(request), event), name)
    if row is None:
        return
    state, command = row
    requests = dict(attempt.stop_requests)
    if state is StopState.NONE:
        del requests[node]
    else:
        requests[node] = _updated_request(request, state, event, how, draft.now.s)
    _record(draft, attempt, node, stop_state(request), event, state, how or (request.how if request else ""))
    draft.attempts[job] = replace(attempt, stop_requests=requests)
    if command:
        draft.command(Stop(node, job, attempt.epoch, requests[node].how, draft.now.s))


def _updated_request(request: StopRequest | None, state: StopState, event: str, how: str, now_s: float) -> StopRequest:
    if request is None or event == "mode_changed":
        return StopRequest(state, how, now_s, now_s)
    updated_s = now_s - STOP_RETRY_S + FAILED_STOP_RETRY_S if event == "failed" else now_s
    return replace(request, state=state, updated_s=updated_s)


def void_stops(draft: Draft, attempt: LiveAttempt) -> None:
    """Discard all stop requests of an attempt: they were sent before its fence, or in another cluster."""
    for node in attempt.stop_requests:
        move_stop(draft, attempt.job, node, "voided")
