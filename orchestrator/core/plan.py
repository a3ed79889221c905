"""The decision: a snapshot in, a plan out. No clock, no I/O, no chance, and no order but the policy's."""

from orchestrator.core import wait
from orchestrator.core.fit import enough_free, other_vendor
from orchestrator.core.gang import Island, Option, option, too_few_nodes
from orchestrator.core.model import Devices, Job, Plan, Preempt, Snapshot, Start
from orchestrator.core.policies import Policy
from orchestrator.core.policies.fifo import fifo
from orchestrator.core.room import Room
from orchestrator.core.score import reason, score
from orchestrator.core.throughput import Rates

Reasons = dict[tuple[int, str], str]

NO_DEVICES = "no node of the fleet has told its devices yet"


def plan(snapshot: Snapshot, policy: Policy = fifo, most: int | None = None) -> Plan:
    """What to start and whom to ask to stop, and why not the rest. Jobs are served in the policy's order.

    After `most` starts the others wait for the next plan: whoever makes plans has other things to do as well.
    """
    room = Room(snapshot)
    start: list[Start] = []
    preempt: list[Preempt] = []
    why_not: dict[str, Reasons] = {}
    blocked: dict[tuple[object, ...], tuple[int, Reasons]] = {}
    for job in policy(snapshot):
        if len(start) == most:
            break
        pause_s = snapshot.paused_until_s.get(job.id, 0.0) - snapshot.now_s
        if pause_s > 0:
            sentence = f"is tried again in {pause_s:.1f} s, after {_troubles(job)}"
            why_not[job.id] = {(index, ""): sentence for index in range(len(job.candidates))}
            continue
        shape = room.shape(job)
        before, reasons = blocked.get(shape, (-1, {}))
        if before == room.version:  # one like it was blocked, and nothing has changed since
            why_not[job.id] = reasons
            continue
        before = room.version
        options, reasons = survey(job, room)
        if options:
            rates = Rates.of(job, options, snapshot.throughput)
            best = min(options, key=lambda o: score(job, o, rates))
            room.take(best)
            start.append(Start(job.id, best.candidate, best.leases, reason(job, best, rates, snapshot.wall_s)))
            continue
        claimed = wait.claim(job, room)
        if claimed:
            preempt += wait.apply(job, claimed, room)
            reasons[claimed.candidate, ""] = wait.sentence(claimed)
        why_not[job.id] = reasons
        blocked[shape] = (before, reasons)
    return Plan(tuple(start), tuple(preempt), why_not)


def survey(job: Job, room: Room) -> tuple[list[Option], Reasons]:
    """All places where `job` could start now, the best of each candidate and island, and why the others are none."""
    if not room.devices:
        return [], {(index, ""): NO_DEVICES for index in range(len(job.candidates))}
    options: list[Option] = []
    reasons: Reasons = {}
    for index, want in enumerate(job.candidates):
        places = room.places(index, want)
        reasons |= places.refused
        fits: dict[Island, list[Devices]] = {}
        for island, nodes in places.islands.items():
            for devices_id in nodes:
                have = room.devices[devices_id]
                if why := other_vendor(job, have) or enough_free(want, have):
                    reasons[index, devices_id] = why + room.note(devices_id)
                else:
                    fits.setdefault(island, []).append(have)
        fewest = job.objective == "cost"
        found = [option(index, want, nodes, fewest, job.avoid) for nodes in fits.values()]
        options += [o for o in found if o]
        if not any(found) and (short := too_few_nodes(want, fits)):
            reasons[index, ""] = short
    return options, reasons


def _troubles(job: Job) -> str:
    told = [(job.restarts, "failure"), (job.interruptions, "interruption")]
    return " and ".join(f"{count} {word}{'s' if count > 1 else ''}" for count, word in told if count) or "a pause"
