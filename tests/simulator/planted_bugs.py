"""Bugs that are put into the controller on purpose, to prove that the simulator finds them.

One at a time, each replaces a function of the core by one that was wrong once, or could be. `FAULTS`: faults under
which a bug shows.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from orchestrator.core.attempt import (
    attempt_outcome,
    attempt_reports,
    attempt_stops,
    epoch_guard,
    expiry,
    stop_modes,
    suspicion,
    transitions,
)
from orchestrator.core.controller import messages as m
from orchestrator.core.controller import nodes
from orchestrator.core.controller.attempts import AttemptPart, AttemptState, LiveAttempt
from orchestrator.core.controller.draft import Draft
from orchestrator.core.fleet import leaked_devices, membership
from orchestrator.core.jobs.fold import apply
from orchestrator.core.model import Job, Project
from orchestrator.core.plan.options.gang import PlacementOption
from orchestrator.core.plan.options.quota import Quota
from orchestrator.core.plan.options.quota_use import QuotaUse
from orchestrator.core.states import State
from orchestrator.core.step import control, launch_orders, placement
from tests.simulator.faults import Faults
from tests.simulator.machine import SimulatedNode
from tests.simulator.planted_reply_bugs import BUGS, Patch
from tests.simulator.planted_setting_bugs import BUGS as SETTING_BUGS
from tests.simulator.ray import SimulatedRay
from tests.simulator.server import SimulatedServer


def first_cause_forgotten() -> list[Patch]:
    """The broken connection of another part outranks the lost node that caused it."""
    original, order = attempt_outcome._cause_rank, {2: 4, 3: 4, 4: 2}

    def cause_rank(part: AttemptPart, first_failed_s: float | None) -> int:
        rank = original(part, first_failed_s)
        return order.get(rank, rank)

    return [(attempt_outcome, "_cause_rank", cause_rank)]


def cancel_loses_its_release() -> list[Patch]:
    """If a cancel is stored while an attempt ends, `released` is never written."""
    original = attempt_stops._conclude

    def conclude(draft: Draft, attempt: LiveAttempt) -> None:
        if draft.records[attempt.job].job.state is not State.CANCELLED:
            original(draft, attempt)

    return [(attempt_stops, "_conclude", conclude)]


def launch_replies_dropped() -> list[Patch]:
    """The result of a launch is lost if it arrives while no fleet is joined."""

    def only_if_joined(handler: Callable[[Draft, Any], None]) -> Callable[[Draft, Any], None]:
        return lambda draft, message: handler(draft, message) if draft.control.is_joined else None

    handlers = {
        m.Launched: only_if_joined(attempt_stops.launched),
        m.LaunchFailed: only_if_joined(attempt_stops.launch_failed),
    }
    return [(control, "HANDLERS", control.HANDLERS | handlers)]


def silence_never_missed() -> list[Patch]:
    """The controller waits for ever for a silent agent."""
    return [(suspicion, "NODE_SILENT_S", 1e9), (membership, "AGENT_HUNG_S", 1e9), (nodes, "NODE_SILENT_S", 1e9)]


def no_wait_after_the_fence() -> list[Patch]:
    """A part counts as ended as soon as its fence is raised, before its lease has expired."""
    return [(expiry, "PROOFS", (lambda draft, attempt, rank: True,))]


def other_parts_lose_their_grace() -> list[Patch]:
    """In a preempted gang, the first node that has stopped causes the others to be cancelled."""
    row = (stop_modes._has_preempted, "cancel")
    return [(stop_modes, "STOP_MODES", (row, *stop_modes.STOP_MODES))]


def submitted_twice() -> list[Patch]:
    """A repeated submission reaches the controller, which starts its job again."""
    original = SimulatedServer.answered

    def answered(server: SimulatedServer, job: Job) -> bool:
        first = next((event for event in server.store.log if (event.job, event.event) == (job.id, "submitted")), None)
        if record := apply(None, first) if first else None:
            server.receive(m.Submitted((record,)))
        return original(server, job)

    def submitted(draft: Draft, message: m.Submitted) -> None:
        for record in message.records:
            draft.records[record.job.id] = record
            draft.change(needs_plan=True)

    return [(SimulatedServer, "answered", answered), (control, "HANDLERS", control.HANDLERS | {m.Submitted: submitted})]


def gang_in_part() -> list[Patch]:
    """A gang is placed on one node fewer than requested."""
    original = PlacementOption.allocation.fget  # type: ignore[attr-defined]
    return [(PlacementOption, "allocation", property(lambda option: original(option)[: max(1, len(option.nodes) - 1)]))]


def fence_not_raised() -> list[Patch]:
    """An attempt counts as fenced, but the fence was not written."""

    def unfenced(draft: Draft, attempt: LiveAttempt) -> None:
        draft.raised_fences[attempt.job] = attempt.epoch + 1

    rows = {(state, "suspected"): (AttemptState.FENCED, "raise") for state in AttemptState}
    return [
        (transitions, "ATTEMPT", transitions.ATTEMPT | rows),
        (transitions, "SENDERS", {**transitions.SENDERS, "raise": unfenced}),
    ]


def epochs_used_again() -> list[Patch]:
    """After a restore of an older backup, epochs continue from its log, so that some are used again."""

    def launch(*arguments: Any, **_: Any) -> Any:
        return launch_orders.launch_command(*arguments, fence_is_ours=True)

    return [
        (Job, "next_epoch", property(lambda job: job.epoch + 1)),
        (placement, "launch_command", launch),
        (epoch_guard, "guard_reasons", lambda control, now_s: {}),
    ]


def lease_stretched() -> list[Patch]:
    """A lease is renewed from the arrival of a request, however long the request was delayed."""
    return [(SimulatedNode, "lease_from", lambda machine, reply_number: machine.world.now_s)]


def devices_allocated_twice() -> list[Patch]:
    """Devices of a running attempt count as free in the next plan."""
    return [(nodes, "allocations", lambda records: {})]


def reservations_not_released() -> list[Patch]:
    """Reservations of an ended attempt are never released."""
    return [(attempt_stops, "retry_releases", lambda draft: None)]


def old_lists_believed() -> list[Patch]:
    """A node is used before it has reported what runs there."""
    original = nodes.closed_reason

    def closed(node: nodes.Node, drained: Any, now_s: float) -> str:
        return original(replace(node, list_requested_s=node.list_requested_s or 0.0, untracked={}), drained, now_s)

    return [(nodes, "closed_reason", closed), (attempt_reports, "retry_untracked", lambda draft: None)]


def stuck_for_ever() -> list[Patch]:
    """Devices that Ray keeps reserved for nothing are never freed."""
    return [(attempt_stops, "note_stuck", lambda draft, names: None)]


def node_restarted_amid_work() -> list[Patch]:
    """A node of which Ray has lost count is restarted at once, even if something runs there."""
    return [
        (leaked_devices, "_is_idle", lambda draft, node: True),
        (SimulatedRay, "has_stuck_resources", lambda ray, ray_id: True),
    ]


def quota_ignored() -> list[Patch]:
    """A project gets devices beyond its quota, and may not borrow."""
    return [(Quota, "_limits", lambda quota, job, kind: [])]


def all_counts_as_borrowed() -> list[Patch]:
    """Devices within the quota of a project are reclaimed for another one."""
    return [(QuotaUse, "borrowers", lambda use: {holder.job for holder in use._holders})]


PROJECTS = {
    "quota_ignored": {"a": Project({"cpu": 1, "nvidia": 1}), "b": Project({"tpu": 1})},
    "all_counts_as_borrowed": dict.fromkeys("ab", Project({"cpu": 9, "nvidia": 9, "tpu": 9})),
}
"""Projects of the worlds for bugs in quotas."""

PLANTED: dict[str, Callable[[], list[Patch]]] = {
    made.__name__: made
    for made in (
        *(first_cause_forgotten, cancel_loses_its_release, launch_replies_dropped, silence_never_missed),
        *(no_wait_after_the_fence, other_parts_lose_their_grace, submitted_twice, gang_in_part, fence_not_raised),
        *(epochs_used_again, lease_stretched, devices_allocated_twice, reservations_not_released, old_lists_believed),
        *(stuck_for_ever, node_restarted_amid_work, quota_ignored, all_counts_as_borrowed),
        *(*BUGS, *SETTING_BUGS),
    )
}

FAULTS: dict[str, Callable[[], Faults]] = {
    "first_cause_forgotten": lambda: Faults(power_lost_s=15.0),
    "cancel_loses_its_release": Faults,
    "launch_replies_dropped": lambda: Faults(head_lost_s=40.0, slow=0.3, cut_both_s=20.0),
    "silence_never_missed": lambda: Faults(agent_stopped_s=20.0),
    "no_wait_after_the_fence": lambda: Faults(cut_both_s=10.0),
    "other_parts_lose_their_grace": lambda: Faults(notice_s=60.0),
    "submitted_twice": Faults,
    "gang_in_part": Faults,
    "fence_not_raised": lambda: Faults(cut_in_s=8.0),
    "epochs_used_again": lambda: Faults(older_backup_s=60.0, power_lost_s=60.0),
    "lease_stretched": lambda: Faults(cut_out_s=8.0),
    "devices_allocated_twice": Faults,
    "reservations_not_released": Faults,
    "old_lists_believed": lambda: Faults(older_backup_s=60.0, server_killed_s=30.0),
    "stuck_for_ever": lambda: Faults(ray_is_stuck_s=60.0),
    "node_restarted_amid_work": lambda: Faults(ray_is_stuck_s=60.0),
    "quota_ignored": Faults,
    "all_counts_as_borrowed": Faults,
    "cut_off_for_ever": lambda: Faults(cut_out_s=6.0),
    "own_fence_mistaken_for_anothers": lambda: Faults(ray_away_s=30.0, cut_both_s=10.0),
    "late_replies_believed": lambda: Faults(doubled=0.2, slow=0.2),
    "ended_parts_doubted": lambda: Faults(slow=0.3, lost=0.1, cut_out_s=15.0),
    "stops_restart": lambda: Faults(attempt_frozen_s=5.0),
    "lowering_requested_once": lambda: Faults(cut_out_s=4.0, fences_fail=0.5),
    "any_release_believed": lambda: Faults(doubled=0.8, ray_away_s=8.0),
    "user_error_mistaken_for_a_lost_node": lambda: Faults(start_refused=0.5),
    "users_error_tried_again": lambda: Faults(secret_missing=1.0),
    "conflict_mistaken_for_a_newer_attempt": lambda: Faults(upload_conflicts=0.2),
    "cancel_without_effect": Faults,
    "drained_nodes_used": Faults,
    "budgets_ignored": Faults,
    "old_events_applied_again": lambda: Faults(doubled=0.5, slow=0.3),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Apply a bug while the context is active; "" for none."""
    with ExitStack() as stack:
        for owner, attribute, changed in PLANTED[name]() if name else ():
            stack.enter_context(patch.object(owner, attribute, changed))
        yield
