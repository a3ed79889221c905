"""Which of the places that fit is best, and the sentence saying why. Lower is better; of equals the first is taken."""

from typing import Any

from orchestrator.core.fit import asked_by_name
from orchestrator.core.gang import Option
from orchestrator.core.model import Job

WANTS_SPEED = frozenset({"throughput", "finish_time"})


def rank(job: Job, candidate: int) -> int:
    """How late a candidate comes. Ordered ones turn so that the search starts at `first_candidate`; of the others only
    the one that ended badly last goes behind."""
    if job.ordered:
        return (candidate - job.first_candidate) % len(job.candidates)
    return int(candidate == job.first_candidate - 1)


def price_per_hour(option: Option) -> float:
    return sum(have.price_per_hour for have in option.nodes) * option.count


def score(job: Job, option: Option) -> tuple[Any, ...]:
    """Rank of the candidate; then what the objective asks for; then the tightest fit, then the price."""
    left_over = sum(len(have.free) - option.count for have in option.nodes)
    return (rank(job, option.candidate), *_objective(job, option), left_over, price_per_hour(option))


def _objective(job: Job, option: Option) -> tuple[Any, ...]:
    """An accelerator before a CPU, a kind asked for by name before one that matches; for cost the price first."""
    have = option.nodes[0]
    on_cpu = have.backend == "cpu"
    by_name = asked_by_name(job.candidates[option.candidate], have)
    if job.objective == "cost":
        return (price_per_hour(option), on_cpu, not by_name)
    if job.objective in WANTS_SPEED:
        return (on_cpu, not by_name, -option.count)
    return (on_cpu, not by_name)


def reason(job: Job, option: Option) -> str:
    """Why this place, with what is not known said as such."""
    have = option.nodes[0]
    which = f"candidate {option.candidate + 1} of {len(job.candidates)}: " if len(job.candidates) > 1 else ""
    where = f"{have.kind} in pool {have.pool}"
    if job.objective == "cost":
        price = price_per_hour(option)
        return f"{which}{where}, {price:.2f} per hour" if price else f"{which}{where}, which declares no price"
    if job.objective in WANTS_SPEED:
        return f"{which}{where}, the tightest fit: throughput of this job is unmeasured"
    return f"{which}{where}, the tightest fit"
