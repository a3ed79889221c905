"""Offers for a job before it is submitted: where it could run, at what speed and price, and after what wait. Pure.

The planner runs once for the job, and once per place for a job that accepts only that place.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from orchestrator.core.controller.draft import Control
from orchestrator.core.controller.nodes import is_unusable
from orchestrator.core.explanation.explain import Explanation, explain
from orchestrator.core.explanation.offer_plan import Allocation, Growth, PlaceEvaluation, PlaceEvaluator, When
from orchestrator.core.model import Devices, Job, Snapshot
from orchestrator.core.plan.exploration import Exploration
from orchestrator.core.plan.options.placement_options import NO_DEVICES
from orchestrator.core.plan.options.rates import Rates
from orchestrator.core.plan.options.score import price_per_item, score
from orchestrator.core.rate_source import UNMEASURED, WorkloadRate, best_rate
from orchestrator.core.states import State
from orchestrator.core.timing import duration_text


@dataclass(frozen=True, slots=True)
class Offer:
    """One candidate in one place (the devices of a kind in a pool): `count` devices on each of `nodes`, or as few as
    `min_count`. `wait` is `when` as text.

    `chosen`: the next plan would use it. `after` are the jobs that would have to stop; `ahead` is the number of jobs
    earlier in the queue that accept these devices, too. `earliest_start_s`: expected seconds until running jobs have
    freed enough, without the jobs ahead. `rate` is the best rate with its source, `speed` its
    text; `items_per_s` is that of all devices by a benchmark, assuming linear scaling. `reason` is why it cannot start
    now. None: unknown.
    """

    candidate: int
    pool: str
    kind: str
    count: int
    min_count: int
    nodes: int
    when: When
    wait: str
    chosen: bool
    allocation: Allocation
    after: tuple[str, ...]
    ahead: int
    earliest_start_s: float | None
    speed: str
    rate: WorkloadRate | None
    items_per_s: float | None
    price_per_hour: float | None
    price_per_million_items: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Offers:
    """`offers`, best first. `impossible`: why the job could never run here, "" if it could."""

    offers: tuple[Offer, ...]
    impossible: str


def growth(control: Control, now_s: float) -> Growth:
    """Return the growth that the controller assumes when it requests nodes from the autoscaler."""
    unusable: dict[str, set[str]] = {}
    for node in control.nodes.values():
        if not node.lost_reason and is_unusable(node, control.drained, now_s):
            unusable.setdefault(node.pool, set()).add(node.name)
    until_s = {pool: entry.until_s for pool, entry in control.scaling.unavailable.items()}
    return Growth(control.scaling.groups, until_s, unusable)


def offers(job: Job, snapshot: Snapshot, may_grow: Growth | None = None) -> Offers:
    """Return offers for `job`, which is not in the snapshot, in every place."""
    if not snapshot.possible:
        return Offers((), NO_DEVICES)
    asker = PlaceEvaluator(replace(job, state=State.PENDING), snapshot, may_grow or Growth())
    evaluations = [
        asker.evaluate(index, want, devices)
        for index, want in enumerate(job.candidates)
        for devices in _by_pool_and_kind(snapshot.possible)
    ]
    explanation = explain(job, snapshot)
    ordered = list(_in_order(job, evaluations, snapshot))
    chosen = _find_chosen(explanation, ordered)
    listed = [_offer(job, evaluation, snapshot, evaluation is chosen) for evaluation in ordered]
    return Offers(tuple(sorted(listed, key=lambda offer: not offer.chosen)), explanation.impossible)


def _by_pool_and_kind(devices: Iterable[Devices]) -> list[tuple[Devices, ...]]:
    """Group the devices by pool and kind."""
    by_pool_and_kind: dict[tuple[str, str], list[Devices]] = {}
    for have in sorted(devices, key=lambda d: d.id):
        by_pool_and_kind.setdefault((have.pool, have.kind), []).append(have)
    return [tuple(by_pool_and_kind[key]) for key in sorted(by_pool_and_kind)]


def _in_order(job: Job, evaluations: Iterable[PlaceEvaluation], snapshot: Snapshot) -> Iterator[PlaceEvaluation]:
    """Sort by `when`, then in the planner's own order."""
    evaluations = list(evaluations)
    explored = Exploration(snapshot)
    for when in When:
        equal = [evaluation for evaluation in evaluations if evaluation.when is when]
        options = [evaluation.option for evaluation in equal]
        rates = Rates.of(job, options, snapshot.throughput, snapshot.history, explored.explored_kinds(job, options))
        scored = [(score(job, evaluation.option, rates), number) for number, evaluation in enumerate(equal)]
        yield from (equal[number] for _, number in sorted(scored))


def _find_chosen(explanation: Explanation, evaluations: Iterable[PlaceEvaluation]) -> PlaceEvaluation | None:
    """Return the evaluation that the plan of the job itself starts, or stops others for; else None."""
    start = explanation.would_start
    for evaluation in evaluations:
        if start and evaluation.allocation and evaluation.option.candidate == start.candidate:
            if {devices_id for devices_id, _ in evaluation.allocation} == {
                devices_id for devices_id, _ in start.allocation
            }:
                return evaluation
        elif not start and evaluation.after and set(evaluation.after) == set(explanation.preempt):
            return evaluation
    return None


def _offer(job: Job, evaluation: PlaceEvaluation, snapshot: Snapshot, chosen: bool) -> Offer:
    option = evaluation.option
    have, want = option.nodes[0], job.candidates[option.candidate]
    each, devices = price_per_item(option, Rates.of(job, (option,), snapshot.throughput)), option.count * want.nodes
    measured = snapshot.throughput.of(job, option.candidate, have.kind)
    rate = best_rate(job, option.candidate, have.kind, devices, snapshot.throughput, snapshot.history.of(job))
    return Offer(
        candidate=option.candidate,
        pool=have.pool,
        kind=have.kind,
        count=option.count,
        min_count=evaluation.min_count,
        nodes=want.nodes,
        when=evaluation.when,
        wait=_wait_text(evaluation),
        chosen=chosen,
        allocation=evaluation.allocation,
        after=evaluation.after,
        ahead=evaluation.ahead,
        earliest_start_s=evaluation.earliest_s,
        speed=rate.sentence(snapshot.wall_s) if rate else UNMEASURED,
        rate=rate,
        items_per_s=measured.items_per_s * devices if measured else None,
        price_per_hour=have.price_per_hour * devices or None,
        price_per_million_items=each * 1e6 if each else None,
        reason=evaluation.reason,
    )


def _wait_text(evaluation: PlaceEvaluation) -> str:
    match evaluation.when:
        case When.PREEMPTS:
            stop = "stops" if len(evaluation.after) == 1 else "stop"
            return f"after {', '.join(evaluation.after)} {stop} (lower priority)"
        case When.NEW_NODE:
            return "a node is started for it"
        case When.WAITS:
            ahead = f"behind {evaluation.ahead} job{'s' if evaluation.ahead > 1 else ''}"
            return f"{ahead if evaluation.ahead else 'after running jobs end'}{_earliest_text(evaluation)}"
        case When.CLOSED:
            return "once a node there takes jobs"
        case When.NEVER | When.NOT_REQUESTED:
            return "never here"
    return "now"


def _earliest_text(evaluation: PlaceEvaluation) -> str:
    """Return the expected wait, "" if it is unknown or not for running jobs."""
    return f", in about {duration_text(evaluation.earliest_s)} at the earliest" if evaluation.earliest_s else ""
