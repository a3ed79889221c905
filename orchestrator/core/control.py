"""The controller as a pure function, used by the server, the simulator and the fault tests.

`step(control, message, now)` returns the next state, the events to store, and the commands to execute once these are
stored. No threads, no clock, no Ray.

| file                      | decides                                                                            |
|---------------------------|------------------------------------------------------------------------------------|
| membership.py             | which nodes exist, whose agent is restarted, which nodes take no jobs              |
| attempt_reports.py        | how reports of agents change attempts                                              |
| suspicion.py              | when a part of an attempt on a silent node counts as ended                         |
| epoch_guard.py            | when a job may be placed that may have a running attempt missing from the log      |
| attempt_stops.py          | which attempts are stopped, and how an attempt ends                                |
| placement.py              | where waiting jobs run (plan.py), and the orders for their nodes (launch_orders.py)|
| autoscaler.py             | which nodes an autoscaler should start (demand.py) or may remove                   |
| user_requests.py          | how users' requests change jobs; node_requests.py: nodes                           |
| progress.py               | the progress of open jobs, from their reports                                      |
| checkpoint_replication.py | which checkpoint is copied to another machine, to which one, and when              |
| leaked_devices.py         | which devices are leaked, and which node is restarted to free them                 |
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from orchestrator.core import (
    attempt_reports,
    attempt_stops,
    autoscaler,
    checkpoint_replication,
    epoch_guard,
    leaked_devices,
    membership,
    node_requests,
    placement,
    progress,
    suspicion,
    user_requests,
)
from orchestrator.core import messages as m
from orchestrator.core.attempts import live_of
from orchestrator.core.commands import Command
from orchestrator.core.draft import Control, Draft, Kept
from orchestrator.core.fold import Record
from orchestrator.core.messages import Message, Now
from orchestrator.core.model import Event

AWAY_S = 2.0
"""Seconds between two ticks above which this process was stopped in between, or the machine slept."""


class Step(NamedTuple):
    control: Control
    events: tuple[Event, ...]
    commands: tuple[Command, ...]


def step(control: Control, message: Message, now: Now) -> Step:
    """Handle one message. Deterministic: equal arguments give equal results."""
    draft = Draft(control, now)
    HANDLERS[type(message)](draft, message)
    return Step(draft.finish(), tuple(draft.events), tuple(draft.commands))


def heard(control: Control, beats: Iterable[m.Heartbeat], now: Now) -> Step:
    """Apply heartbeats in order, like `step` for each of them, but copy the tables only once."""
    draft = Draft(control, now)
    for heartbeat in beats:
        attempt_reports.heard(draft, heartbeat)
    return Step(draft.finish(), tuple(draft.events), tuple(draft.commands))


def resumed(
    records: Iterable[Record],
    drained: Mapping[str, str],
    last_position: Callable[[str, int], int],
    now: Now,
    reported: Mapping[str, Mapping[str, Any]] | None = None,
) -> Control:
    """Return the state of a controller that starts, from the open jobs in the store.

    `last_position` returns the position of the last stored event of an attempt (job, epoch). `reported`: last report
    by job.
    """
    draft, last_reports = Draft(Control(drained=dict(drained)), now), reported or {}
    for record in records:
        draft.put_record(record)
        if record.attempts and record.job.id in draft.records:
            draft.progress[record.job.id] = progress.of_record(record, last_reports.get(record.job.id, {}), now.s)
        if (attempt := live_of(record, now.s)) is not None:
            draft.add_attempt(replace(attempt, last_event_at=last_position(attempt.job, attempt.epoch), is_fence_known=False))
    return draft.finish()


def submitted(draft: Draft, message: m.Submitted) -> None:
    for record in message.records:
        if record.job.id not in draft.records:
            draft.put_record(record)
            draft.change(changed=True)


def released(draft: Draft, message: m.Released) -> None:
    """Handle the reply to a release. It does not count for a reservation made after the request was sent."""
    pending = draft.pending_releases.get(message.place)
    if pending is not None and not message.error and message.requested_s >= pending.since_s:
        draft.pending_releases.pop(message.place)


def fenced(draft: Draft, message: m.Fenced) -> None:
    (suspicion if message.job in draft.attempts else epoch_guard).fenced(draft, message)


def joined(draft: Draft, message: m.Joined) -> None:
    membership.joined(draft, message)
    suspicion.rejoined(draft)
    epoch_guard.begin_again(draft)
    autoscaler.forgotten(draft)


def reserved(draft: Draft, message: m.Reserved) -> None:
    """Release reservations that belong to no live attempt."""
    live_places = {attempt.allocation_name for attempt in draft.attempts.values()}
    for place in sorted(message.places - live_places - draft.pending_releases.current.keys()):
        draft.pending_releases[place] = Kept(f"reservation {place}", draft.now.s)


def tick(draft: Draft, message: m.Tick) -> None:
    _lived_through(draft)
    if draft.control.is_joined:
        membership.look(draft)
        attempt_reports.look(draft)
        suspicion.look(draft)
        epoch_guard.look(draft)
        leaked_devices.look(draft, message)
        checkpoint_replication.look(draft)
    placement.place(draft, message)
    if draft.control.is_joined:
        attempt_stops.release(draft)


def _lived_through(draft: Draft) -> None:
    """Shift contact times after a gap between ticks: while this process was stopped, no node could be heard."""
    gap_s = draft.now.s - draft.control.ticked_s
    draft.change(ticked_s=draft.now.s)
    if gap_s > AWAY_S and draft.control.ticked_s:
        for node in draft.nodes.values():
            contact_s, lost_s = (min(draft.now.s, at_s + gap_s) for at_s in (node.last_contact_s, node.lost_s))
            draft.nodes[node.name] = replace(node, last_contact_s=contact_s, lost_s=lost_s)
        autoscaler.slept(draft, gap_s)


HANDLERS: dict[type, Callable[[Draft, Any], None]] = {
    m.Submitted: submitted,
    m.CancelAsked: user_requests.cancel,
    m.MigrateAsked: user_requests.migrate,
    m.DrainAsked: node_requests.drain,
    m.ResumeAsked: node_requests.resume,
    m.RemoveAsked: node_requests.remove,
    m.Joined: joined,
    m.Parted: membership.parted,
    m.NodesSeen: membership.seen,
    m.AgentMade: membership.agent_made,
    m.AgentDied: membership.agent_died,
    m.AgentFailed: membership.agent_failed,
    m.Heartbeat: attempt_reports.heard,
    m.Spoiled: attempt_reports.spoiled,
    m.Launched: attempt_stops.launched,
    m.LaunchFailed: attempt_stops.launch_failed,
    m.Stopped: attempt_stops.stopped,
    m.Fenced: fenced,
    m.Released: released,
    m.Reserved: reserved,
    m.Replicated: checkpoint_replication.replicated,
    m.NotRestarted: leaked_devices.not_restarted,
    m.NodesAsked: autoscaler.asked,
    m.Tick: tick,
}


def watch_of(control: Control, node: str) -> tuple[dict[str, int], dict[str, str]]:
    """Return the arguments of a poll of a node: the cursor and last known phase of each attempt there, by key."""
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
