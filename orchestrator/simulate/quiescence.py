"""After the faults have stopped: everything comes to its end within a bounded time, and a new job succeeds."""

from typing import TYPE_CHECKING

from orchestrator.core import messages as m
from orchestrator.core.model import Candidate, Job, Recovery
from orchestrator.core.states import TERMINAL, State
from orchestrator.simulate.users import Script

if TYPE_CHECKING:
    from orchestrator.simulate.world import Simulation

BOUND_S = 600.0
"""Virtual time from the last fault until all is settled, beside what jobs need for themselves."""
AROUND_S = 15.0
"""What a job needs beside its work: a placement, a failure, a grace, and the work since a checkpoint once more."""
PROBE_S = 120.0
"""A device that Ray reserves for nobody is found out by the first job that waits for it, within a minute."""
LOOK_S = 5.0
MOST = 400_000


def run_until_quiet(world: "Simulation") -> None:
    """Raises Broken with the first of L1 to L7 that does not hold in time."""
    world.users.active = False
    server = world.server
    world.clock.run(world.now_s + 40.0, MOST)
    for name in sorted({*server.control.nodes, *server.control.drained}):
        server.receive(m.ResumeAsked(name))
    _give_up_waiting(world)
    until_s = world.now_s + BOUND_S + _work_s(world)
    while (left := unsettled(world)) and world.now_s < until_s:
        world.clock.run(world.now_s + LOOK_S, MOST)
        _give_up_waiting(world)
    if left:
        world.checks.broken(*left)
    ends(world)
    probe(world)


def _give_up_waiting(world: "Simulation") -> None:
    """Users cancel jobs that are to wait for a node that never comes, or a day for an attempt that nobody knows."""
    gone, control = {machine.label for machine in world.machines if machine.gone}, world.server.control
    waiting = {live.job for live in control.lives.values() if gone & {part.node for part in live.parts}}
    for job in sorted(waiting | control.overtaken.keys()):
        if _recovery(world, job).on_disconnect == "wait" and control.records[job].job.state not in TERMINAL:
            world.users.cancel(job)


def _recovery(world: "Simulation", job: str) -> Recovery:
    return world.store.records[job].job.recovery


def _work_s(world: "Simulation") -> float:
    """As if all open jobs ran one after the other: gangs that need the same node do."""
    return sum(world.scripts[record.job.id].work_s + AROUND_S for record in world.store.open())


def unsettled(world: "Simulation") -> tuple[str, str, str] | None:
    """The first thing that is not as it has to be: which law, which job, and what."""
    control = world.server.control
    if lost := sorted(world.acked - world.store.records.keys()):
        return "I6", lost[0], "was acknowledged and is not in the store"
    for record in control.records.values():
        job = record.job
        if job.state in TERMINAL or job.id in control.lives:
            return "L1", job.id, f"is {job.state} and still holds an attempt: {control.lives.get(job.id)}"
        if not control.plan.why_not.get(job.id):
            return "L1", job.id, f"is {job.state} and nothing says why: {control.plan}"
    for attempt in world.alive():
        return "L3", attempt.job, f"{attempt.key} still runs on {attempt.machine.label}"
    return _left(world) or _nodes(world) or _idle(world)


def _left(world: "Simulation") -> tuple[str, str, str] | None:
    control = world.server.control
    if control.releasing or world.ray.reserved:
        return "L3", "", f"reservations are left: {dict(control.releasing)}, {world.ray.reserved}"
    if world.checks.leases:
        return "I1", "", f"devices are still leased: {world.checks.leases}"
    for machine in world.there():
        for key, attempt in machine.attempts.items():
            if attempt.job in world.store.records:
                return "L3", attempt.job, f"{machine.label} still keeps {key}"
    return None


def _nodes(world: "Simulation") -> tuple[str, str, str] | None:
    from orchestrator.core import nodes

    control, now_s = world.server.control, world.server.now().s
    for machine in world.there():
        node = control.nodes.get(machine.label)
        if node is None or not node.ready or (why := nodes.closed(node, control.drained, now_s)):
            return "L4", "", f"node {machine.label} takes no work: {why if node and node.ready else node}"
    return None


def _idle(world: "Simulation") -> tuple[str, str, str] | None:
    """Nothing runs, so a job that waits must be one that this fleet cannot run."""
    for record in world.server.control.records.values():
        job = record.job
        for want in job.candidates:
            able = [
                (machine.pool, machine.count if want.exclusive else 0)
                for machine in world.there()
                if machine.could_run(job, want)
            ]
            if any(able.count(island) >= want.nodes for island in able):
                return "L7", job.id, f"waits although {want} fits: {world.server.control.plan.why_not.get(job.id)}"
    return None


def ends(world: "Simulation") -> None:
    """Each job has the end that its script gives it, within its budgets."""
    for record in world.store.records.values():
        job, script = record.job, world.scripts[record.job.id]
        if job.state is State.FAILED and not (script.may_fail or job.id in world.spoiled or job.id in world.moved):
            world.checks.broken("L2", job.id, f"failed, which its code did not: {record.reason}")
        limits = ((job.restarts, job.recovery.max_restarts), (job.interruptions, job.recovery.max_interruptions))
        if any(0 <= limit < used for used, limit in limits):
            world.checks.broken("L6", job.id, f"used (restarts, limit), (interruptions, limit) {limits}")
        if job.state in TERMINAL and any(a.ended_s is None or not a.outcome for a in record.attempts):
            world.checks.broken("I15", job.id, f"has ended with an attempt that has not: {record.attempts}")
    folded = world.store.refold()
    if folded != world.store.records:
        world.checks.broken("I8", "", "a fold of the whole log differs from what was kept up to date")


def probe(world: "Simulation") -> None:
    """One small job on each machine's kind."""
    for kind in sorted({machine.kind for machine in world.there()}):
        job = Job(f"probe-{kind}", "probe", "run", (Candidate((kind,)),))
        world.scripts[job.id], world.processes[job.id] = Script(1.0), []
        world.users.send(job)
        until_s = world.now_s + PROBE_S
        while world.now_s < until_s and _state(world, job.id) not in TERMINAL:
            world.clock.run(world.now_s + 1.0, MOST)
        if _state(world, job.id) is not State.SUCCEEDED:
            world.checks.broken("P7", job.id, f"is {_state(world, job.id)} after {PROBE_S:.0f} s")


def _state(world: "Simulation", job: str) -> State | None:
    record = world.store.records.get(job)
    return record.job.state if record else None
