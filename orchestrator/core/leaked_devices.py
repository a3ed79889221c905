"""Devices that are held for nobody: by what has ended, or by Ray alone. The controller gets back what it can; `doctor`
tells of the rest. Pure.

Where a message between two of Ray's processes is lost, Ray may go on reserving resources of a node for a placement
group that is gone. Only a new raylet knows better: such a node is started again as soon as nothing runs there.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from orchestrator.core.commands import RestartNode
from orchestrator.core.draft import Control, Draft
from orchestrator.core.messages import NotRestarted, Now, Tick
from orchestrator.core.nodes import Node, Withheld
from orchestrator.core.states import TERMINAL
from orchestrator.core.timing import LEASE_MARGIN_S

SOON_S = 10.0
"""What ends in the ordinary way has been put away by then."""

CERTAIN_S = 30.0
"""From the first launch that waited in vain for what nobody holds to the last: then Ray is not just late."""

APART_S = 180.0
"""A job is tried again within a minute and some seconds: what is told so long after the last is something new."""


@dataclass(frozen=True, slots=True)
class Leak:
    """What holds devices that it should not (an attempt, a reservation, or Ray on the node of that name), and why that
    is known.
    """

    holder: str
    reason: str
    node: str = ""


def told(draft: Draft, names: Iterable[str]) -> None:
    """A launch waited in vain for resources of these nodes, which nobody holds whom Ray knows."""
    for name in names:
        if (node := draft.nodes.get(name)) is not None:
            known = node.withheld or Withheld(draft.now.s, draft.now.s)
            since_s = known.since_s if draft.now.s - known.told_s < APART_S else draft.now.s
            draft.nodes[name] = replace(node, withheld=replace(known, since_s=since_s, told_s=draft.now.s))


def look(draft: Draft, tick: Tick) -> None:
    """Once per tick: nodes of which Ray has lost count are started again once nothing runs there."""
    for name, node in draft.nodes.items():
        if node.withheld is None or node.restarts(draft.now.s):
            continue
        if draft.now.s - node.withheld.told_s >= APART_S:
            draft.nodes[name] = replace(node, withheld=None)
        elif _is_certain(node.withheld) and tick.repairs and not tick.trouble and name in tick.expected:
            _restart(draft, node, node.withheld)


def not_restarted(draft: Draft, told: NotRestarted) -> None:
    node = draft.nodes.get(told.node)
    if node is not None and node.ray_id == told.ray_id:
        draft.nodes[node.name] = replace(node, withheld=None)
        draft.change(changed=True)


def _restart(draft: Draft, node: Node, kept: Withheld) -> None:
    """Launches that wait in vain there are none of its work, but others follow them unless the node is closed."""
    if _is_idle(draft, node):
        after = replace(kept, restarted_s=draft.now.s)
        said = f"node {node.name} was restarted: Ray kept its devices reserved although nothing used them"
        draft.command(RestartNode(node.name, node.ray_id, said))
    else:
        after = replace(kept, closing=all(draft.lives[job].launching for job in draft.on_node(node.name)))
    if after != kept:
        draft.nodes[node.name] = replace(node, withheld=after)
        draft.change(changed=True)


def _is_certain(kept: Withheld) -> bool:
    return kept.told_s - kept.since_s >= CERTAIN_S


def _is_idle(draft: Draft, node: Node) -> bool:
    return not draft.on_node(node.name) and not any(s.phase != "ended" for s in node.strangers.values())


def found(control: Control, now: Now) -> list[Leak]:
    return [*_of_ended_jobs(control, now), *_not_released(control, now), *_withheld(control, now)]


def _of_ended_jobs(control: Control, now: Now) -> list[Leak]:
    """Jobs that ended while their attempt still has devices: past its lease it has no right to run."""
    leaks = []
    for live in control.lives.values():
        record = control.records[live.job]
        job = record.job
        kept_s = 0.0 if live.cancelled_s is None else now.s - live.cancelled_s
        if job.state in TERMINAL and kept_s > job.recovery.lease_s + LEASE_MARGIN_S + SOON_S:
            devices = ", ".join(f"{part.devices_id} {list(part.numbers)}" for part in live.parts)
            since = f"cancelled {kept_s:.0f} s ago; its launch has not ended"
            if not live.launching:
                since = f"asked to stop {kept_s:.0f} s ago"
            leaks.append(Leak(live.key, f"the job is {job.state}, and its attempt still holds {devices}, {since}"))
    return leaks


def _not_released(control: Control, now: Now) -> list[Leak]:
    late = [(place, kept) for place, kept in control.releasing.items() if now.s - kept.since_s > SOON_S]
    return [Leak(kept.attempt, f"Ray has kept its reservation for {now.s - kept.since_s:.0f} s") for _, kept in late]


def _withheld(control: Control, now: Now) -> list[Leak]:
    nodes = [(node.name, node.withheld) for node in control.nodes.values() if not node.lost]
    kept = [(name, kept) for name, kept in nodes if kept and _is_certain(kept) and now.s - kept.told_s < APART_S]
    why = "devices of the node have been reserved for at least {:.0f} s although nothing uses them"
    return [Leak("Ray", why.format(now.s - known.since_s), node) for node, known in kept]
