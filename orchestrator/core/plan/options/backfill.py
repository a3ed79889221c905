"""Reserve devices for a job that does not fit now.

The rule is simple on purpose. A blocked job reserves devices at one place that could serve it: the one with the fewest
missing devices. No job after it in the policy's order gets those devices, so the number missing falls with every
attempt that ends there: a gang at the head of the queue starts, however many small jobs follow it. Attempts stop
for a job after it only if they free more devices there than the gang still lacks: the first ones go to the gang.

Which attempts stop for it is decided in victims.py. They stop only if the job then fits, and no more of them than
necessary. For a job that lacks quota, and for which no attempt of its project may stop, the rest of the quota is
reserved, and no devices are. A job that can only borrow reserves devices only if it then waits for nothing but attempts
that are stopping. A job in a pause after a failure reserves nothing.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.core.model import Devices, Job, Preempt, Running
from orchestrator.core.placement_slots import Place
from orchestrator.core.plan.options.capacity import FreeCapacity
from orchestrator.core.plan.options.fit import minimum_count, vendor_change_reason
from orchestrator.core.plan.options.host_memory import Availability, machine
from orchestrator.core.plan.options.score import rank
from orchestrator.core.plan.options.victims import DeviceRequest, fewest_victims

MAX_HOLDERS = 3
"""Maximum number of holders of devices that a message names."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Reservation of `count` devices on each of `nodes` (devices ids) for candidate number `candidate`.

    `missing`: devices that will be neither free nor freeing after `victims` have stopped. `lacking` names the memory
    that some nodes lack, `held_elsewhere` what victims on other nodes hold. `borrows`: the job has no quota left for
    these devices.
    """

    candidate: int
    count: int
    nodes: tuple[str, ...]
    victims: tuple[Running, ...]
    missing: int
    lacking: str = ""
    held_elsewhere: str = ""
    borrows: bool = False


def find_reservation(job: Job, capacity: FreeCapacity, borrows: bool = False) -> Reservation | None:
    """Return the best reservation for a job, None if no node that takes jobs could ever hold it, or quota is lacking.

    `borrows`: it has no quota left, and only waits for attempts that are stopping or can be stopped for it.
    """
    waits_on = capacity.waits_on.get(job.id, ())
    return min(_reservations(job, capacity, borrows), key=lambda c: _preference(job, c, waits_on), default=None)


def reserve_quota(job: Job, capacity: FreeCapacity) -> None:
    """Reserve the rest of the project's quota for a job that needs more, so that smaller jobs do not use it first."""
    for index in sorted(range(len(job.candidates)), key=lambda index: rank(job, index)):
        want = job.candidates[index]
        for nodes in _candidate_nodes(job, index, capacity):
            have = nodes[0]
            devices = minimum_count(want, have) * want.nodes
            if capacity.quota.refusal_reason(job, devices, have.kind) and capacity.quota.could_ever(
                job, devices, have.kind
            ):
                capacity.quota.reserve(job, have.kind, devices)
                return


def reservation_at(
    job: Job, place: Place, capacity: FreeCapacity, equals: frozenset[str] = frozenset()
) -> Reservation | None:
    """Return a reservation at `place`, or None. Attempts of the jobs in `equals` may stop for it, too."""
    groups = [nodes for nodes in node_groups_at(job, place, capacity) if len(nodes) >= place.nodes]
    if not groups or capacity.quota.refusal_reason(job, place.devices, place.island.kind):
        return None
    kind = place.island.kind
    request = DeviceRequest(job, place.candidate, place.count, place.nodes, kind, capacity, equals)
    reservations = (_reserve_in(request, nodes) for nodes in groups)
    return min(reservations, key=lambda reservation: _preference(job, reservation))


def can_stop_any(job: Job, capacity: FreeCapacity, equals: frozenset[str] = frozenset()) -> bool:
    """Return True if any attempt may be stopped for the job. Cheap, because it is called often."""
    return bool(equals or capacity.quota.borrowed or capacity.lower_priority(job.priority))


def node_groups_at(job: Job, place: Place, capacity: FreeCapacity) -> list[list[Devices]]:
    """Return the nodes that take jobs now and could be part of `place`: one group, or one for each TPU slice."""
    want = job.candidates[place.candidate]
    islands = capacity.candidate_nodes(want).islands
    own = replace(place.island, per_node=place.count if want.exclusive else 0)
    if want.nodes == 1:
        groups = [islands[own]] if own in islands else []
    else:
        groups = [ids for island, ids in islands.items() if replace(island, tpu_slice="") == own]
    if not groups or vendor_change_reason(job, capacity.devices[groups[0][0]]):  # an island has one vendor
        return []
    return [[capacity.devices[devices_id] for devices_id in ids] for ids in groups]


