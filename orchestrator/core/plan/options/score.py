"""Score the options of a job and give the reason for the best. The lowest score wins; of equal ones the first."""

from typing import Any

from orchestrator.core.model import Job
from orchestrator.core.plan.options.fit import is_named
from orchestrator.core.plan.options.gang import PlacementOption, count_missing, is_far
from orchestrator.core.plan.options.rates import Rates
from orchestrator.core.rate_source import UNMEASURED

WANTS_SPEED = frozenset({"throughput", "finish_time", "deadline"})

EXPLORATION_NOTE = "; tried, for a limited time, before kinds that were measured"


def rank(job: Job, candidate: int) -> int:
    """Return the position of a candidate. Ordered candidates rotate so that the search starts at `first_candidate`; of
    unordered ones only the one that failed last comes last.
    """
    if job.ordered:
        return (candidate - job.first_candidate) % len(job.candidates)
    return int(candidate == job.first_candidate - 1)


def price_per_hour(option: PlacementOption) -> float:
    return sum(have.price_per_hour for have in option.nodes) * option.count


def score(job: Job, option: PlacementOption, rates: Rates) -> tuple[Any, ...]:
    """Return the sort key of an option.

    In order: rank of the candidate, nodes to avoid, the objective, distance from its checkpoint, tightness of the fit,
    price, and missing data.
    """
    left_over = sum(len(have.free) - option.count for have in option.nodes)
    avoided = sum(have.node in job.avoid for have in option.nodes)
    price, to_fetch = price_per_hour(option), sum(count_missing(job.data, have) for have in option.nodes)
    away = any(is_far(job, have) for have in option.nodes)
    return (rank(job, option.candidate), avoided, *_objective(job, option, rates), away, left_over, price, to_fetch)


def _objective(job: Job, option: PlacementOption, rates: Rates) -> tuple[Any, ...]:
    """Return the part of the key for the objective: speed, cost per item (else per hour), or energy per item.

    Without measurements, accelerators come before CPUs, and kinds requested by name before others.
    """
    have = option.nodes[0]
    on_cpu = have.backend == "cpu"
    by_name = is_named(job.candidates[option.candidate], have)
    if job.objective == "cost":
        each = price_per_item(option, rates)
        return (each is None, each or 0.0, price_per_hour(option), on_cpu, not by_name)
    if job.objective == "energy":
        joules = rates.joules_per_item(option)
        return (not joules, joules, on_cpu, not by_name)
    if job.objective in WANTS_SPEED:
        return (-rates.expected(option), on_cpu, not by_name, -option.count)
    return (on_cpu, not by_name)


def price_per_item(option: PlacementOption, rates: Rates) -> float | None:
    rate = rates.measured(option)
    return price_per_hour(option) / 3600 / rate if rate else None


def reason(job: Job, option: PlacementOption, rates: Rates, now_s: float) -> str:
    """Return the reason for this placement; unknown figures are named as unknown."""
    have = option.nodes[0]
    which = f"candidate {option.candidate + 1} of {len(job.candidates)}: " if len(job.candidates) > 1 else ""
    where = f"{have.kind} in pool {have.pool}{_nearby_note(job, option)}"
    rate_text = rates.sentence(option, now_s)
    if job.objective == "cost":
        return f"{which}{where}, {_cost(option, rates, rate_text)}"
    if job.objective == "energy":
        return f"{which}{where}, {_energy(option, rates, rate_text)}"
    if job.objective in WANTS_SPEED:
        why = rate_text if rate_text != UNMEASURED else "the tightest fit: throughput of this job is unmeasured"
        return f"{which}{where}, {why}{EXPLORATION_NOTE if rates.is_exploration(option) else ''}"
    return f"{which}{where}, the tightest fit"


def _nearby_note(job: Job, option: PlacementOption) -> str:
    """Say whether the job's checkpoint or data is there already."""
    saved = bool(job.checkpoint_in) and not any(is_far(job, have) for have in option.nodes)
    cached = bool(job.data) and not any(count_missing(job.data, have) for have in option.nodes)
    present = ["its checkpoint is"] * saved + ["its data is cached"] * cached
    return f", where {' and '.join(present)}" if present else ""


def _cost(option: PlacementOption, rates: Rates, rate_text: str) -> str:
    price, each = price_per_hour(option), price_per_item(option, rates)
    if not price:
        return "which declares no price"
    return f"{price:.2f} per hour" + (f", {each * 1e6:.3g} per million items: {rate_text}" if each else "")


def _energy(option: PlacementOption, rates: Rates, rate_text: str) -> str:
    if joules := rates.joules_per_item(option):
        return f"{joules:.3g} J per item: {rate_text}"
    return "the tightest fit: the energy of this job is unmeasured"
