"""Explain why a job can, cannot or can never run, with the rules of plan/plan.py."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from cluster.errors import nearest
from orchestrator.core.controller.scaling import NEW_NODE_PREFIX
from orchestrator.core.jobs.expected_duration import expectation, slack_s
from orchestrator.core.model import Candidate, Devices, Job, Running, Snapshot, Start
from orchestrator.core.plan.options.backfill import held_by
from orchestrator.core.plan.options.capacity import FreeCapacity, request_key
from orchestrator.core.plan.options.fit import (
    PERMANENT_RULES,
    enough_free,
    minimum_count,
    refusal_reason,
    right_kind,
    right_pool,
    takes_all_devices,
)
from orchestrator.core.plan.options.gang import islands, too_few_nodes_reason
from orchestrator.core.plan.options.host_memory import max_nodes_together
from orchestrator.core.plan.options.placement_options import refusal_reasons, with_notes
from orchestrator.core.plan.plan import plan
from orchestrator.core.rate_source import UNMEASURED, best_rate
from orchestrator.core.states import TERMINAL, WAITING, State
from orchestrator.core.timing import duration_text

MAX_CACHED_REASONS = 1000


@dataclass(frozen=True, slots=True)
class CandidateExplanation:
    """Explanation of one candidate: ids of devices that could hold (part of) it now, other ids with the reason.

    The key "" of `refused` has reasons about the fleet as a whole, e.g. no island has enough nodes, or what the job
    waits for. `speed` contains, by fitting devices id, the rate of the job's workload on that kind, with its source.
    """

    candidate: int
    kinds: tuple[str, ...]
    count: int
    min_count: int
    nodes: int
    pool: str
    fits: tuple[str, ...]
    refused: dict[str, str]
    speed: dict[str, str] = field(default_factory=dict)
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of a job.

    `impossible` is the result of `impossible_reason`. `preempt` names the jobs that would have to stop. `late` says by
    how much the job will miss its deadline, if that is known. `runs` contains the devices that a placed job holds; the
    candidates then say where else it could run, and `would_start` is None. `policy` orders the jobs of equal priority;
    with a `policy_fault`, the order of submission does.
    """

    candidates: tuple[CandidateExplanation, ...]
    would_start: Start | None
    preempt: tuple[str, ...]
    impossible: str
    late: str = ""
    runs: Start | None = None
    policy: str = ""
    policy_fault: str = ""


def explain(job: Job, snapshot: Snapshot) -> Explanation:
    """Explain what the next plan does with `job` at its position in the queue. A job not in the snapshot is new."""
    if attempt := _attempt(job, snapshot):
        return _explain_running(job, attempt, snapshot)
    current = next((other for other in snapshot.jobs if other.id == job.id), job)  # has the fields a snapshot adds
    waiting = replace(current, state=State.PENDING)
    other_jobs = tuple(other for other in snapshot.jobs if other.id != job.id)
    next_plan = plan(replace(snapshot, jobs=(*other_jobs, waiting)))
    start = next((s for s in next_plan.start if s.job == job.id), None)
    why_not = with_notes(next_plan.why_not, snapshot.notes)
    refused = refusal_reasons(waiting, FreeCapacity(snapshot)) if start else why_not[job.id]
    preempt = tuple(p.victim for p in next_plan.preempt if p.job == job.id)
    candidates = tuple(
        _explain_candidate(job, index, want, snapshot, refused) for index, want in enumerate(job.candidates)
    )
    return Explanation(
        candidates,
        start,
        preempt,
        impossible_reason(job, snapshot.possible),
        deadline_miss(job, snapshot),
        policy=snapshot.policy,
        policy_fault=next_plan.memory.fault,
    )


def _attempt(job: Job, snapshot: Snapshot) -> Running | None:
    if job.state in WAITING | TERMINAL:
        return None
    return next((attempt for attempt in snapshot.running if attempt.job == job.id and attempt.allocation), None)


def _explain_running(job: Job, attempt: Running, snapshot: Snapshot) -> Explanation:
    """Explain a running job. The devices that it holds count as free, so they are not a reason against themselves."""
    own = dict(attempt.allocation)
    devices = (replace(d, free=tuple(sorted({*d.free, *own.get(d.id, ())}))) for d in snapshot.devices)
    others = tuple(other for other in snapshot.running if other.job != job.id)
    freed = replace(snapshot, devices=tuple(devices), running=others)
    refused = refusal_reasons(replace(job, state=State.PENDING), FreeCapacity(freed))
    candidates = tuple(
        _explain_candidate(job, index, want, freed, refused) for index, want in enumerate(job.candidates)
    )
    runs = Start(job.id, attempt.candidate, attempt.allocation)
    policy, fault = snapshot.policy, snapshot.memory.fault
    return Explanation(candidates, None, (), "", deadline_miss(job, snapshot), runs, policy=policy, policy_fault=fault)


