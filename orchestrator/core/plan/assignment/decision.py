"""Decide which option each job runs as now, with the value of the decision and an upper bound for any other."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from orchestrator.core.plan.arrays import prices
from orchestrator.core.plan.arrays.island_prices import price_work
from orchestrator.core.plan.arrays.machine_memory import Nodes, Packing
from orchestrator.core.plan.arrays.planner_jobs import WAITS, Floats, Integers, Work, used
from orchestrator.core.plan.assignment.rounding import SWEEPS, Instance, assign
from orchestrator.core.plan.policies import plugins
from orchestrator.core.plan.policies.policy_input import build_input
from orchestrator.core.plan.policies.priced_policies import ORDER_POLICIES, PRICED
from orchestrator.core.plan.policies.submission_order import in_order

COLD_STEPS, WARM_STEPS, FEW_STEPS = 60, 30, 12
"""Numbers of price steps: without previous prices; from those of the last decision; and the latter with many jobs,
where one job more or less hardly changes a price.
"""

MOVE_PENALTY = 0.1
"""Fraction by which a start or move reduces the value, so that jobs are not exchanged for smaller gains."""

RESIDENCE_S = 3600.0
"""Longest time over which a start pays off, since the job may have to move again later."""

MIN_VALUE = 1e-9
"""Fraction of the highest value for an option without value to the policy, which is still better than waiting."""


@dataclass(frozen=True, slots=True)
class PriceMemory:
    """Start of the next decision: prices of the work and, by priority, of the devices. May be empty."""

    work: Floats = field(default_factory=lambda: np.zeros(0))
    devices: dict[int, Floats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkDecision:
    """Result: `option` (jobs,).

    `value` and `bound` are sums over the tiers in units of the policy; any other decision gains at most the gap between
    them. Both are 0 for policies that use only the order. `fault`: error of an installed policy, for which the order
    was used instead. `nodes` by job, for islands where machines' memory is a limit.
    """

    option: Integers
    memory: PriceMemory
    value: float = 0.0
    bound: float = 0.0
    fault: str = ""
    nodes: Mapping[int, Nodes] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Gap as a fraction of the bound, 0 to 1."""
        return max(0.0, 1.0 - self.value / self.bound) if self.bound else 0.0


def decide(work: Work, capacity: Integers, policy: str, memory: PriceMemory, steps: int | None = None) -> WorkDecision:
    """Decide for all tiers in strict order of priority: a tier uses what the tiers above it have left.

    `capacity` (islands,) counts all devices, including those that jobs of `work` hold, as its machines do. `steps`:
    number of price steps; None: the usual number. Raises KeyError for an unknown policy.
    """
    if policy not in ORDER_POLICIES and policy not in PRICED and policy not in plugins.INSTALLED:
        raise KeyError(policy)
    option = np.where(work.fixed, work.held, WAITS)
    result = WorkDecision(option, PriceMemory(_or_uniform(memory.work, capacity), dict(memory.devices)))
    packing = Packing(work.machines, work) if work.machines else None
    if packing:
        packing.add_all(option, np.flatnonzero(option != WAITS).tolist())
    for tier in _tiers(work):
        left = capacity - used(work, result.option, len(capacity))
        fits = work.fitting(left)
        jobs = np.flatnonzero((work.priority == tier) & ~work.fixed & fits.possible.any(axis=0))
        part = fits if len(jobs) == work.jobs else fits.only(jobs)
        if not len(jobs):
            continue
        if packing:
            part = replace(part, machines=packing.left(jobs))
        if policy in ORDER_POLICIES:
            result = _ordered(part, jobs, left, result)
        else:
            result = _priced(part, jobs, left, policy, tier, result, steps)
        if packing:
            for job in result.nodes.keys() & {*jobs.tolist()}:
                packing.put(job, int(result.option[job]), result.nodes[job])
    return result


def _ordered(part: Work, jobs: Integers, left: Integers, above: WorkDecision) -> WorkDecision:
    option = in_order(part, left)
    nodes: Mapping[int, Nodes] = {}
    if part.machines:
        packing, runs = Packing(part.machines, part), np.flatnonzero(option != WAITS)
        packing.add_all(option, runs[np.argsort(part.order[runs], kind="stable")].tolist())
        nodes = packing.nodes
    above.option[jobs] = option
    return replace(above, nodes=_merge_nodes(above.nodes, jobs, nodes))