def apply(
    job: Job, reservation: Reservation, capacity: FreeCapacity, equals: Mapping[str, str] | None = None
) -> list[Preempt]:
    """Apply a reservation and return the attempts to stop. `equals`: reasons for jobs of the same priority."""
    for victim in reservation.victims:
        capacity.count_as_stopping(victim)
    for devices_id in reservation.nodes:
        capacity.reserve(job.id, job.candidates[reservation.candidate], devices_id, reservation.count)
        kind = capacity.devices[devices_id].kind
        if not reservation.borrows:
            capacity.quota.reserve(job, kind, reservation.count, soon=not reservation.missing)
    why = f"{job.id} (priority {job.priority}) needs {reservation.count} of {', '.join(reservation.nodes)}"
    return [Preempt(victim.job, job.id, (equals or {}).get(victim.job, why)) for victim in reservation.victims]


def waiting_sentence(reservation: Reservation, capacity: FreeCapacity, equals: Collection[str] = ()) -> str:
    """Say what a job with a reservation waits for; `explain` shows it beside the refusals of single devices."""
    where = ", ".join(reservation.nodes)
    if reservation.victims:
        lower = "" if any(victim.job in equals for victim in reservation.victims) else " of lower priority"
        if not all(any(devices_id in reservation.nodes for devices_id, _ in v.allocation) for v in reservation.victims):
            lower += f", which hold {reservation.held_elsewhere},"
        return f"waits for {', '.join(v.job for v in reservation.victims)}{lower} to save and stop on {where}"
    if not reservation.missing:
        return f"waits for attempts that are stopping on {where}"
    if reservation.lacking:
        return f"waits for {reservation.lacking} on {where}"
    needed = reservation.count * len(reservation.nodes)
    if holders := capacity.holders(reservation.nodes):
        where += f", {held_by(holders)}"
    if reservation.missing == needed:
        return f"waits for {needed} device{'s' if needed > 1 else ''} on {where}"
    return f"waits for {reservation.missing} of {needed} devices on {where}; the others are reserved for it"


def held_by(jobs: list[str]) -> str:
    more = f" and {len(jobs) - MAX_HOLDERS} more" if len(jobs) > MAX_HOLDERS else ""
    return f"held by {', '.join(jobs[:MAX_HOLDERS])}{more}"


def _candidate_nodes(job: Job, index: int, capacity: FreeCapacity) -> Iterator[list[Devices]]:
    """Yield lists of nodes that could hold candidate number `index` together; each has one kind and vendor."""
    want = job.candidates[index]
    for ids in capacity.candidate_nodes(want).islands.values():
        nodes = [capacity.devices[devices_id] for devices_id in ids]
        if len(nodes) >= want.nodes and not vendor_change_reason(job, nodes[0]):
            yield nodes


def _reservations(job: Job, capacity: FreeCapacity, borrows: bool) -> Iterator[Reservation]:
    for index, want in enumerate(job.candidates):
        for nodes in _candidate_nodes(job, index, capacity):
            lacks_quota = bool(capacity.quota.minimum_refusal(job, want, nodes[0]))
            if borrows != (lacks_quota and capacity.quota.may_borrow(job)):  # borrowers come after all others
                continue
            count = minimum_count(want, nodes[0])  # the same on all nodes of an island
            request = DeviceRequest(job, index, count, want.nodes, nodes[0].kind, capacity, borrows=borrows)
            reservation = _reserve_in(request, nodes)
            is_possible = not lacks_quota or request.is_within_quota(reservation.victims)
            if is_possible and not (borrows and reservation.missing):
                yield reservation


def _reserve_in(request: DeviceRequest, nodes: list[Devices]) -> Reservation:
    """Return a reservation of the devices on some of these nodes, which could serve the request together."""
    job, count, memory = request.job, request.count, request.capacity.memory
    counts = {have.id: request.capacity.available_soon(have.id) for have in nodes}
    available = Availability(job.candidates[request.candidate], nodes, counts, memory)
    victims = fewest_victims(request, available)
    for victim in victims:
        available.add(victim, 1)
    fullest = available.fullest(nodes, count, request.capacity.waits_on.get(job.id, ()))[: request.nodes]
    missing = sum(count - max(0, gets) for _, gets in fullest)
    short = [machine(have) for have, gets in fullest if available.lacks_memory(have.id, count, gets)]
    short_of = f"memory of machine {short[0]}" if short else ""
    elsewhere = "memory of its machine" if all(map(available.is_useful, victims)) else "the quota of its project"
    ids = tuple(have.id for have, _ in fullest)
    return Reservation(
        request.candidate, count, ids, tuple(victims), missing, short_of, elsewhere, borrows=request.borrows
    )


def _preference(job: Job, reservation: Reservation, waits_on: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Sort key: fewest missing devices, then victims of the lowest priority, then the preferred candidate.

    Of equal ones, the nodes for which the job waited in the previous plan come first: else devices that are reserved
    for it would be released to the jobs behind it whenever equal nodes appear.
    """
    priorities = sorted((victim.priority for victim in reservation.victims), reverse=True)
    elsewhere = reservation.nodes != waits_on
    best = rank(job, reservation.candidate)
    return (reservation.missing, priorities, best, elsewhere, reservation.nodes, reservation.candidate)
