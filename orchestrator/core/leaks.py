"""Devices that are held for nobody: by what has ended, or by Ray alone. The controller gets back what it can; `doctor`
tells of the rest. Pure.

Where a message between two of Ray's processes is lost, Ray may go on reserving resources of a node for a placement
group that is gone. Only a new raylet knows better: such a node is started again as soon as nothing runs there.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from orchestrator.core.attempts import MARGIN_S
from orchestrator.core.commands import RestartNode
from orchestrator.core.draft import Control, Draft
from orchestrator.core.messages import Now
from orchestrator.core.nodes import Node, Withheld
from orchestrator.core.states import TERMINAL

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


def restart(draft: Draft) -> None:
    """Nodes that Ray has lost count of, once nothing runs there."""
    for name, node in draft.nodes.items():
        kept = _certain(node, draft.now.s)
        if kept and _is_idle(draft, node) and not (node.restarts(draft.now.s) or node.lost):
            draft.nodes[name] = replace(node, withheld=replace(kept, restarted_s=draft.now.s))
            said = f"Ray reserved resources of node {name} for nobody: it was started again"
            draft.command(RestartNode(name, node.ray_id, said))
            draft.change(changed=True)


def _certain(node: Node, now_s: float) -> Withheld | None:
    kept = node.withheld
    return kept if kept and kept.told_s - kept.since_s >= CERTAIN_S and now_s - kept.told_s < APART_S else None


def _is_idle(draft: Draft, node: Node) -> bool:
    return not draft.on_node(node.name) and not any(s.phase != "ended" for s in node.strangers.values())


def found(control: Control, now: Now) -> list[Leak]:
    return [*_of_ended_jobs(control, now), *_not_released(control, now), *_withheld(control, now)]


def _of_ended_jobs(control: Control, now: Now) -> list[Leak]:
    """Jobs that ended while their attempt still has devices: past its lease it has no right to run."""
    leaks = []
    for live in control.lives.values():
        record = control.records[live.job]
        job, asked = record.job, [a.at_s for a in live.asked.values() if a.how == "cancel"]
        kept_s = now.s - min(asked, default=now.s if live.cancelled_s is None else live.cancelled_s)
        if job.state in TERMINAL and kept_s > job.recovery.lease_s + MARGIN_S + SOON_S:
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
    kept = [(node.name, kept) for node in control.nodes.values() if (kept := _certain(node, now.s))]
    why = "resources of the node have been reserved for nobody for {:.0f} s at least"
    return [Leak("Ray", why.format(now.s - known.since_s), node) for node, known in kept]
