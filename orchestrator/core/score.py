"""Which of the places that fit is best, and the sentence saying why. Lower is better; of equals the first is taken."""

from typing import Any

from orchestrator.core.fit import asked_by_name
from orchestrator.core.gang import Option
from orchestrator.core.model import Job
from orchestrator.core.throughput import Rates, sentence

WANTS_SPEED = frozenset({"throughput", "finish_time"})


def rank(job: Job, candidate: int) -> int:
    """How late a candidate comes. Ordered ones turn so that the search starts at `first_candidate`; of the others only
    the one that ended badly last goes behind."""
    if job.ordered:
        return (candidate - job.first_candidate) % len(job.candidates)
    return int(candidate == job.first_candidate - 1)


def price_per_hour(option: Option) -> float:
    return sum(have.price_per_hour for have in option.nodes) * option.count


def score(job: Job, option: Option, rates: Rates) -> tuple[Any, ...]:
    """Rank of the candidate; nodes that failed it last come later; then what the objective asks for; then the tightest
    fit, then the price.
    """
    left_over = sum(len(have.free) - option.count for have in option.nodes)
    avoided = sum(have.node in job.avoid for have in option.nodes)
    return (rank(job, option.candidate), avoided, *_objective(job, option, rates), left_over, price_per_hour(option))


def _objective(job: Job, option: Option, rates: Rates) -> tuple[Any, ...]:
    """For speed what was measured fastest; for cost what an item costs, else an hour. Where nothing was measured, an
    accelerator before a CPU, and a kind asked for by name before one that matches.
    """
    have = option.nodes[0]
    on_cpu = have.backend == "cpu"
    by_name = asked_by_name(job.candidates[option.candidate], have)
    if job.objective == "cost":
        each = price_per_item(option, rates)
        return (each is None, each or 0.0, price_per_hour(option), on_cpu, not by_name)
    if job.objective in WANTS_SPEED:
        return (-rates.expected(option), on_cpu, not by_name, -option.count)
    return (on_cpu, not by_name)


def price_per_item(option: Option, rates: Rates) -> float | None:
    rate = rates.measured(option)
    return price_per_hour(option) / 3600 / rate if rate else None


def reason(job: Job, option: Option, rates: Rates, now_s: float) -> str:
    """Why this place, with what is not known said as such."""
    have = option.nodes[0]
    which = f"candidate {option.candidate + 1} of {len(job.candidates)}: " if len(job.candidates) > 1 else ""
    where = f"{have.kind} in pool {have.pool}"
    told = sentence(rates.throughput.of(job, option.candidate, have.kind), now_s)
    if job.objective == "cost":
        return f"{which}{where}, {_cost(option, rates, told)}"
    if job.objective in WANTS_SPEED:
        known = told if told != "unmeasured" else "the tightest fit: throughput of this job is unmeasured"
        return f"{which}{where}, {known}"
    return f"{which}{where}, the tightest fit"


def _cost(option: Option, rates: Rates, told: str) -> str:
    price, each = price_per_hour(option), price_per_item(option, rates)
    if not price:
        return "which declares no price"
    return f"{price:.2f} per hour" + (f", {each * 1e6:.3g} per million items: {told}" if each else "")
