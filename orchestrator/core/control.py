"""The controller as a function: `step(control, message, now)` gives the next control, the events to store, and the
commands to carry out once they are stored. No thread, no clock, no Ray: the server, the simulator and the tests of
faults run the same function.

| file                      | decides                                                                            |
|---------------------------|------------------------------------------------------------------------------------|
| membership.py             | which nodes there are, whose agent is started again, which take no work            |
| attempt_reports.py        | what agents tell of attempts                                                       |
| suspicion.py              | when a silent part of an attempt may be taken for ended                            |
| epoch_guard.py            | when a job may be placed of which an unknown attempt may run                       |
| attempt_stops.py          | who is asked to stop, and how an attempt ends                                      |
| placement.py              | where waiting jobs run (plan.py), and what their nodes are told (launch_orders.py) |
| autoscaler.py             | which nodes an autoscaler is to start (demand.py), and which may be taken          |
| user_requests.py          | what users ask of jobs; node_requests.py: of nodes                                 |
| progress.py               | how far open jobs are, as they report                                              |
| checkpoint_replication.py | which checkpoint is copied to another machine, to which one, and when              |
| leaked_devices.py         | which devices are held for nobody, and which node is started again for that        |
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
"""A longer time between two ticks was not lived through: the process was stopped, or the machine slept."""


class Step(NamedTuple):
    control: Control
    events: tuple[Event, ...]
    commands: tuple[Command, ...]


def step(control: Control, message: Message, now: Now) -> Step:
    """One message at a time. The same arguments give the same answer."""
    draft = Draft(control, now)
    HANDLERS[type(message)](draft, message)
    return Step(draft.ended(), tuple(draft.events), tuple(draft.commands))


def heard(control: Control, beats: Iterable[m.Heartbeat], now: Now) -> Step:
    """As `step` with each of them, one after the other: their tables are copied once, and not by each."""
    draft = Draft(control, now)
    for beat in beats:
        attempt_reports.heard(draft, beat)
    return Step(draft.ended(), tuple(draft.events), tuple(draft.commands))


def resumed(
    records: Iterable[Record],
    drained: Mapping[str, str],
    told_at: Callable[[str, int], int],
    now: Now,
    reported: Mapping[str, Mapping[str, Any]] | None = None,
) -> Control:
    """The state of a controller that starts: open jobs from the store, their attempts as nodes will tell of them, and
    by job what was `reported` last.
    """
    draft, newest = Draft(Control(drained=dict(drained)), now), reported or {}
    for record in records:
        draft.keep(record)
        if record.attempts and record.job.id in draft.records:
            draft.progress[record.job.id] = progress.of_record(record, newest.get(record.job.id, {}), now.s)
        if (live := live_of(record, now.s)) is not None:
            draft.begin(replace(live, told_at=told_at(live.job, live.epoch), fence_known=False))
    return draft.ended()


def submitted(draft: Draft, told: m.Submitted) -> None:
    for record in told.records:
        if record.job.id not in draft.records:
            draft.keep(record)
            draft.change(changed=True)


def released(draft: Draft, told: m.Released) -> None:
    """What was reserved anew since that was asked for is to go back as well."""
    kept = draft.releasing.get(told.place)
    if kept is not None and not told.error and told.asked_s >= kept.since_s:
        draft.releasing.pop(told.place)


def fenced(draft: Draft, told: m.Fenced) -> None:
    (suspicion if told.job in draft.lives else epoch_guard).fenced(draft, told)


def joined(draft: Draft, told: m.Joined) -> None:
    membership.joined(draft, told)
    suspicion.rejoined(draft)
    epoch_guard.begin_again(draft)
    autoscaler.forgotten(draft)


def reserved(draft: Draft, told: m.Reserved) -> None:
    """What is reserved in our name for an attempt that is over goes back."""
    living = {live.place for live in draft.lives.values()}
    for place in sorted(told.places - living - draft.releasing.now.keys()):
        draft.releasing[place] = Kept(f"reservation {place}", draft.now.s)


def tick(draft: Draft, told: m.Tick) -> None:
    _lived_through(draft)
    if draft.control.joined:
        membership.look(draft)
        attempt_reports.look(draft)
        suspicion.look(draft)
        epoch_guard.look(draft)
        leaked_devices.look(draft, told)
        checkpoint_replication.look(draft)
    placement.place(draft, told)
    if draft.control.joined:
        attempt_stops.release(draft)


def _lived_through(draft: Draft) -> None:
    """While we were stopped nobody could be heard: that is no silence of the nodes."""
    gap_s = draft.now.s - draft.control.ticked_s
    draft.change(ticked_s=draft.now.s)
    if gap_s > AWAY_S and draft.control.ticked_s:
        for node in draft.nodes.values():
            heard_s, lost_s = (min(draft.now.s, at_s + gap_s) for at_s in (node.heard_s, node.lost_s))
            draft.nodes[node.name] = replace(node, heard_s=heard_s, lost_s=lost_s)
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
    """What to ask of a node: how far each attempt there has told, and the phase it is known to be in."""
    cursors: dict[str, int] = {}
    known: dict[str, str] = {}
    for job in control.on_node.get(node, ()):
        live = control.lives[job]
        for rank, part in enumerate(live.parts):
            if part.node == node:
                cursors[live.part_key(rank)] = part.cursor
                known[live.part_key(rank)] = part.phase
    for key, stranger in control.nodes[node].strangers.items() if node in control.nodes else ():
        cursors[key], known[key] = stranger.cursor, stranger.phase
    return cursors, known
