"""Why a job can, cannot, or can never run: the same rules as plan.py, told for one job."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from cluster.errors import nearest
from orchestrator.core.fit import EVER, refusal, right_kind, right_pool
from orchestrator.core.gang import islands, too_few_nodes
from orchestrator.core.model import Candidate, Devices, Job, Snapshot, Start
from orchestrator.core.plan import plan, survey
from orchestrator.core.policies import Policy
from orchestrator.core.policies.fifo import fifo
from orchestrator.core.room import Room, asked
from orchestrator.core.states import State
from orchestrator.core.throughput import sentence

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
    """`impossible` is the sentence of `never`; `preempt` names the jobs that would be asked to stop."""

    candidates: tuple[Answer, ...]
    would_start: Start | None
    preempt: tuple[str, ...]
    impossible: str


def explain(job: Job, snapshot: Snapshot, policy: Policy = fifo) -> Explanation:
    """What the next plan says of `job`, in its place in the line. It need not be in the snapshot: then it is new."""
    asked = replace(job, state=State.PENDING)
    others = tuple(other for other in snapshot.jobs if other.id != job.id)
    decided = plan(replace(snapshot, jobs=(*others, asked)), policy)
    start = next((s for s in decided.start if s.job == job.id), None)
    refused = survey(asked, Room(snapshot))[1] if start else decided.why_not[job.id]
    preempt = tuple(p.victim for p in decided.preempt if p.job == job.id)
    answers = tuple(_answer(job, index, want, snapshot, refused) for index, want in enumerate(job.candidates))
    return Explanation(answers, start, preempt, never(job, snapshot.devices))


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
    fits = {have.id: have for have in sorted(snapshot.devices, key=lambda d: d.id) if have.id not in refused}
    measured = {
        name: sentence(snapshot.throughput.of(job, index, have.kind), snapshot.wall_s) for name, have in fits.items()
    }
    told = measured if job.workload else {}
    return Answer(
        index, want.kinds, want.count, want.min_count, want.nodes, want.pool, tuple(fits), refused, told, want.exclusive
    )


def _never(want: Candidate, devices: tuple[Devices, ...]) -> str:
    able = [have for have in devices if not refusal(want, have, EVER)]
    found = islands(want, able)
    if any(len(nodes) >= want.nodes for nodes in found.values()):
        return ""
    if able:
        return too_few_nodes(want, found)
    if want.pool and all(right_pool(want, have) for have in devices):
        return f"no pool is called {want.pool}; {nearest(want.pool, sorted({have.pool for have in devices}))}"
    right = [have for have in devices if not right_pool(want, have) and not right_kind(want, have)]
    if not right:
        return _no_such_kind(want, devices)
    return "; ".join(f"{have.id}: {refusal(want, have, EVER)}" for have in sorted(right, key=lambda d: d.id)[:3])


def _no_such_kind(want: Candidate, devices: tuple[Devices, ...]) -> str:
    here = [have for have in devices if not right_pool(want, have)]
    kinds = ", ".join(sorted({have.kind for have in here})) or "none"
    where = f"pool {want.pool} has no" if want.pool else "no pool has"
    return f"{where} {' or '.join(want.kinds)}; kinds here: {kinds}"
