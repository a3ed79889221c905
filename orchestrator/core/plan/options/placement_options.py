"""Find the placements where a job could start now, and the reasons against all others."""

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.core.model import Candidate, Devices, Job
from orchestrator.core.placement_slots import Island, Place
from orchestrator.core.plan.options import backfill
from orchestrator.core.plan.options.capacity import FreeCapacity
from orchestrator.core.plan.options.fit import (
    REQUEST_RULES,
    enough_free,
    minimum_count,
    refusal_reason,
    vendor_change_reason,
)
from orchestrator.core.plan.options.gang import PlacementOption, best_option, too_few_nodes_reason

Reasons = dict[tuple[int, str], str]
"""(candidate number, devices id, or "" for all) -> the reason for a refusal."""

MAX_NAMED = 2
NO_DEVICES = "no node has reported its devices yet"


def option_at(job: Job, place: Place, capacity: FreeCapacity, nodes: tuple[str, ...] = ()) -> PlacementOption | None:
    """Return an option at exactly `place` if it is free, else None; only on `nodes` (devices ids) unless empty."""
    want = job.candidates[place.candidate]
    exact = want if want.exclusive else replace(want, count=place.count, min_count=place.count)
    if capacity.quota.refusal_reason(job, place.devices, place.island.kind):
        return None
    for group in backfill.node_groups_at(job, place, capacity):
        able = [have for have in group if have.id in nodes] if nodes else group
        need = minimum_count(exact, able[0]) if able else 0
        fits = [have for have in capacity.memory.limit_free(exact, able, need) if len(have.free) >= need]
        if option := best_option(place.candidate, exact, fits, job):
            return option
    return None


def list_options(job: Job, capacity: FreeCapacity) -> list[PlacementOption]:
    """Return where `job` could start now: the best option of each candidate and island."""
    fewest = job.objective == "cost"
    options = [
        best_option(index, own, nodes, job, fewest)
        for index, want in enumerate(job.candidates)
        for nodes in _fits(index, want, job, capacity).values()
        if (own := capacity.quota.narrow(job, want, nodes[0]))  # an island has one kind
    ]
    return [one for one in options if one]


def _fits(index: int, want: Candidate, job: Job, capacity: FreeCapacity) -> dict[Island, list[Devices]]:
    """Return, by island, the nodes with enough free devices and memory for their part of the candidate."""
    by_island: dict[Island, list[Devices]] = {}
    for island, ids in capacity.candidate_nodes(want).islands.items():
        first = capacity.devices[ids[0]]  # an island has one vendor, and equal nodes if `exclusive`
        if not vendor_change_reason(job, first):
            need = minimum_count(want, first)
            able = [have for i in ids if len((have := capacity.devices[i]).free) >= need]
            by_island[island] = [
                have for have in capacity.memory.limit_free(want, able, need) if len(have.free) >= need
            ]
    return {island: nodes for island, nodes in by_island.items() if nodes}


def refusal_reasons(job: Job, capacity: FreeCapacity) -> Reasons:
    """Return the reasons against all devices and islands; last, those against devices of other kinds than requested."""
    if not capacity.devices:
        return {(index, ""): NO_DEVICES for index in range(len(job.candidates))}
    reasons: Reasons = {}
    not_requested: Reasons = {}
    for index, want in enumerate(job.candidates):
        places = capacity.candidate_nodes(want)
        for why, ids in places.refused:
            also = not_requested if refusal_reason(want, capacity.devices[ids[0]], REQUEST_RULES) else reasons
            also |= dict.fromkeys([(index, devices_id) for devices_id in ids], why)
        for devices_id in (devices_id for ids in places.islands.values() for devices_id in ids):
            have = capacity.devices[devices_id]
            why = (
                vendor_change_reason(job, have)
                or capacity.quota.minimum_refusal(job, want, have)
                or enough_free(want, have)
            )
            if why := why or capacity.memory.refusal_reason(want, have, minimum_count(want, have)):
                reasons[index, devices_id] = why + capacity.reservation_note(devices_id)
        fits = _fits(index, want, job, capacity)
        if all(len(nodes) < want.nodes for nodes in fits.values()) and (short := too_few_nodes_reason(want, fits)):
            reasons[index, ""] = short
    return reasons | not_requested


def fleet_reasons(job: Job, reasons: Reasons) -> str:
    """Return the reasons that concern the fleet as a whole, e.g. what the job waits for; "" if there are none."""
    each = (reasons.get((index, ""), "") for index in range(len(job.candidates)))
    return "; ".join(list(dict.fromkeys(filter(None, each)))[:MAX_NAMED])


def summary(job: Job, reasons: Reasons) -> str:
    """Say in one sentence why a job waits: reasons about the fleet as a whole, else those about single devices.

    Devices that the job accepts come first.
    """
    if general := fleet_reasons(job, reasons):
        return general
    each = list(dict.fromkeys(f"{devices_id} {text}" for (_, devices_id), text in reasons.items()))
    more = [f"`polyfleet explain` shows {len(each) - MAX_NAMED} more"] if len(each) > MAX_NAMED else []
    return "; ".join([*each[:MAX_NAMED], *more])


def with_notes(
    why_not: Mapping[str, Reasons], notes: Mapping[str, Mapping[tuple[int, str], str]]
) -> dict[str, Reasons]:
    """Return `why_not` with notes about nodes that may be started for these jobs put before the reasons."""
    both = {
        job: why | {key: _joined(text, why.get(key, "")) for key, text in notes[job].items()}
        for job, why in why_not.items()
        if job in notes
    }
    return {**why_not, **both}


def _joined(note: str, why: str) -> str:
    return note if why in ("", NO_DEVICES) else f"{note}; {why}"
