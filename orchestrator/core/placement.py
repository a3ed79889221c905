"""From the controller's state to the next placements: the snapshot, the plan, and what follows from it. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from orchestrator.core import attempt_stops, autoscaler, epoch_guard, fold, nodes
from orchestrator.core.attempts import live_of, node_of
from orchestrator.core.draft import Control, Draft
from orchestrator.core.explain import never
from orchestrator.core.fit import EVER, other_vendor, refusal
from orchestrator.core.launch_orders import Share, launch
from orchestrator.core.messages import Now, Tick
from orchestrator.core.model import Devices, Job, Plan, Snapshot
from orchestrator.core.plan import plan
from orchestrator.core.states import WAITING
from orchestrator.core.suspicion import lease_s
from orchestrator.core.throughput import Throughput
from orchestrator.core.timing import LEASE_MARGIN_S

STARTS_AT_ONCE = 100
"""Of one plan: with a thousand nodes a start takes some milliseconds to choose, and agents wait for answers."""

PLAN_EVERY_S = 2.0
"""Also without any news: pauses end, nodes become silent, measurements come in."""

AGAIN_S = 0.05
"""Between two plans, whatever happens meanwhile."""

FEW = 200
REST_PER_JOB_S = 50e-6
"""Between two plans, for each open job beyond a few: planning takes microseconds of each, and others wait meanwhile."""

RETURNS_S = 300.0
"""So long a lost node may come back: this server starts one of its own again within seconds, an autoscaler or whoever
owns the machine in minutes.
"""


def snapshot(control: Control, now: Now, throughput: Throughput) -> Snapshot:
    """What a plan is made from, as it is now."""
    held = nodes.leased(control.records[job] for job in control.lives)
    devices = [d for node in control.nodes.values() for d in devices_of(node, control, now.s, held)]
    return Snapshot(
        now.s,
        tuple(devices),
        waiting(control, now.s),
        fold.running(control.records[job] for job in control.lives),
        throughput,
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


def devices_of(node: nodes.Node, control: Control, now_s: float, held: nodes.Leased) -> list[Devices]:
    if node.facts is None:
        return []
    reason = nodes.closed(node, control.drained, now_s)
    return nodes.groups(node.facts, node.name, reason, control.prices.get(node.facts.pool, 0.0), held)


def waiting(control: Control, now_s: float) -> tuple[Job, ...]:
    """Jobs to be placed. One of which an attempt may still run somewhere is not: two never run at once."""
    held = maybe_running(control, now_s)
    storages = {node.name: node.facts.storage_id for node in control.nodes.values() if node.facts}
    return tuple(
        _near(record, storages)
        for record in control.records.values()
        if record.job.state in WAITING and record.job.id not in control.lives and record.job.id not in held
    )


def _near(record: fold.Record, storages: Mapping[str, str]) -> Job:
    """The job, with the storages that hold its newest checkpoint, as far as these are known now."""
    if record.checkpoint is None:
        return record.job
    copies = [copy["node"] for copy in record.replicas if copy["step"] == record.checkpoint.get("step")]
    there = {storages.get(node, "") for node in (record.checkpoint.get("node", ""), *copies)}
    return replace(record.job, checkpoint_in=tuple(sorted(there - {""})))


def maybe_running(control: Control, now_s: float) -> dict[str, str]:
    """Jobs of which an attempt that does not count may still run, each with the sentence for it."""
    return epoch_guard.waits(control, now_s) | running_elsewhere(control, now_s)


def running_elsewhere(control: Control, now_s: float) -> dict[str, str]:
    """Jobs of which nodes tell an attempt that does not count, and that has not ended: with the sentence for it. Of a
    node that is silent it has ended after a lease, where a fence stands above it, for nothing renews that, or where the
    log has its end. The latter is a common lease also of a job that waits for its nodes: its end was told, under
    another name of that node.
    """
    found: dict[str, str] = {}
    for node in control.nodes.values():
        for key, stranger in node.strangers.items():
            job, epoch, _ = key.rsplit(".", 2)
            if stranger.phase == "ended" or (record := control.records.get(job)) is None:
                continue
            ended = any(a.epoch == int(epoch) and a.ended_s is not None for a in record.attempts)
            past = ended or int(epoch) < max(record.job.epoch, control.raised.get(job, 0))
            renewed_s = record.job.recovery.lease_s if ended else lease_s(record.job)
            if not past or node.silent_s(now_s) <= renewed_s + LEASE_MARGIN_S:
                found[job] = f"waits for its attempt {job}.{epoch} on node {node.name} to end, which was replaced"
    return found


def place(draft: Draft, tick: Tick) -> None:
    """Plan where there is news, or time has passed; then place, preempt, refuse what can never run, and ask for nodes
    that may be started.
    """
    autoscaler.told(draft, tick)
    now, before = draft.now, draft.ended()
    file_changed = (tick.policy, tick.projects) != (before.policy, before.projects)
    changed = before.changed or tick.trouble != before.trouble or file_changed
    told = {"prices": tick.prices, "history": tick.history, "policy": tick.policy, "projects": tick.projects}
    draft.change(trouble=tick.trouble, changed=changed, **told)
    if tick.policy != before.policy:
        draft.change(memory=replace(before.memory, fault=""))
    control = draft.ended()
    if not control.joined or now.s < _due_s(control, changed):
        return
    seen = snapshot(control, now, tick.throughput)
    full = now.s - control.decided_s >= control.policy.every_s
    decided = _with_reasons(control, plan(seen, full=full, most=STARTS_AT_ONCE), now)
    draft.change(plan=decided, memory=decided.memory, planned_s=now.s, changed=False)
    if full:
        draft.change(decided_s=now.s)
    if not tick.trouble:
        _apply(draft, decided, {d.id: d for d in seen.devices})
        _refuse(draft, seen, tick)
        decided = autoscaler.look(draft, seen, decided, tick)
        draft.change(plan=decided, planned_s=now.s)


def _with_reasons(control: Control, decided: Plan, now: Now) -> Plan:
    """Also of jobs that are in no plan."""
    held = maybe_running(control, now.s).items()
    told = {job: {(0, ""): why} for job, why in held if control.records[job].job.state in WAITING}
    return replace(decided, why_not=decided.why_not | told) if told else decided


def _due_s(control: Control, changed: bool) -> float:
    """When the next plan is to be made, as things stand."""
    ended = [until_s for until_s in control.paused_until_s.values() if until_s > control.planned_s]
    many = max(0, len(control.records) - FEW)
    rested_s = control.planned_s + min(AGAIN_S + many * REST_PER_JOB_S, PLAN_EVERY_S)
    if changed:
        return rested_s
    return max(rested_s, min([control.planned_s + PLAN_EVERY_S, *ended]))


def _apply(draft: Draft, decided: Plan, devices: dict[str, Devices]) -> None:
    for start in decided.start:
        have = devices[start.leases[0][0]]
        job = draft.records[start.job].job
        if not draft.record(fold.placed(job, start, have.kind, have.pool, draft.now.wall_s)):
            _begin(draft, start.job, devices)
    for preempt in decided.preempt:
        victim = draft.records[preempt.victim].job
        if not draft.event(victim.id, "preempted", victim.epoch, reason=preempt.reason, by=preempt.job):
            attempt_stops.look_after(draft, victim.id)


def _begin(draft: Draft, job: str, devices: dict[str, Devices]) -> None:
    record = draft.records[job]
    live = live_of(record, draft.now.s, launching=True)
    assert live is not None
    draft.paused_until_s.pop(job)
    draft.begin(live)
    draft.releasing.pop(live.place)  # the next attempt takes over what this one had reserved
    shares = []
    for part in live.parts:
        node = draft.nodes[node_of(part.devices_id)]
        assert node.facts is not None
        shares.append(Share(devices[part.devices_id], part.numbers, node.facts, node.cpus))
    draft.command(launch(record, shares, fenced=draft.raised.get(job) == record.job.epoch))


def _refuse(draft: Draft, seen: Snapshot, tick: Tick) -> None:
    """A waiting job that nothing here could ever run waits on, and says for what, unless its user wants it to end.
    Nothing is known of that while a node that is there, or that may come back, has not told what it has.
    """
    now_s, known = draft.now.s, draft.nodes.values()
    gone = {node.name for node in known if node.lost and now_s - node.lost_s > RETURNS_S}
    untold = any(node.facts is None and node.name not in gone for node in known)
    joins = tick.recorded if now_s - draft.control.joined_s <= RETURNS_S else frozenset()
    if untold or (tick.expected | joins) - {node.name for node in known if not node.lost} or not known:
        return
    here = [have for have in seen.possible if have.node not in gone]
    left = [have for have in seen.devices if have.node in gone]
    for job in seen.jobs:
        if job.recovery.on_disconnect == "stop" and job.id not in draft.lives and (why := _impossible(job, here)):
            why = "; ".join(filter(None, (why, _could_use(job, left), "recovery.on_disconnect is stop")))
            draft.event(job.id, "refused", job.epoch, reason=why)


def _impossible(job: Job, here: list[Devices]) -> str:
    if why := never(job, here):
        return why
    if never(job, [have for have in here if not other_vendor(job, have)]):
        return f"no {job.backend} devices are left for it; it last ran on {job.backend}, recovery.cross_vendor is false"
    return ""


def _could_use(job: Job, left: Iterable[Devices]) -> str:
    able = {have.node for have in left if not all(refusal(want, have, EVER) for want in job.candidates)}
    nodes_lost = ", ".join(sorted(able)[:3])
    return f"it could use {nodes_lost}, lost for more than {RETURNS_S / 60:.0f} minutes" if able else ""
