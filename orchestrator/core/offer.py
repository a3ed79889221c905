"""Where a job that nobody has submitted could run, at what speed and price, and after what wait. Pure.

The planner itself is asked: once about the job, and for each place about one that accepts only that place.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from orchestrator.core.draft import Control
from orchestrator.core.explain import Explanation, explain
from orchestrator.core.exploration import Exploration
from orchestrator.core.model import Devices, Job, Snapshot
from orchestrator.core.nodes import useless
from orchestrator.core.offer_plan import Answer, Asker, Growth, Leases, When
from orchestrator.core.placement_options import NO_DEVICES
from orchestrator.core.score import price_per_item, score
from orchestrator.core.states import State
from orchestrator.core.throughput import Measured, Rates


@dataclass(frozen=True, slots=True)
class Offer:
    """One candidate in one place, the devices of a kind in a pool: `count` devices on each of `nodes`, or as few as
    `min_count`. `wait` says in words what `when` is.

    `chosen`: the next plan would take it. `after` are the jobs it would ask to stop; `ahead` counts the jobs before it
    in line that accept these devices too. `measured` is of one device and `speed` the sentence for it; `items_per_s` is
    of all devices, as if they scaled. `reason` says why it cannot start now. None: not known.
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
    leases: Leases
    after: tuple[str, ...]
    ahead: int
    speed: str
    measured: Measured | None
    items_per_s: float | None
    price_per_hour: float | None
    price_per_million_items: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Offers:
    """`offers`, the best first. `impossible`: why the job could never run here, "" if it could."""

    offers: tuple[Offer, ...]
    impossible: str


def growth(control: Control, now_s: float) -> Growth:
    """As the controller has it when it asks the autoscaler."""
    unusable: dict[str, set[str]] = {}
    for node in control.nodes.values():
        if not node.lost and useless(node, control.drained, now_s):
            unusable.setdefault(node.pool, set()).add(node.name)
    until_s = {pool: known.until_s for pool, known in control.scaling.unavailable.items()}
    return Growth(control.scaling.groups, until_s, unusable)


def offers(job: Job, snapshot: Snapshot, may_grow: Growth | None = None) -> Offers:
    """What the next plans would make of `job`, which is not in the snapshot, in each place that there is."""
    if not snapshot.possible:
        return Offers((), NO_DEVICES)
    asker = Asker(replace(job, state=State.PENDING), snapshot, may_grow or Growth())
    answers = [
        asker.answer(index, want, devices)
        for index, want in enumerate(job.candidates)
        for devices in _places(snapshot.possible)
    ]
    whole = explain(job, snapshot)
    found = list(_in_order(job, answers, snapshot))
    chosen = _chosen(whole, found)
    told = [_offer(job, answer, snapshot, answer is chosen) for answer in found]
    return Offers(tuple(sorted(told, key=lambda offer: not offer.chosen)), whole.impossible)


def _places(devices: Iterable[Devices]) -> list[tuple[Devices, ...]]:
    """The devices of each kind in each pool."""
    found: dict[tuple[str, str], list[Devices]] = {}
    for have in sorted(devices, key=lambda d: d.id):
        found.setdefault((have.pool, have.kind), []).append(have)
    return [tuple(found[place]) for place in sorted(found)]


def _in_order(job: Job, answers: Iterable[Answer], snapshot: Snapshot) -> Iterator[Answer]:
    """Of those that wait alike, in the planner's own order."""
    answers = list(answers)
    explored = Exploration(snapshot)
    for when in When:
        alike = [answer for answer in answers if answer.when is when]
        options = [answer.option for answer in alike]
        rates = Rates.of(job, options, snapshot.throughput, snapshot.history, explored.over(job, options))
        scored = [(score(job, answer.option, rates), number) for number, answer in enumerate(alike)]
        yield from (alike[number] for _, number in sorted(scored))


def _chosen(whole: Explanation, found: Iterable[Answer]) -> Answer | None:
    """The one that the plan of the whole job starts, or that it stops others for."""
    start = whole.would_start
    for answer in found:
        if start and answer.leases and answer.option.candidate == start.candidate:
            if {devices_id for devices_id, _ in answer.leases} == {devices_id for devices_id, _ in start.leases}:
                return answer
        elif not start and answer.after and set(answer.after) == set(whole.preempt):
            return answer
    return None


def _offer(job: Job, answer: Answer, snapshot: Snapshot, chosen: bool) -> Offer:
    option = answer.option
    have, want = option.nodes[0], job.candidates[option.candidate]
    each = price_per_item(option, Rates.of(job, (option,), snapshot.throughput))
    measured, devices = snapshot.throughput.of(job, option.candidate, have.kind), option.count * want.nodes
    return Offer(
        candidate=option.candidate,
        pool=have.pool,
        kind=have.kind,
        count=option.count,
        min_count=answer.min_count,
        nodes=want.nodes,
        when=answer.when,
        wait=_wait(answer),
        chosen=chosen,
        leases=answer.leases,
        after=answer.after,
        ahead=answer.ahead,
        speed=snapshot.throughput.sentence(job, option.candidate, have.kind, snapshot.wall_s),
        measured=measured,
        items_per_s=measured.items_per_s * devices if measured else None,
        price_per_hour=have.price_per_hour * devices or None,
        price_per_million_items=each * 1e6 if each else None,
        reason=answer.reason,
    )


def _wait(answer: Answer) -> str:
    match answer.when:
        case When.PREEMPTS:
            stop = "stops" if len(answer.after) == 1 else "stop"
            return f"after {', '.join(answer.after)} {stop} (lower priority)"
        case When.NEW_NODE:
            return "a node is started for it"
        case When.WAITS if answer.ahead:
            return f"behind {answer.ahead} job{'s' if answer.ahead > 1 else ''}"
        case When.WAITS:
            return "after running jobs end"
        case When.CLOSED:
            return "once a node there takes jobs"
        case When.NEVER | When.NOT_ASKED_FOR:
            return "never here"
    return "now"