def _merge_nodes(above: Mapping[int, Nodes], jobs: Integers, nodes: Mapping[int, Nodes]) -> dict[int, Nodes]:
    """Add `nodes`, which are by position in `jobs`."""
    return {**above, **{int(jobs[at]): each for at, each in nodes.items()}}


def _priced(
    part: Work, jobs: Integers, left: Integers, policy: str, tier: int, above: WorkDecision, steps: int | None
) -> WorkDecision:
    """Decide a tier by prices, or by order of submission if an installed policy fails."""
    try:
        return _tier(part, jobs, left, policy, tier, above, steps)
    except plugins.PolicyError as e:
        return replace(_ordered(part, jobs, left, above), fault=str(e))


def _tiers(work: Work) -> list[int]:
    """Return the priorities that are not fixed, highest first."""
    if work.jobs and not work.fixed.any() and (work.priority == work.priority[0]).all():
        return [int(work.priority[0])]  # sorting a hundred thousand takes milliseconds
    return sorted({*np.unique(work.priority[~work.fixed]).tolist()}, reverse=True)


def fill(work: Work, capacity: Integers, policy: str, memory: PriceMemory) -> WorkDecision:
    """Start waiting jobs that fit, at the prices of the last decision, without changing running jobs.

    Its memory is `memory`, because prices for a few jobs are not valid for all.
    """
    fixed = replace(work, fixed=work.held != WAITS)
    return replace(decide(fixed, capacity, policy, memory, steps=1), memory=memory)


def _tier(
    part: Work, jobs: Integers, left: Integers, policy: str, tier: int, above: WorkDecision, steps: int | None
) -> WorkDecision:
    steps = steps or _steps(part.jobs, tier in above.memory.devices)
    only_end = policy == "makespan"
    matching = price_work(part, left, above.memory.work, steps if only_end else steps // 3, within=only_end)
    hourly_price = part.price_per_hour if policy == "cost" and part.price_per_hour.any() else matching.price
    policy_input = build_input(part, matching, hourly_price, within=only_end)
    values = weighted_values(
        part, PRICED[policy](policy_input) if policy in PRICED else plugins.call_policy(policy, policy_input)
    )
    warm = above.memory.devices.get(tier, np.zeros(0))
    warm = warm if len(warm) == len(left) else np.zeros(len(left))
    cleared = prices.find_prices(values, part.devices, part.island, left, warm, steps)
    instance = Instance(values, part.devices, part.island, left, part.machines)
    option = above.option.copy()
    chosen = assign(instance, cleared, SWEEPS if steps > 1 else 0)
    option[jobs] = chosen.option
    memory = PriceMemory(matching.price, above.memory.devices | {tier: cleared.price})
    value, bound = above.value + instance.worth(chosen.option), above.bound + cleared.bound
    return WorkDecision(option, memory, value, bound, above.fault, _merge_nodes(above.nodes, jobs, chosen.nodes))


def _steps(jobs: int, warm: bool) -> int:
    return COLD_STEPS if not warm else FEW_STEPS if jobs > prices.MANY else WARM_STEPS


def weighted_values(work: Work, worth: Floats) -> Floats:
    """Return values (options, jobs): the policy's worth times the job's weight.

    0 where the job cannot run, at least a little where it can, and reduced by the cost of a start or move.
    """
    values = np.asarray(worth * work.weight, np.float64)
    if not (finite := np.isfinite(values)).all():
        values[~finite] = 0.0
    np.maximum(values, float(values.max(initial=0.0)) * MIN_VALUE, out=values)
    values *= work.possible
    runs = np.flatnonzero(work.held != WAITS)
    stays = values[work.held[runs], runs]
    remaining_s = np.minimum(RESIDENCE_S, work.best_s)
    start_factor = np.maximum(1.0 - work.restart_s / (work.restart_s + remaining_s), 0.02)
    values *= np.minimum(start_factor, 1.0 - MOVE_PENALTY)
    values[work.held[runs], runs] = stays
    return values


def _or_uniform(price: Floats, capacity: Integers) -> Floats:
    return price if len(price) == len(capacity) else np.ones(len(capacity))
