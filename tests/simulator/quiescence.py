"""Checks after all faults: everything must end within a bounded time, and a new job must succeed."""

from typing import TYPE_CHECKING

from orchestrator.core.controller import messages as m
from orchestrator.core.model import Candidate, Job, Recovery
from orchestrator.core.states import TERMINAL, State
from tests.simulator.users import Script

if TYPE_CHECKING:
    from tests.simulator.world import Simulation

MAX_SETTLE_S = 600.0
"""Virtual seconds from the last fault until everything has settled, in addition to the time that jobs need."""
JOB_OVERHEAD_S = 15.0
"""Seconds that a job needs in addition to its work: placement, failure, grace, work repeated after a checkpoint."""
MAX_PROBE_S = 120.0
"""Limit for a new job. A job that waits for devices that Ray reserves for nothing detects them within a minute."""
CHECK_S = 5.0
MAX_EVENTS = 400_000


def run_until_quiet(world: "Simulation") -> None:
    """Run until everything has settled.

    Raises Broken for the first law of L1 to L7 that does not hold in time.
    """
    world.users.active = False
    server = world.server
    world.clock.run(world.now_s + 40.0, MAX_EVENTS)
    for name in sorted({*server.control.nodes, *server.control.drained}):
        server.receive(m.ResumeRequested(name))
    _give_up_waiting(world)
    until_s = world.now_s + MAX_SETTLE_S + _work_s(world)
    while (problem := find_unsettled(world)) and world.now_s < until_s:
        world.clock.run(world.now_s + CHECK_S, MAX_EVENTS)
        _give_up_waiting(world)
    if problem:
        world.checks.broken(*problem)
    check_ends(world)
    probe(world)


def _give_up_waiting(world: "Simulation") -> None:
    """Cancel jobs that would wait for a node that never comes back, or a day for an unknown attempt."""
    removed, control = {machine.label for machine in world.machines if machine.gone}, world.server.control
    waiting = {attempt.job for attempt in control.attempts.values() if removed & {part.node for part in attempt.parts}}
    for job in sorted(waiting | control.epoch_guards.keys()):
        if _recovery(world, job).on_disconnect == "wait" and control.records[job].job.state not in TERMINAL:
            world.users.cancel(job)


def _recovery(world: "Simulation", job: str) -> Recovery:
    return world.store.records[job].job.recovery


def _work_s(world: "Simulation") -> float:
    """Seconds of work if all open jobs ran one after another, as gangs that need the same node do."""
    return sum(world.scripts[record.job.id].work_s + JOB_OVERHEAD_S for record in world.store.open())


def find_unsettled(world: "Simulation") -> tuple[str, str, str] | None:
    """Find the first problem: (law, job, sentence); None if everything has settled."""
    control = world.server.control
    if lost := sorted(world.acknowledged - world.store.records.keys()):
        return "I6", lost[0], "was acknowledged but is not in the store"
    for record in control.records.values():
        job = record.job
        if job.state in TERMINAL or job.id in control.attempts:
            return "L1", job.id, f"is {job.state} and still holds an attempt: {control.attempts.get(job.id)}"
        if not control.plan.why_not.get(job.id):
            return "L1", job.id, f"is {job.state} without a reason: {control.plan}"
    for attempt in world.running_attempts():
        return "L3", attempt.job, f"{attempt.key} still runs on {attempt.machine.label}"
    return _find_leftovers(world) or _find_closed_node(world) or _find_idle(world)


def _find_leftovers(world: "Simulation") -> tuple[str, str, str] | None:
    control = world.server.control
    if control.pending_releases or world.ray.reserved:
        return "L3", "", f"reservations are left: {dict(control.pending_releases)}, {world.ray.reserved}"
    if world.checks.allocation:
        return "I1", "", f"devices are still allocated: {world.checks.allocation}"
    for machine in world.remaining_machines():
        for key, attempt in machine.attempts.items():
            if attempt.job in world.store.records:
                return "L3", attempt.job, f"{machine.label} still keeps {key}"
    return None


def _find_closed_node(world: "Simulation") -> tuple[str, str, str] | None:
    from orchestrator.core.controller import nodes

    control, now_s = world.server.control, world.server.now().s
    for machine in world.remaining_machines():
        node = control.nodes.get(machine.label)
        if node is None or not node.ready or (reason := nodes.closed_reason(node, control.drained, now_s)):
            return "L4", "", f"node {machine.label} takes no work: {reason if node and node.ready else node}"
    return None


def _find_idle(world: "Simulation") -> tuple[str, str, str] | None:
    """Find a waiting job that the idle fleet could run."""
    for record in world.server.control.records.values():
        job = record.job
        for want in job.candidates:
            able = [
                (machine.pool, machine.count if want.exclusive else 0)
                for machine in world.remaining_machines()
                if machine.could_run(job, want)
            ]
            if any(able.count(island) >= want.nodes for island in able):
                return "L7", job.id, f"waits although {want} fits: {world.server.control.plan.why_not.get(job.id)}"
    return None


def check_ends(world: "Simulation") -> None:
    """Check that each job has ended as its script says, within its budgets."""
    for record in world.store.records.values():
        job, script = record.job, world.scripts[record.job.id]
        if job.state is State.FAILED and not (script.may_fail or job.id in world.unreadable or job.id in world.moved):
            world.checks.broken("L2", job.id, f"failed, but its code did not: {record.reason}")
        limits = ((job.restarts, job.recovery.max_restarts), (job.interruptions, job.recovery.max_interruptions))
        if any(0 <= limit < used for used, limit in limits):
            world.checks.broken("L6", job.id, f"used (restarts, limit), (interruptions, limit) {limits}")
        if job.state in TERMINAL and any(a.ended_s is None or not a.outcome for a in record.attempts):
            world.checks.broken("I15", job.id, f"has ended, but an attempt has not: {record.attempts}")
    folded = world.store.refold()
    if folded != world.store.records:
        world.checks.broken("I8", "", "a fold of the full log differs from the store's records")


def probe(world: "Simulation") -> None:
    """Run a small job on each kind of device."""
    for kind in sorted({machine.kind for machine in world.remaining_machines()}):
        job = Job(f"probe-{kind}", "probe", "run", (Candidate((kind,)),))
        world.scripts[job.id], world.processes[job.id] = Script(1.0), []
        world.users.send(job)
        until_s = world.now_s + MAX_PROBE_S
        while world.now_s < until_s and _state(world, job.id) not in TERMINAL:
            world.clock.run(world.now_s + 1.0, MAX_EVENTS)
        if _state(world, job.id) is not State.SUCCEEDED:
            world.checks.broken("P7", job.id, f"is {_state(world, job.id)} after {MAX_PROBE_S:.0f} s")


def _state(world: "Simulation", job: str) -> State | None:
    record = world.store.records.get(job)
    return record.job.state if record else None
