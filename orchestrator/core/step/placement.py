"""Place jobs: make a snapshot of the controller's state, plan, and apply the plan. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from orchestrator.core.attempt import attempt_stops, epoch_guard
from orchestrator.core.attempt.expiry import lease_s
from orchestrator.core.controller import nodes
from orchestrator.core.controller.attempts import AttemptState, attempt_of, node_of
from orchestrator.core.controller.draft import Control, Draft
from orchestrator.core.controller.messages import Now, Tick
from orchestrator.core.explanation.explain import impossible_reason
from orchestrator.core.fleet import autoscaler
from orchestrator.core.jobs import fold
from orchestrator.core.model import Devices, Job, Plan, Snapshot
from orchestrator.core.plan.options.fit import PERMANENT_RULES, refusal_reason, vendor_change_reason
from orchestrator.core.plan.plan import plan
from orchestrator.core.states import WAITING
from orchestrator.core.step.launch_orders import NodeShare, launch_command
from orchestrator.core.throughput import Throughput
from orchestrator.core.timing import LEASE_MARGIN_S

MAX_STARTS = 100
"""Maximum starts per plan: with 1,000 nodes each takes some milliseconds, during which replies of agents wait."""

PLAN_EVERY_S = 2.0
"""Seconds between plans without a change: pauses end, nodes become silent, measurements arrive."""

MIN_INTERVAL_S = 0.05
"""Shortest time between two plans in seconds."""

FREE_JOBS = 200
INTERVAL_PER_JOB_S = 50e-6
"""Added to MIN_INTERVAL_S for each open job beyond FREE_JOBS, because planning takes microseconds per job and blocks
the thread.
"""

NODE_RETURN_S = 300.0
"""Seconds in which a lost node may return: this server restarts its own nodes within seconds, an autoscaler or the
machine's owner in minutes.
"""


def snapshot(control: Control, now: Now, throughput: Throughput) -> Snapshot:
    """Return the input of a plan: the present state."""
    allocated = nodes.allocations(control.records[job] for job in control.attempts)
    devices = [d for node in control.nodes.values() for d in devices_of(node, control, now.s, allocated)]
    return Snapshot(
        now.s,
        tuple(devices),
        waiting_jobs(control, now.s),
        fold.running(control.records[job] for job in control.attempts),
        replace(throughput, step_rates=control.step_rates),
        control.paused_until_s,
        now.wall_s,
        control.scaling.startable,
        control.scaling.notes,
        control.progress,
        control.history,
        control.since,
        control.policy.name,
        control.memory,
        control.policy.ageing_s,
        control.projects,
        control.policy.explore_device_s,
    )


def devices_of(node: nodes.Node, control: Control, now_s: float, allocated: nodes.Allocations) -> list[Devices]:
    if node.facts is None:
        return []
    reason = nodes.closed_reason(node, control.drained, now_s)
    return nodes.device_groups(node.facts, node.name, reason, control.prices.get(node.facts.pool, 0.0), allocated)


def waiting_jobs(control: Control, now_s: float) -> tuple[Job, ...]:
    """Return the jobs to place, without those that may have a running attempt: two never run at the same time."""
    blocked = possibly_running(control, now_s)
    storages = {node.name: node.facts.storage_id for node in control.nodes.values() if node.facts}
    return tuple(
        _with_checkpoint_storages(record, storages)
        for record in control.records.values()
        if record.job.state in WAITING and record.job.id not in control.attempts and record.job.id not in blocked
    )


def _with_checkpoint_storages(record: fold.Record, storages: Mapping[str, str]) -> Job:
    """Return the job with the existing storages that hold its newest checkpoint."""
    if record.checkpoint is None:
        return record.job
    copies = [copy["node"] for copy in record.replicas if copy["step"] == record.checkpoint.get("step")]
    storage_ids = {storages.get(node, "") for node in (record.checkpoint.get("node", ""), *copies)}
    return replace(record.job, checkpoint_in=tuple(sorted(storage_ids - {""})))


def possibly_running(control: Control, now_s: float) -> dict[str, str]:
    """Return a reason for each job with an attempt that does not count, but may still run."""
    return epoch_guard.guard_reasons(control, now_s) | running_untracked(control, now_s)


def running_untracked(control: Control, now_s: float) -> dict[str, str]:
    """Return a reason for each job with an untracked attempt that has not ended according to its node.

    On a silent node it counts as ended after one lease, if a fence is above it (nothing renews the lease then) or if
    the log contains its end. In the latter case that is the normal lease even for `on_disconnect: wait`, because the
    node has reported its end under another name.
    """
    reasons: dict[str, str] = {}
    for node in control.nodes.values():
        for key, untracked in node.untracked.items():
            job, epoch, _ = key.rsplit(".", 2)
            if untracked.phase == "ended" or (record := control.records.get(job)) is None:
                continue
            has_ended = any(a.epoch == int(epoch) and a.ended_s is not None for a in record.attempts)
            is_superseded = has_ended or int(epoch) < max(record.job.epoch, control.raised_fences.get(job, 0))
            renewed_s = record.job.recovery.lease_s if has_ended else lease_s(record.job)
            if not is_superseded or node.silent_s(now_s) <= renewed_s + LEASE_MARGIN_S:
                reasons[job] = f"waits until attempt {job}.{epoch}, which was replaced, has ended on node {node.name}"
    return reasons


def plan_and_apply(draft: Draft, tick: Tick) -> None:
    """Make a plan if one is due and apply it: place, preempt, refuse jobs that can never run, and request nodes."""
    autoscaler.update_groups(draft, tick)
    now, before = draft.now, draft.finish()
    file_changed = (tick.policy, tick.projects) != (before.policy, before.projects)
    changed = before.needs_plan or tick.problem != before.problem or file_changed
    fields = {"prices": tick.prices, "history": tick.history, "policy": tick.policy, "projects": tick.projects}
    draft.change(problem=tick.problem, needs_plan=changed, **fields)
    if tick.policy != before.policy:
        draft.change(memory=replace(before.memory, fault=""))
    control = draft.finish()
    if not control.is_joined or now.s < _due_s(control, changed):
        return
    current = snapshot(control, now, tick.throughput)
    full = now.s - control.full_plan_s >= control.policy.every_s
    next_plan = _with_reasons(control, plan(current, full=full, most=MAX_STARTS), now)
    draft.change(plan=next_plan, memory=next_plan.memory, planned_s=now.s, needs_plan=False)
    if full:
        draft.change(full_plan_s=now.s)
    if not tick.problem:
        _apply(draft, next_plan, {d.id: d for d in current.devices})
        _fail_impossible(draft, current, tick)
        next_plan = autoscaler.review(draft, current, next_plan, tick)
        draft.change(plan=next_plan, planned_s=now.s)


def _with_reasons(control: Control, next_plan: Plan, now: Now) -> Plan:
    """Return the plan with reasons for the waiting jobs that are not part of it."""
    blocked = possibly_running(control, now.s).items()
    reasons = {job: {(0, ""): why} for job, why in blocked if control.records[job].job.state in WAITING}
    return replace(next_plan, why_not=next_plan.why_not | reasons) if reasons else next_plan


def _due_s(control: Control, changed: bool) -> float:
    """Return when the next plan is due."""
    pause_ends_s = [until_s for until_s in control.paused_until_s.values() if until_s > control.planned_s]
    extra_jobs = max(0, len(control.records) - FREE_JOBS)
    rested_s = control.planned_s + min(MIN_INTERVAL_S + extra_jobs * INTERVAL_PER_JOB_S, PLAN_EVERY_S)
    if changed:
        return rested_s
    return max(rested_s, min([control.planned_s + PLAN_EVERY_S, *pause_ends_s]))


def _apply(draft: Draft, next_plan: Plan, devices: dict[str, Devices]) -> None:
    for start in next_plan.start:
        have = devices[start.allocation[0][0]]
        job = draft.records[start.job].job
        if not draft.record(fold.placed(job, start, have.kind, have.pool, draft.now.wall_s)):
            _start_attempt(draft, start.job, devices)
    for preempt in next_plan.preempt:
        victim = draft.records[preempt.victim].job
        if not draft.event(victim.id, "preempted", victim.epoch, reason=preempt.reason, by=preempt.job):
            attempt_stops.review(draft, victim.id)


def _start_attempt(draft: Draft, job: str, devices: dict[str, Devices]) -> None:
    record = draft.records[job]
    attempt = attempt_of(record, draft.now.s, AttemptState.LAUNCHING)
    assert attempt is not None
    draft.paused_until_s.pop(job)
    draft.add_attempt(attempt)
    draft.pending_releases.pop(attempt.allocation_name)  # the new attempt uses the reservation of the previous one
    shares = []
    for part in attempt.parts:
        node = draft.nodes[node_of(part.devices_id)]
        assert node.facts is not None
        shares.append(NodeShare(devices[part.devices_id], part.numbers, node.facts, node.cpus))
    draft.command(launch_command(record, shares, fence_is_ours=draft.raised_fences.get(job) == record.job.epoch))


def _fail_impossible(draft: Draft, current: Snapshot, tick: Tick) -> None:
    """End jobs with `on_disconnect: stop` that no device can ever run; other such jobs keep waiting.

    Nothing is decided while the devices of a node that exists or may return are unknown.
    """
    now_s, existing = draft.now.s, draft.nodes.values()
    lost_for_good = {node.name for node in existing if node.lost_reason and now_s - node.lost_s > NODE_RETURN_S}
    is_incomplete = any(node.facts is None and node.name not in lost_for_good for node in existing)
    rejoining = tick.recorded if now_s - draft.control.joined_s <= NODE_RETURN_S else frozenset()
    if (
        is_incomplete
        or (tick.expected | rejoining) - {node.name for node in existing if not node.lost_reason}
        or not existing
    ):
        return
    usable = [have for have in current.possible if have.node not in lost_for_good]
    lost_devices = [have for have in current.devices if have.node in lost_for_good]
    for job in current.jobs:
        if (
            job.recovery.on_disconnect == "stop"
            and job.id not in draft.attempts
            and (why := _impossible_reason(job, usable))
        ):
            why = "; ".join(filter(None, (why, _lost_nodes_note(job, lost_devices), "recovery.on_disconnect is stop")))
            draft.event(job.id, "refused", job.epoch, reason=why)


def _impossible_reason(job: Job, usable: list[Devices]) -> str:
    if why := impossible_reason(job, usable):
        return why
    if impossible_reason(job, [have for have in usable if not vendor_change_reason(job, have)]):
        return f"no {job.backend} devices are left; the job last ran on them, and recovery.cross_vendor is false"
    return ""


def _lost_nodes_note(job: Job, lost_devices: Iterable[Devices]) -> str:
    suitable = {
        have.node
        for have in lost_devices
        if not all(refusal_reason(want, have, PERMANENT_RULES) for want in job.candidates)
    }
    nodes_lost = ", ".join(sorted(suitable)[:3])
    return f"{nodes_lost} could run it, but was lost more than {NODE_RETURN_S / 60:.0f} minutes ago" if suitable else ""
