"""Where a job could start now, and why it could not start anywhere else."""

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.core import backfill
from orchestrator.core.capacity import Room
from orchestrator.core.fit import REQUESTED, enough_free, least, other_vendor, refusal
from orchestrator.core.gang import Option, option, too_few_nodes
from orchestrator.core.model import Candidate, Devices, Job
from orchestrator.core.placement_slots import Island, Place

Reasons = dict[tuple[int, str], str]
"""(candidate number, devices id, or "" for all) -> the refusing sentence."""

MAX_NAMED = 2
NO_DEVICES = "no node has reported its devices yet"


def there(job: Job, place: Place, room: Room, nodes: tuple[str, ...] = ()) -> Option | None:
    """Exactly there, where that is free; on the nodes with these devices ids if any are given."""
    want = job.candidates[place.candidate]
    exact = want if want.exclusive else replace(want, count=place.count, min_count=place.count)
    if room.quota.refusal(job, place.devices, place.island.kind):
        return None
    able = backfill.nodes_of(job, place, room)
    able = [have for have in able if have.id in nodes] if nodes else able
    need = least(exact, able[0]) if able else 0
    fits = [have for have in room.memory.limited(exact, able, need) if len(have.free) >= need]
    return option(place.candidate, exact, fits, job)


def options_of(job: Job, room: Room) -> list[Option]:
    """All places where `job` could start now: the best of each candidate and island."""
    fewest = job.objective == "cost"
    found = [
        option(index, own, nodes, job, fewest)
        for index, want in enumerate(job.candidates)
        for nodes in _fits(index, want, job, room).values()
        if (own := room.quota.narrowed(job, want, nodes[0]))  # an island has one kind
    ]
    return [one for one in found if one]


def _fits(index: int, want: Candidate, job: Job, room: Room) -> dict[Island, list[Devices]]:
    """Nodes by island with enough free for a part of it."""
    found: dict[Island, list[Devices]] = {}
    for island, ids in room.places(want).islands.items():
        first = room.devices[ids[0]]  # an island has one vendor; whole nodes of one are equally large
        if not other_vendor(job, first):
            need = least(want, first)
            able = [have for i in ids if len((have := room.devices[i]).free) >= need]
            found[island] = [have for have in room.memory.limited(want, able, need) if len(have.free) >= need]
    return {island: nodes for island, nodes in found.items() if nodes}


def refusals(job: Job, room: Room) -> Reasons:
    """Why all other places are none; last, why devices that the job does not ask for are none."""
    if not room.devices:
        return {(index, ""): NO_DEVICES for index in range(len(job.candidates))}
    reasons: Reasons = {}
    of_others: Reasons = {}
    for index, want in enumerate(job.candidates):
        places = room.places(want)
        for why, ids in places.refused:
            also = of_others if refusal(want, room.devices[ids[0]], REQUESTED) else reasons
            also |= dict.fromkeys([(index, devices_id) for devices_id in ids], why)
        for devices_id in (devices_id for ids in places.islands.values() for devices_id in ids):
            have = room.devices[devices_id]
            why = other_vendor(job, have) or room.quota.needs(job, want, have) or enough_free(want, have)
            if why := why or room.memory.refusal(want, have, least(want, have)):
                reasons[index, devices_id] = why + room.note(devices_id)
        fits = _fits(index, want, job, room)
        if all(len(nodes) < want.nodes for nodes in fits.values()) and (short := too_few_nodes(want, fits)):
            reasons[index, ""] = short
    return reasons | of_others


def whole(job: Job, reasons: Reasons) -> str:
    """What is told of the whole fleet: what it waits for, above all. "" where only single devices are spoken of."""
    each = (reasons.get((index, ""), "") for index in range(len(job.candidates)))
    return "; ".join(list(dict.fromkeys(filter(None, each)))[:MAX_NAMED])


def summary(job: Job, reasons: Reasons) -> str:
    """Why it waits, in one sentence: what is told of the whole fleet, else what devices lack, each by its name, first
    those that it asks for.
    """
    if told := whole(job, reasons):
        return told
    each = list(dict.fromkeys(f"{devices_id} {text}" for (_, devices_id), text in reasons.items()))
    more = [f"{len(each) - MAX_NAMED} more are told by `polyfleet explain`"] if len(each) > MAX_NAMED else []
    return "; ".join([*each[:MAX_NAMED], *more])


def noted(why_not: Mapping[str, Reasons], notes: Mapping[str, Mapping[tuple[int, str], str]]) -> dict[str, Reasons]:
    """`why_not` with what is told of nodes that may be started for these jobs."""
    both = {
        job: why | {key: _joined(text, why.get(key, "")) for key, text in notes[job].items()}
        for job, why in why_not.items()
        if job in notes
    }
    return {**why_not, **both}


def _joined(note: str, why: str) -> str:
    return note if why in ("", NO_DEVICES) else f"{note}; {why}"