def deadline_miss(job: Job, snapshot: Snapshot) -> str:
    """Say by how much a job would miss its deadline if it ran now at its best place; "" if it can meet it."""
    if not job.deadline_s or job.state in TERMINAL:
        return ""
    if (remaining_s := job.deadline_s - snapshot.wall_s) <= 0:
        return f"its deadline was {duration_text(-remaining_s)} ago"
    best_s = min(_expected_durations_s(job, snapshot), default=0.0)
    over_s = -slack_s(job, snapshot.wall_s, best_s)
    return f"ends {duration_text(over_s)} after its deadline at the earliest" if over_s > 0 else ""


def _expected_durations_s(job: Job, snapshot: Snapshot) -> Iterator[float]:
    """Yield the expected seconds at each possible place, except where they are only guessed."""
    capacity, expect = FreeCapacity(snapshot), expectation(snapshot)
    for want in job.candidates:
        for island, ids in capacity.candidate_nodes(want).islands.items():
            first = capacity.devices[ids[0]]
            count = minimum_count(want, first) if takes_all_devices(want, first) else want.count
            if (duration := expect(job, island.kind, count * want.nodes)).has_evidence:
                yield duration.seconds


def impossible_reason(job: Job, devices: Iterable[Devices]) -> str:
    """Say why no device here could ever run `job`, busy or not, also if its node takes no jobs now; "" if one could."""
    return ImpossibleCheck(devices)(job)


class ImpossibleCheck:
    """Check many jobs against the same devices like `impossible_reason`, with a cache for candidates with equal
    requests.
    """

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
        key = request_key(want)
        if (reason := self._reasons.get(key)) is None:
            if len(self._reasons) >= MAX_CACHED_REASONS:
                self._reasons.clear()
            reason = self._reasons[key] = _impossible_reason(want, self.devices)
        return reason


def _explain_candidate(
    job: Job, index: int, want: Candidate, snapshot: Snapshot, why_not: dict[tuple[int, str], str]
) -> CandidateExplanation:
    refused = {key: reason for (number, key), reason in why_not.items() if number == index}
    refused |= {key: f"{refused[key]}; {holder_text}" for key, holder_text in _holders(want, refused, snapshot).items()}
    fits = {have.id: have for have in sorted(snapshot.devices, key=lambda d: d.id) if have.id not in refused}
    speed = {name: _speed(job, index, have.kind, snapshot) for name, have in fits.items()}
    return CandidateExplanation(
        index,
        want.kinds,
        want.count,
        want.min_count,
        want.nodes,
        want.pool,
        tuple(fits),
        refused,
        speed if job.workload or job.work.hours else {},
        want.exclusive,
    )


def _speed(job: Job, index: int, kind: str, snapshot: Snapshot) -> str:
    want, took = job.candidates[index], snapshot.history.of(job)
    rate = best_rate(job, index, kind, want.count * want.nodes, snapshot.throughput, took)
    return rate.sentence(snapshot.wall_s) if rate else UNMEASURED


def _holders(want: Candidate, refused: dict[str, str], snapshot: Snapshot) -> dict[str, str]:
    """Return the holders of the other devices, by devices id, where too few devices are free."""
    busy = {
        have.id for have in snapshot.devices if (why := enough_free(want, have)) and why in refused.get(have.id, "")
    }
    holders: dict[str, list[str]] = {}
    for attempt in snapshot.running:
        for devices_id, numbers in attempt.allocation:
            if devices_id in busy and numbers:
                holders.setdefault(devices_id, []).append(attempt.job)
    return {devices_id: held_by(sorted(jobs)) for devices_id, jobs in holders.items()}


def _impossible_reason(want: Candidate, devices: tuple[Devices, ...]) -> str:
    suitable = [have for have in devices if not refusal_reason(want, have, PERMANENT_RULES)]
    by_island = islands(want, suitable)
    if any(max_nodes_together(want, nodes) >= want.nodes for nodes in by_island.values()):
        return ""
    if sharing := next((nodes for nodes in by_island.values() if len(nodes) >= want.nodes), None):
        return (
            f"{', '.join(have.id for have in sharing)} share the memory of their machines, "
            f"which is too little for {want.nodes} nodes of the job"
        )
    if suitable:
        return too_few_nodes_reason(want, by_island)
    pools = sorted({have.pool for have in devices})
    if (want.pool or want.pools) and not {want.pool, *want.pools} & {*pools}:
        name = want.pool or want.pools[0]
        return f"no pool is called {' or '.join(want.pools) or name}; {nearest(name, pools)}"
    requested = [have for have in devices if not right_pool(want, have) and not right_kind(want, have)]
    if not requested:
        return _no_such_kind(want, devices)
    reasons = [
        f"{_device_label(have)}: {refusal_reason(want, have, PERMANENT_RULES)}"
        for have in sorted(requested, key=lambda d: d.id)
    ]
    return "; ".join(list(dict.fromkeys(reasons))[:3])


def _device_label(have: Devices) -> str:
    return f"a node that may be started in pool {have.pool}" if have.node.startswith(NEW_NODE_PREFIX) else have.id


def _no_such_kind(want: Candidate, devices: tuple[Devices, ...]) -> str:
    allowed = [have for have in devices if not right_pool(want, have)]
    kinds = ", ".join(sorted({have.kind for have in allowed})) or "none"
    where = f"pool {want.pool} has no" if want.pool else "no pool has"
    return f"{where} {' or '.join(want.kinds)}; kinds here: {kinds}"
