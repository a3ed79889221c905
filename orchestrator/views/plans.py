"""Explanations and offers of the planner: why a job can or cannot run, and where it could."""

from typing import Literal

from typing_extensions import TypedDict

from orchestrator.views.jobs import JobState
from orchestrator.views.values import AllocationView

RateSource = Literal["benchmark", "reported", "declared", "history", "estimated"]
OfferWhen = Literal["now", "preempts", "new_node", "waits", "closed", "never", "not_asked_for"]


class CandidateView(TypedDict):
    """A candidate of a job, and which devices can hold it now."""

    candidate: int
    """Number of the candidate, from 1."""
    kinds: list[str]
    count: int
    """Devices for each node; at least `min_count`."""
    min_count: int
    nodes: int
    pool: str
    """The pool that it requires, or empty."""
    fits: list[str]
    """Devices (NODE/KIND) that could hold it, or part of it, now."""
    refused: dict[str, str]
    """Other devices with the reason; the key "" has reasons about the entire fleet."""
    speed: dict[str, str]
    """Rate of the job's workload as text, with its source, for devices that fit."""
    exclusive: bool
    """Whether it needs nodes of its own."""


class StartView(TypedDict):
    """Devices for a job."""

    job: str
    candidate: int
    """Number of the candidate, from 1."""
    allocations: list[AllocationView]
    """One for each node, by rank."""
    reason: str
    aged: int
    """By how much its priority has risen by waiting."""


class ExplanationView(TypedDict):
    """What the next plan does with a job."""

    candidates: list[CandidateView]
    would_start: StartView | None
    """Where the next plan starts it; null if it waits or runs."""
    preempt: list[str]
    """Jobs that would have to stop."""
    impossible: str
    """Why no device here could ever run it; empty if one could."""
    late: str
    """By how much it will miss its deadline; empty if it can meet it or this cannot be estimated."""
    runs: StartView | None
    """The devices that it holds; the candidates then say where else it could run."""
    policy: str
    """Policy that orders jobs of equal priority: `scheduler.policy` of the fleet file."""
    policy_fault: str
    """Why the order of submission is used instead; empty if the policy works."""


class OtherJobView(TypedDict):
    """Another job that a change of the fleet affects."""

    job: str
    then: str
    """What would change for it."""


class ChangesEffect(TypedDict):
    """Changes of the fleet that were requested with `if`, and their effect on other jobs."""

    changes: list[str]
    others: list[OtherJobView]


_WithChanges = TypedDict("_WithChanges", {"if": ChangesEffect}, total=False)


class JobExplanation(ExplanationView, _WithChanges):
    """Why a job is in its state. With `if` in the request, everything is for the changed fleet, and `if` is present."""

    state: JobState
    reason: str
    missed: list[str]
    """What was missing when it last resumed: its newest checkpoint, or files."""


class RateView(TypedDict):
    """Rate of `devices` devices of a kind together. Only the source `benchmark` is a measurement of Polyfleet."""

    source: RateSource
    """Benchmark; steps per second of a running or ended job; the hours that the job declares; the time that ended jobs
    of the workload took; or an estimate."""
    per_s: float
    unit: str
    """What is counted: the item of a benchmark, such as sample; step; or job."""
    devices: int
    low: float | None
    """Start of the interval: of 95 % for a benchmark, of 90 % for an estimate."""
    high: float | None
    run: str
    """The benchmark run that measured it."""
    job: str
    """The job that reported it."""
    samples: int
    """Number of intervals between its steps in the mean."""
    basis: str
    """What an estimate follows from."""
    updated_at: str | None
    """Time of the measurement, ISO 8601 in UTC; null for other sources."""
    joules_per_item: float
    """0 if it was not measured."""


class OfferView(TypedDict):
    """A candidate of a job on the devices of one kind in a pool."""

    candidate: int
    """Number of the candidate, from 1."""
    pool: str
    kind: str
    count: int
    """Devices on each of `nodes`; at least `min_count`."""
    min_count: int
    nodes: int
    when: OfferWhen
    wait: str
    """`when` as text."""
    chosen: bool
    """Whether the next plan would use it."""
    allocations: list[AllocationView]
    """One for each node, by rank."""
    after: list[str]
    """Jobs that would have to stop."""
    ahead: int
    """Number of jobs earlier in the queue that accept these devices, too."""
    earliest_start_s: float | None
    """Expected seconds until running jobs have freed enough devices, 0 if it can start now. Jobs ahead may take them
    first. Null if the remaining time of these jobs is a guess, or if other causes decide."""
    speed: str
    """The rate as text, with its source."""
    rate: RateView | None
    """The best rate; null if there is none."""
    items_per_s: float | None
    """Rate of all devices together, if the workload was benchmarked."""
    price_per_hour: float | None
    price_per_million_items: float | None
    reason: str
    """Why it cannot start now."""


class OffersView(TypedDict):
    """Where a job could run, best first."""

    offers: list[OfferView]
    impossible: str
    """Why it could never run here; empty if it could."""
