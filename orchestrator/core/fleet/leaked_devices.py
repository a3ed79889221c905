"""Find leaked devices: held by an ended attempt, or reserved by Ray for a placement group that is gone. Pure.

The controller frees what it can; `polyfleet doctor` shows the rest. If a message between two of Ray's processes is
lost, Ray may keep resources of a node reserved for ever. Only a new raylet frees them, so such a node is restarted as
soon as nothing runs there.
"""

from dataclasses import dataclass, replace

from orchestrator.core.controller.attempts import AttemptState
from orchestrator.core.controller.commands import RestartNode
from orchestrator.core.controller.draft import Control, Draft
from orchestrator.core.controller.messages import NodeNotRestarted, Now, Tick
from orchestrator.core.controller.nodes import Node, StuckReservation
from orchestrator.core.states import TERMINAL
from orchestrator.core.timing import LEASE_MARGIN_S, RELEASE_LATE_S, STUCK_CERTAIN_S, STUCK_EXPIRES_S


@dataclass(frozen=True, slots=True)
class Leak:
    """Holder of leaked devices (an attempt, a reservation, or Ray on `node`), and the evidence."""

    holder: str
    reason: str
    node: str = ""


def restart_stuck_nodes(draft: Draft, tick: Tick) -> None:
    """Restart nodes with stuck reservations once nothing runs there. Called once per tick."""
    for name, node in draft.nodes.items():
        if node.stuck is None or node.is_restarting(draft.now.s):
            continue
        if draft.now.s - node.stuck.last_failed_s >= STUCK_EXPIRES_S:
            draft.nodes[name] = replace(node, stuck=None)
        elif _is_certain(node.stuck) and tick.restarts_nodes and not tick.problem and name in tick.expected:
            _restart(draft, node, node.stuck)


def not_restarted(draft: Draft, message: NodeNotRestarted) -> None:
    node = draft.nodes.get(message.node)
    if node is not None and node.ray_id == message.ray_id:
        draft.nodes[node.name] = replace(node, stuck=None)
        draft.change(needs_plan=True)


def _restart(draft: Draft, node: Node, reservation: StuckReservation) -> None:
    """Restart an idle node, else close it if only launches are left there, so that no new ones begin."""
    if _is_idle(draft, node):
        updated = replace(reservation, restarted_s=draft.now.s)
        message = f"node {node.name} was restarted: Ray still had its devices reserved, although nothing used them"
        draft.command(RestartNode(node.name, node.ray_id, message))
    else:
        updated = replace(reservation, is_draining=_only_launches(draft, node.name))
    if updated != reservation:
        draft.nodes[node.name] = replace(node, stuck=updated)
        draft.change(needs_plan=True)


def _only_launches(draft: Draft, node: str) -> bool:
    return all(draft.attempts[job].state is AttemptState.LAUNCHING for job in draft.on_node(node))


def _is_certain(reservation: StuckReservation) -> bool:
    return reservation.last_failed_s - reservation.since_s >= STUCK_CERTAIN_S


def _is_idle(draft: Draft, node: Node) -> bool:
    return not draft.on_node(node.name) and not any(s.phase != "ended" for s in node.untracked.values())


def list_leaks(control: Control, now: Now) -> list[Leak]:
    return [*_of_ended_jobs(control, now), *_not_released(control, now), *_stuck(control, now)]


def _of_ended_jobs(control: Control, now: Now) -> list[Leak]:
    """Return ended jobs whose attempt still holds devices although its lease has expired."""
    leaks = []
    for attempt in control.attempts.values():
        record = control.records[attempt.job]
        job = record.job
        held_s = 0.0 if attempt.cancelled_s is None else now.s - attempt.cancelled_s
        if job.state in TERMINAL and held_s > job.recovery.lease_s + LEASE_MARGIN_S + RELEASE_LATE_S:
            devices = ", ".join(f"{part.devices_id} {list(part.numbers)}" for part in attempt.parts)
            since = f"cancelled {held_s:.0f} s ago; its launch has not ended"
            if attempt.state is not AttemptState.LAUNCHING:
                since = f"although its stop was requested {held_s:.0f} s ago"
            leaks.append(Leak(attempt.key, f"the job is {job.state}, and its attempt still holds {devices}, {since}"))
    return leaks


def _not_released(control: Control, now: Now) -> list[Leak]:
    overdue = [
        (name, pending)
        for name, pending in control.pending_releases.items()
        if now.s - pending.since_s > RELEASE_LATE_S
    ]
    return [
        Leak(pending.attempt, f"Ray has not released its reservation for {now.s - pending.since_s:.0f} s")
        for _, pending in overdue
    ]


def _stuck(control: Control, now: Now) -> list[Leak]:
    rows = [(node.name, node.stuck) for node in control.nodes.values() if not node.lost_reason]
    stuck = [
        (name, row) for name, row in rows if row and _is_certain(row) and now.s - row.last_failed_s < STUCK_EXPIRES_S
    ]
    why = "devices of the node have been reserved for at least {:.0f} s although nothing uses them"
    return [Leak("Ray", why.format(now.s - reservation.since_s), node) for node, reservation in stuck]
