"""Why a job can, cannot, or can never run: the same rules as plan.py, told for one job."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from cluster.errors import nearest
from orchestrator.core.backfill import held_by
from orchestrator.core.capacity import Room, asked
from orchestrator.core.demand import NEW
from orchestrator.core.durations import told_s
from orchestrator.core.expected_duration import expected
from orchestrator.core.fit import EVER, enough_free, least, refusal, right_kind, right_pool
from orchestrator.core.gang import islands, too_few_nodes
from orchestrator.core.host_memory import nodes_together
from orchestrator.core.model import Candidate, Devices, Job, Running, Snapshot, Start
from orchestrator.core.placement_options import noted, refusals
from orchestrator.core.plan import plan
from orchestrator.core.states import TERMINAL, WAITING, State
from orchestrator.core.urgency import slack_s

REASONS_KEPT = 1000


@dataclass(frozen=True, slots=True)
class Answer:
    """One candidate: devices ids that could hold (part of) it now, and per other devices id the refusing sentence.

    The key "" of `refused` speaks of the whole fleet, e.g. that no island has nodes enough or what the job waits for.
    `measured` says per devices id that fits what its kind was measured to do with the job's workload.
    """

    candidate: int
    kinds: tuple[str, ...]
    count: int
    min_count: int
    nodes: int
    pool: str
    fits: tuple[str, ...]
    refused: dict[str, str]
    measured: dict[str, str] = field(default_factory=dict)
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class Explanation:
    """`impossible` is the sentence of `never`; `preempt` names the jobs that would be asked to stop. `late` is by
    how much it cannot be in time any more, as far as that is known. `runs` is where a job that was placed holds its
    devices: then the candidates say where else it could, and it would not start anew.
    """

    candidates: tuple[Answer, ...]
    would_start: Start | None
    preempt: tuple[str, ...]
    impossible: str
    late: str = ""
    runs: Start | None = None


def explain(job: Job, snapshot: Snapshot) -> Explanation:
    """What the next plan says of `job`, in its place in the line. It need not be in the snapshot: then it is new."""
    if attempt := _attempt(job, snapshot):
        return _explain_running(job, attempt, snapshot)
    known = next((other for other in snapshot.jobs if other.id == job.id), job)  # with what a snapshot adds
    asked = replace(known, state=State.PENDING)
    others = tuple(other for other in snapshot.jobs if other.id != job.id)
    decided = plan(replace(snapshot, jobs=(*others, asked)))
    start = next((s for s in decided.start if s.job == job.id), None)
    why_not = noted(decided.why_not, snapshot.notes)
    refused = refusals(asked, Room(snapshot)) if start else why_not[job.id]
    preempt = tuple(p.victim for p in decided.preempt if p.job == job.id)
    answers = tuple(_answer(job, index, want, snapshot, refused) for index, want in enumerate(job.candidates))
    return Explanation(answers, start, preempt, never(job, snapshot.possible), late(job, snapshot))


def _attempt(job: Job, seen: Snapshot) -> Running | None:
    if job.state in WAITING | TERMINAL:
        return None
    return next((attempt for attempt in seen.running if attempt.job == job.id and attempt.leases), None)


def _explain_running(job: Job, attempt: Running, seen: Snapshot) -> Explanation:
    """What it holds counts as free: its own devices are no reason against them."""
    own = dict(attempt.leases)
    devices = (replace(d, free=tuple(sorted({*d.free, *own.get(d.id, ())}))) for d in seen.devices)
    others = tuple(other for other in seen.running if other.job != job.id)
    freed = replace(seen, devices=tuple(devices), running=others)
    refused = refusals(replace(job, state=State.PENDING), Room(freed))
    answers = tuple(_answer(job, index, want, freed, refused) for index, want in enumerate(job.candidates))
    return Explanation(answers, None, (), "", late(job, seen), Start(job.id, attempt.candidate, attempt.leases))


def late(job: Job, seen: Snapshot) -> str:
    """By how much it would miss its deadline if it ran from now on at its best place; "" where it need not."""
    if not job.deadline_s or job.state in TERMINAL:
        return ""
    if (left_s := job.deadline_s - seen.wall_s) <= 0:
        return f"its deadline was {told_s(-left_s)} ago"
    best_s = min(_known_s(job, seen), default=0.0)
    over_s = -slack_s(job, seen.wall_s, best_s)
    return f"ends {told_s(over_s)} after its deadline at the earliest" if over_s > 0 else ""


def _known_s(job: Job, seen: Snapshot) -> Iterator[float]:
    """How long it would run at each of its places of which that is known."""
    room, expect = Room(seen), expected(seen)
    for want in job.candidates:
        for island, ids in room.places(want).islands.items():
            most = least(want, room.devices[ids[0]]) if want.exclusive else want.count
            if (found := expect(job, island.kind, most * want.nodes)).known:
                yield found.seconds


def never(job: Job, devices: Iterable[Devices]) -> str:
    """Why nothing here could ever run `job`, busy or not; "" if something could. Nodes that take no jobs now count."""
    return Never(devices)(job)


class Never:
    """`never` for many jobs and the same devices: found once for all candidates that ask for the same."""

    def __init__(self, devices: Iterable[Devices]):
        self.devices = tuple(devices)
        self._reasons: dict[tuple[object, ...], str] = {}

    def __call__(self, job: Job) -> str:
        reasons = [self._reason(want) for want in job.candidates]
        if not all(reasons):
            return ""
        if len(reasons) == 1:
            return reasons[0]
        return "; ".join(f"candidate {index + 1}: {reason}" for index, reason in enumerate(reasons))

    def _reason(self, want: Candidate) -> str:
        key = (want.nodes, *asked(want))
        if (reason := self._reasons.get(key)) is None:
            if len(self._reasons) >= REASONS_KEPT:
                self._reasons.clear()
            reason = self._reasons[key] = _never(want, self.devices)
        return reason


def _answer(job: Job, index: int, want: Candidate, snapshot: Snapshot, why_not: dict[tuple[int, str], str]) -> Answer:
    refused = {key: told for (number, key), told in why_not.items() if number == index}
    refused |= {key: f"{refused[key]}; {held}" for key, held in _held(want, refused, snapshot).items()}
    fits = {have.id: have for have in sorted(snapshot.devices, key=lambda d: d.id) if have.id not in refused}
    measured = {
        name: snapshot.throughput.sentence(job, index, have.kind, snapshot.wall_s) for name, have in fits.items()
    }
    told = measured if job.workload else {}
    return Answer(
        index, want.kinds, want.count, want.min_count, want.nodes, want.pool, tuple(fits), refused, told, want.exclusive
    )


def _held(want: Candidate, refused: dict[str, str], seen: Snapshot) -> dict[str, str]:
    """By devices id, of those that are refused because too few are free: who has the others."""
    busy = {have.id for have in seen.devices if (why := enough_free(want, have)) and why in refused.get(have.id, "")}
    holders: dict[str, list[str]] = {}
    for attempt in seen.running:
        for devices_id, numbers in attempt.leases:
            if devices_id in busy and numbers:
                holders.setdefault(devices_id, []).append(attempt.job)
    return {devices_id: held_by(sorted(jobs)) for devices_id, jobs in holders.items()}


def _never(want: Candidate, devices: tuple[Devices, ...]) -> str:
    able = [have for have in devices if not refusal(want, have, EVER)]
    found = islands(want, able)
    if any(nodes_together(want, nodes) >= want.nodes for nodes in found.values()):
        return ""
    if sharing := next((nodes for nodes in found.values() if len(nodes) >= want.nodes), None):
        return (
            f"{', '.join(have.id for have in sharing)} share the memory of their machines, "
            f"which is too little for {want.nodes} nodes of the job"
        )
    if able:
        return too_few_nodes(want, found)
    pools = sorted({have.pool for have in devices})
    if (want.pool or want.pools) and not {want.pool, *want.pools} & {*pools}:
        named = want.pool or want.pools[0]
        return f"no pool is called {' or '.join(want.pools) or named}; {nearest(named, pools)}"
    right = [have for have in devices if not right_pool(want, have) and not right_kind(want, have)]
    if not right:
        return _no_such_kind(want, devices)
    told = [f"{_told_as(have)}: {refusal(want, have, EVER)}" for have in sorted(right, key=lambda d: d.id)]
    return "; ".join(list(dict.fromkeys(told))[:3])


def _told_as(have: Devices) -> str:
    return f"a node that may be started in pool {have.pool}" if have.node.startswith(NEW) else have.id


def _no_such_kind(want: Candidate, devices: tuple[Devices, ...]) -> str:
    here = [have for have in devices if not right_pool(want, have)]
    kinds = ", ".join(sorted({have.kind for have in here})) or "none"
    where = f"pool {want.pool} has no" if want.pool else "no pool has"
    return f"{where} {' or '.join(want.kinds)}; kinds here: {kinds}"
