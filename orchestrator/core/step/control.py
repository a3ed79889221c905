"""The controller as a pure function, used by the server, the simulator and the fault tests.

`step(control, message, now)` returns the next state, the events to store, the commands to execute once these are
stored, and the changed states of attempts. Messages are numbered, and that number is the `cause` of what follows from
them. No threads, no clock, no Ray.

| file                       | decides                                                                              |
|----------------------------|--------------------------------------------------------------------------------------|
| fleet/membership.py        | which nodes exist, whose agent is restarted, which nodes take no jobs                |
| attempt/attempt_reports.py | how messages of agents change attempts                                               |
| attempt/suspicion.py       | attempts with parts on silent nodes: fenced off, until their nodes respond           |
| attempt/expiry.py          | when it is certain that no process of a fenced part runs                             |
| attempt/epoch_guard.py     | when a job may be placed that may have a running attempt missing from the log        |
| attempt/attempt_stops.py   | which attempts are stopped, and how an attempt ends                                  |
| placement.py               | where waiting jobs run (plan/plan.py), and orders for their nodes (launch_orders.py) |
| fleet/autoscaler.py        | which nodes an autoscaler should start (fleet/demand.py) or may remove               |
| user_requests.py           | how users' requests change jobs; fleet/node_requests.py: nodes                       |
| jobs/progress.py           | the progress of open jobs, from the reports of their ranks                           |
| jobs/job_rates.py          | the rates of these jobs that others of their workload use                            |
| checkpoint_replication.py  | which checkpoint is copied to another machine, to which one, and when                |
| fleet/leaked_devices.py    | which devices are leaked, and which node is restarted to free them                   |
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from orchestrator.core.attempt import attempt_reports, attempt_stops, epoch_guard, suspicion
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.attempts import AttemptState, Transition, attempt_of
from orchestrator.core.controller.commands import Command
from orchestrator.core.controller.draft import Control, Draft, PendingRelease
from orchestrator.core.controller.messages import Message, Now
from orchestrator.core.fleet import autoscaler, leaked_devices, membership, node_requests
from orchestrator.core.jobs import job_rates, progress
from orchestrator.core.jobs.fold import Record
from orchestrator.core.model import Event
from orchestrator.core.step import checkpoint_replication, placement, user_requests
from orchestrator.core.timing import CLOCK_GAP_S


class Step(NamedTuple):
    control: Control
    events: tuple[Event, ...]
    commands: tuple[Command, ...]
    transitions: tuple[Transition, ...]


def step(control: Control, message: Message, now: Now) -> Step:
    """Handle one message. Deterministic: equal arguments give equal results."""
    draft = Draft(control, now)
    draft.begin_message()
    HANDLERS[type(message)](draft, message)
    return _step_of(draft)


def step_replies(control: Control, beats: Iterable[m.Heartbeat], now: Now) -> Step:
    """Apply heartbeats in order, like `step` for each of them, but copy the tables only once."""
    draft = Draft(control, now)
    for heartbeat in beats:
        draft.begin_message()
        attempt_reports.apply_reply(draft, heartbeat)
    return _step_of(draft)


def _step_of(draft: Draft) -> Step:
    return Step(draft.finish(), tuple(draft.events), tuple(draft.commands), tuple(draft.transitions))


def control_from_log(
    records: Iterable[Record],
    drained: Mapping[str, str],
    last_position: Callable[[str, int], int],
    now: Now,
    last_reported: Mapping[str, Mapping[str, Any]] | None = None,
    metrics: Iterable[tuple[Record, Iterable[Mapping[str, Any]]]] = (),
) -> Control:
    """Return the state of a controller that starts, from the open jobs in the store.

    `last_position` returns the position of the last stored event of an attempt (job, epoch). `last_reported`: last
    report by job. `metrics`: the newest of each job that may have rates for others, also ended ones, oldest first.
    """
    draft, last_metrics = Draft(Control(drained=dict(drained)), now), last_reported or {}
    for record in records:
        draft.put_record(record)
        if record.attempts and record.job.id in draft.records:
            draft.progress[record.job.id] = progress.progress_of(record, last_metrics.get(record.job.id, {}), now.s)
        if (attempt := attempt_of(record, now.s, AttemptState.ADOPTED)) is not None:
            draft.add_attempt(replace(attempt, last_event_at=last_position(attempt.job, attempt.epoch)))
    for record, rows in metrics:
        job_rates.restore_rates(draft, record, rows)
    return draft.finish()


def submitted(draft: Draft, message: m.Submitted) -> None:
    for record in message.records:
        if record.job.id not in draft.records:
            draft.put_record(record)
            draft.change(needs_plan=True)


def release_answered(draft: Draft, message: m.ReleaseAnswered) -> None:
    """Handle the reply to a release. It does not count for a reservation made after the request was sent."""
    pending = draft.pending_releases.get(message.reservation_name)
    if pending is not None and not message.error and message.requested_s >= pending.since_s:
        draft.pending_releases.pop(message.reservation_name)


def fence_answered(draft: Draft, message: m.FenceAnswered) -> None:
    (suspicion if message.job in draft.attempts else epoch_guard).fence_answered(draft, message)


def cluster_joined(draft: Draft, message: m.ClusterJoined) -> None:
    membership.cluster_joined(draft, message)
    suspicion.rejoined(draft)
    epoch_guard.restart_guards(draft)
    autoscaler.reset_after_join(draft)


def reservations_listed(draft: Draft, message: m.ReservationsListed) -> None:
    """Release reservations that belong to no live attempt."""
    live_names = {attempt.allocation_name for attempt in draft.attempts.values()}
    for name in sorted(message.names - live_names - draft.pending_releases.current.keys()):
        draft.pending_releases[name] = PendingRelease(f"reservation {name}", draft.now.s)


def tick(draft: Draft, message: m.Tick) -> None:
    _skip_clock_gap(draft)
    if draft.control.is_joined:
        membership.review(draft)
        attempt_reports.retry_untracked(draft)
        suspicion.review(draft)
        epoch_guard.review(draft)
        leaked_devices.restart_stuck_nodes(draft, message)
        checkpoint_replication.start_copies(draft)
    placement.plan_and_apply(draft, message)
    if draft.control.is_joined:
        attempt_stops.retry_releases(draft)


def _skip_clock_gap(draft: Draft) -> None:
    """Shift contact times after a gap between ticks: while this process was stopped, it received no replies."""
    gap_s = draft.now.s - draft.control.ticked_s
    draft.change(ticked_s=draft.now.s)
    if gap_s > CLOCK_GAP_S and draft.control.ticked_s:
        for node in draft.nodes.values():
            contact_s, lost_s = (min(draft.now.s, at_s + gap_s) for at_s in (node.last_contact_s, node.lost_s))
            draft.nodes[node.name] = replace(node, last_contact_s=contact_s, lost_s=lost_s)
        autoscaler.exclude_gap(draft, gap_s)


HANDLERS: dict[type, Callable[[Draft, Any], None]] = {
    m.Submitted: submitted,
    m.CancelRequested: user_requests.cancel,
    m.MigrateRequested: user_requests.migrate,
    m.RenameRequested: user_requests.rename,
    m.DrainRequested: node_requests.drain,
    m.ResumeRequested: node_requests.resume,
    m.RemoveRequested: node_requests.remove,
    m.ClusterJoined: cluster_joined,
    m.ClusterLeft: membership.cluster_left,
    m.NodesListed: membership.nodes_listed,
    m.AgentStarted: membership.agent_started,
    m.AgentDied: membership.agent_died,
    m.AgentFailed: membership.agent_failed,
    m.Heartbeat: attempt_reports.apply_reply,
    m.PartUnreadable: attempt_reports.mark_unreadable,
    m.Launched: attempt_stops.launched,
    m.LaunchFailed: attempt_stops.launch_failed,
    m.StopAnswered: attempt_stops.stop_answered,
    m.FenceAnswered: fence_answered,
    m.ReleaseAnswered: release_answered,
    m.ReservationsListed: reservations_listed,
    m.Replicated: checkpoint_replication.replicated,
    m.NodeNotRestarted: leaked_devices.not_restarted,
    m.NodeRequestAnswered: autoscaler.request_answered,
    m.Tick: tick,
}


def poll_arguments(control: Control, node: str) -> tuple[dict[str, int], dict[str, str]]:
    """Return the arguments of a poll of a node: the cursor and last recorded phase of each attempt there, by key."""
    cursors: dict[str, int] = {}
    phases: dict[str, str] = {}
    for job in control.on_node.get(node, ()):
        attempt = control.attempts[job]
        for rank, part in enumerate(attempt.parts):
            if part.node == node:
                cursors[attempt.part_key(rank)] = part.cursor
                phases[attempt.part_key(rank)] = part.phase
    for key, untracked in control.nodes[node].untracked.items() if node in control.nodes else ():
        cursors[key], phases[key] = untracked.cursor, untracked.phase
    return cursors, phases
