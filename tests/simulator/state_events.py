"""Which events for attempts, parts and stop requests a message contains, whether they then have an effect or not."""

from collections.abc import Iterator
from enum import StrEnum

from orchestrator.core.attempt.attempt_states import AttemptState, PartState, stop_state
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.attempts import AttemptPart, LiveAttempt
from orchestrator.core.controller.draft import Control

Arrival = tuple[str, str, StrEnum, str]
"""(job, machine, its state, event)"""


def events_of(control: Control, message: m.Message) -> Iterator[Arrival]:
    if isinstance(message, m.ClusterJoined):
        for attempt in control.attempts.values():
            yield attempt.job, "attempt", attempt.state, "rejoined"
    elif isinstance(message, m.Heartbeat):
        yield from _of_heartbeat(control, message)
    elif isinstance(message, m.Launched | m.LaunchFailed | m.FenceAnswered | m.StopAnswered | m.PartUnreadable):
        attempt = control.attempts.get(message.job)
        if attempt is not None:
            yield from _of_attempt(control, attempt, message)


def _of_attempt(
    control: Control,
    attempt: LiveAttempt,
    message: m.Launched | m.LaunchFailed | m.FenceAnswered | m.StopAnswered | m.PartUnreadable,
) -> Iterator[Arrival]:
    job, state = attempt.job, attempt.state
    if isinstance(message, m.FenceAnswered):
        if event := fence_event(control, attempt, message):
            yield job, "attempt", state, event
    elif message.epoch != attempt.epoch:
        return
    elif isinstance(message, m.Launched | m.LaunchFailed):
        yield job, "attempt", state, "launched" if isinstance(message, m.Launched) else "launch_failed"
    elif isinstance(message, m.StopAnswered):
        request = attempt.stop_requests.get(message.node)
        if request is None or (request.how == message.how and message.requested_s >= request.since_s):
            yield job, "stop request", stop_state(request), "failed" if message.error else "answered"
    elif 0 <= message.node_rank < len(attempt.parts):
        event = "reported_ended" if message.ended else "unreadable"
        yield job, "part", attempt.parts[message.node_rank].state, event


def fence_event(control: Control, attempt: LiveAttempt, message: m.FenceAnswered) -> str:
    """Return the event that a reply about the fence of an attempt means, "" if none."""
    if message.error or message.epoch not in (attempt.epoch, attempt.epoch + 1):
        return ""
    if message.epoch > attempt.epoch:
        if message.current_epoch <= attempt.epoch:
            return ""
        return "fence_above" if attempt.superseded_reason else "fence_raised"
    if message.current_epoch <= attempt.epoch:
        is_lowering = attempt.state is AttemptState.LOWERING and attempt.fence is not None
        is_lowered = is_lowering and message.requested_s >= attempt.fence.since_s
        return "fence_lowered" if is_lowered else "fence_clear"
    is_own = not attempt.superseded_reason and control.raised_fences.get(attempt.job) == message.current_epoch
    return "own_fence_read" if is_own else "fence_above"


def _of_heartbeat(control: Control, message: m.Heartbeat) -> Iterator[Arrival]:
    node = control.nodes.get(message.node)
    if node is None or node.ray_id != message.ray_id:
        return
    for status in message.reports:
        attempt = control.attempts.get(status.job)
        if attempt is None or attempt.epoch != status.epoch or not 0 <= status.node_rank < len(attempt.parts):
            continue
        part = attempt.parts[status.node_rank]
        if part.node == message.node:
            is_unreadable = part.unreadable_reason and status.phase != "ended"
            yield status.job, "part", part.state, "unreadable" if is_unreadable else f"reported_{status.phase}"
    if message.attempts is not None and (node.list_requested_s is None or message.requested_s >= node.list_requested_s):
        yield from _of_list(control, message)


def _of_list(control: Control, message: m.Heartbeat) -> Iterator[Arrival]:
    for job in control.on_node.get(message.node, ()):
        attempt = control.attempts[job]
        if attempt.state is AttemptState.LAUNCHING or message.requested_s < attempt.since_s:
            continue
        for rank, part in enumerate(attempt.parts):
            if part.node == message.node and part.state is not PartState.ENDED:
                is_listed = message.attempts is not None and attempt.part_key(rank) in message.attempts
                event = f"listed_{_without_doubt(part).lower()}" if is_listed else "not_listed"
                yield job, "part", part.state, event


def _without_doubt(part: AttemptPart) -> PartState:
    return PartState.UNREADABLE if part.unreadable_reason else part.last_reported
