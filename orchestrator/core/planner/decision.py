"""The decision: which option each job runs as now, with what it is worth and the bound of what any other could be."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from orchestrator.core.planner import plugins, prices
from orchestrator.core.planner.island_prices import match
from orchestrator.core.planner.packing import Nodes, Packing
from orchestrator.core.planner.planner_jobs import WAITS, Floats, Integers, Work, used
from orchestrator.core.planner.policies import IN_ORDER, PRICED, seen_with
from orchestrator.core.planner.rounding import SWEEPS, Instance, assign
from orchestrator.core.planner.submission_order import in_order

COLD_STEPS, WARM_STEPS, FEW_STEPS = 60, 30, 12
"""Of prices: without a decision before; from the prices of the last one; and so where there are many jobs, of which
one more or less hardly moves a price.
"""

STAYS = 0.1
"""A job that would have to start or move is worth so much less: equals are not exchanged for a gain below it."""

RESIDENCE_S = 3600.0
"""A start pays off over the rest of the job, and over no more than this: later it may have to move again."""

NEVER = 1e-9
"""Of the highest value: what is left for an option that no policy would take, which is still better than waiting."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the next decision starts from: prices of the work and, by priority, of the devices. May be empty."""

    work: Floats = field(default_factory=lambda: np.zeros(0))
    devices: dict[int, Floats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """`option` (jobs,). `value` and `bound` are sums over the tiers, in units of the policy: the gap between them is
    what any other decision could gain at most. Both are 0 for policies that go by order alone. `fault`: what an
    installed policy did wrong, so that order decided. `nodes` by job, of islands where memory of machines is a limit.
    """

    option: Integers
    memory: Memory
    value: float = 0.0
    bound: float = 0.0
    fault: str = ""
    nodes: Mapping[int, Nodes] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Of the bound; 0 to 1."""
        return max(0.0, 1.0 - self.value / self.bound) if self.bound else 0.0


def decide(work: Work, capacity: Integers, policy: str, memory: Memory, steps: int | None = None) -> Decision:
    """Priorities are strict: a tier takes what it wants of what the tiers above it left. `capacity` (islands,) counts
    all devices there are, those that jobs of `work` hold as well, as its machines do. `steps` of prices; None: what
    they usually need. Raises KeyError for a policy that is not known.
    """
    if policy not in IN_ORDER and policy not in PRICED and policy not in plugins.KNOWN:
        raise KeyError(policy)
    option = np.where(work.fixed, work.held, WAITS)
    decided = Decision(option, Memory(_or_even(memory.work, capacity), dict(memory.devices)))
    packing = Packing(work.machines, work) if work.machines else None
    if packing:
        packing.add_all(option, np.flatnonzero(option != WAITS).tolist())
    for tier in _tiers(work):
        left = capacity - used(work, decided.option, len(capacity))
        fits = work.fitting(left)
        jobs = np.flatnonzero((work.priority == tier) & ~work.fixed & fits.possible.any(axis=0))
        part = fits if len(jobs) == work.jobs else fits.only(jobs)
        if not len(jobs):
            continue
        if packing:
            part = replace(part, machines=packing.left(jobs))
        if policy in IN_ORDER:
            decided = _ordered(part, jobs, left, decided)
        else:
            decided = _priced(part, jobs, left, policy, tier, decided, steps)
        if packing:
            for job in decided.nodes.keys() & {*jobs.tolist()}:
                packing.put(job, int(decided.option[job]), decided.nodes[job])
    return decided


def _ordered(part: Work, jobs: Integers, left: Integers, above: Decision) -> Decision:
    option = in_order(part, left)
    nodes: Mapping[int, Nodes] = {}
    if part.machines:
        packing, runs = Packing(part.machines, part), np.flatnonzero(option != WAITS)
        packing.add_all(option, runs[np.argsort(part.order[runs], kind="stable")].tolist())
        nodes = packing.nodes
    above.option[jobs] = option
    return replace(above, nodes=_with(above.nodes, jobs, nodes))


def _with(above: Mapping[int, Nodes], jobs: Integers, nodes: Mapping[int, Nodes]) -> dict[int, Nodes]:
    """`nodes` by their place in `jobs`."""
    return {**above, **{int(jobs[at]): each for at, each in nodes.items()}}


def _priced(
    part: Work, jobs: Integers, left: Integers, policy: str, tier: int, above: Decision, steps: int | None
) -> Decision:
    """By order of submission where an installed policy fails."""
    try:
        return _tier(part, jobs, left, policy, tier, above, steps)
    except plugins.Fault as e:
        return replace(_ordered(part, jobs, left, above), fault=str(e))


def _tiers(work: Work) -> list[int]:
    """Highest first."""
    if work.jobs and not work.fixed.any() and (work.priority == work.priority[0]).all():
        return [int(work.priority[0])]  # sorting a hundred thousand takes milliseconds
    return sorted({*np.unique(work.priority[~work.fixed]).tolist()}, reverse=True)


def fill(work: Work, capacity: Integers, policy: str, memory: Memory) -> Decision:
    """Start what fits of the jobs that wait, at the prices of the last decision; what runs is not touched. Its memory
    is the one it was given: prices of a few jobs say nothing of all.
    """
    fixed = replace(work, fixed=work.held != WAITS)
    return replace(decide(fixed, capacity, policy, memory, steps=1), memory=memory)


def _tier(
    part: Work, jobs: Integers, left: Integers, policy: str, tier: int, above: Decision, steps: int | None
) -> Decision:
    steps = steps or _steps(part.jobs, tier in above.memory.devices)
    only_end = policy == "makespan"
    matching = match(part, left, above.memory.work, steps if only_end else steps // 3, within=only_end)
    paid = part.price_per_hour if policy == "cost" and part.price_per_hour.any() else matching.price
    seen = seen_with(part, matching, paid, within=only_end)
    values = valued(part, PRICED[policy](seen) if policy in PRICED else plugins.worth(policy, seen))
    warm = above.memory.devices.get(tier, np.zeros(0))
    warm = warm if len(warm) == len(left) else np.zeros(len(left))
    found = prices.clear(values, part.devices, part.island, left, warm, steps)
    instance = Instance(values, part.devices, part.island, left, part.machines)
    option = above.option.copy()
    chosen = assign(instance, found, SWEEPS if steps > 1 else 0)
    option[jobs] = chosen.option
    memory = Memory(matching.price, above.memory.devices | {tier: found.price})
    value, bound = above.value + instance.worth(chosen.option), above.bound + found.bound
    return Decision(option, memory, value, bound, above.fault, _with(above.nodes, jobs, chosen.nodes))


def _steps(jobs: int, warm: bool) -> int:
    return COLD_STEPS if not warm else FEW_STEPS if jobs > prices.MANY else WARM_STEPS


def valued(work: Work, worth: Floats) -> Floats:
    """(options, jobs) what a policy says an option is worth, with the job's weight: nothing where the job cannot run,
    at least a little where it can, and less where it would have to start or move, by what that costs while it stays.
    """
    values = np.asarray(worth * work.weight, np.float64)
    if not (finite := np.isfinite(values)).all():
        values[~finite] = 0.0
    np.maximum(values, float(values.max(initial=0.0)) * NEVER, out=values)
    values *= work.possible
    runs = np.flatnonzero(work.held != WAITS)
    stays = values[work.held[runs], runs]
    begins_s = np.minimum(RESIDENCE_S, work.best_s)
    pays = np.maximum(1.0 - work.restart_s / (work.restart_s + begins_s), 0.02)
    values *= np.minimum(pays, 1.0 - STAYS)
    values[work.held[runs], runs] = stays
    return values


def _or_even(price: Floats, capacity: Integers) -> Floats:
    return price if len(price) == len(capacity) else np.ones(len(capacity))
