"""Reserve devices for a job that does not fit now, and choose the attempts that stop for it.

The rule is simple on purpose. A blocked job reserves devices at one place that could serve it: the one with the fewest
missing devices. No job after it in the policy's order gets those devices, so the number missing falls with every
attempt that ends there: a gang at the head of the queue starts, however many small jobs follow it.

Attempts that may stop for it: those of strictly lower priority, those of the same priority that a full decision would
place elsewhere (core/plan/moves.py), and those that run beyond the quota of their project, for a job that is entitled
to it (quota.py). They stop only if the job then fits, and no more of them than necessary. For a job that lacks quota,
attempts of its own project with lower priority stop, unless they can continue as borrowers; if there are none, the rest
of the quota is reserved for it, and no devices are. A job that can only borrow stops only borrowers of its own project
that have lower priority. A job in a pause after a failure reserves nothing.
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

MAX_HOLDERS = 3
"""Maximum number of holders of devices that a message names."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Reservation of `count` devices on each of `nodes` (devices ids) for candidate number `candidate`.

    `missing`: devices that will be neither free nor freeing after `victims` have stopped. `lacking` names the memory
    that some nodes lack, `held_elsewhere` what victims on other nodes hold. `borrows`: the
    job has no quota left for these devices.
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
    reservations = (
        _reserve_in(place.candidate, place.count, place.nodes, job, nodes, capacity, equals) for nodes in groups
    )
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
            need = minimum_count(want, nodes[0])  # the same on all nodes of an island
            reservation = _reserve_in(index, need, want.nodes, job, nodes, capacity, borrows=borrows)
            victims, devices, kind = reservation.victims, need * want.nodes, nodes[0].kind
            within = borrows or not lacks_quota or capacity.quota.is_within(job, devices, kind, victims)
            if within and not (borrows and reservation.missing):
                yield reservation


def _reserve_in(
    index: int,
    need: int,
    count: int,
    job: Job,
    nodes: list[Devices],
    capacity: FreeCapacity,
    equals: frozenset[str] = frozenset(),
    borrows: bool = False,
) -> Reservation:
    """Return a reservation of `need` devices on each of `count` of these nodes."""
    counts = {have.id: capacity.available_soon(have.id) for have in nodes}
    available = Availability(job.candidates[index], nodes, counts, capacity.memory)
    kind = nodes[0].kind if nodes else ""
    stoppable = _borrowers_below(job, capacity) if borrows else _stoppable(job, capacity, equals, kind)
    victims = _DeviceRequest(job, need, count, kind, capacity, borrows).fewest_victims(available, stoppable)
    for victim in victims:
        available.add(victim, 1)
    fullest = available.fullest(nodes, need, capacity.waits_on.get(job.id, ()))[:count]
    missing = sum(need - gets for _, gets in fullest)
    short = [machine(have) for have, gets in fullest if available.lacks_memory(have.id, need, gets)]
    short_of = f"memory of machine {short[0]}" if short else ""
    elsewhere = "memory of its machine" if all(map(available.is_useful, victims)) else "the quota of its project"
    ids = tuple(have.id for have, _ in fullest)
    return Reservation(index, need, ids, tuple(victims), missing, short_of, elsewhere, borrows)


def _stoppable(job: Job, capacity: FreeCapacity, equals: frozenset[str], kind: str) -> list[Running]:
    """Return attempts of lower priority, those in `equals`, and those that borrow quota of this kind."""
    lower = capacity.lower_priority(job.priority)
    others = (
        capacity.running[name] for name in sorted({*equals, *capacity.quota.borrowed}) if name in capacity.running
    )
    return [
        *lower,
        *(r for r in others if r.priority >= job.priority and _may_be_stopped(r, job, capacity, equals, kind)),
    ]


def _borrowers_below(job: Job, capacity: FreeCapacity) -> list[Running]:
    return [r for r in capacity.lower_priority(job.priority) if capacity.quota.is_borrower_below(r, job)]


def _may_be_stopped(attempt: Running, job: Job, capacity: FreeCapacity, equals: frozenset[str], kind: str) -> bool:
    equal = attempt.job in equals and attempt.preemptible and attempt.priority == job.priority
    return equal or capacity.quota.must_return(attempt, job, kind)


@dataclass(frozen=True, slots=True)
class _DeviceRequest:
    """Request for `need` devices of `kind` on each of `nodes` nodes. `borrows`: whatever quota is left."""

    job: Job
    need: int
    nodes: int
    kind: str
    capacity: FreeCapacity
    borrows: bool

    def fewest_victims(self, available: Availability, lower: list[Running]) -> list[Running]:
        """Return a minimal set of attempts to stop, or [] if stopping all of them is not enough.

        Those that continue running first: those that do not borrow, since others stop borrowers, then higher priority,
        then submitted earlier, then by name.
        """
        helpful = [r for r in lower if self._is_useful(r, available)]
        left, victims = available.copy(), list(helpful)
        for attempt in helpful:
            left.add(attempt, 1)
        if not self._is_enough(left, victims):
            return []
        for attempt in sorted(helpful, key=lambda r: (self._will_borrow(r), -r.priority, r.order, r.job)):
            left.add(attempt, -1)
            victims.remove(attempt)
            if not self._is_enough(left, victims):
                left.add(attempt, 1)
                victims.append(attempt)
        return victims

    def _is_useful(self, attempt: Running, available: Availability) -> bool:
        """Return True if the end of this attempt frees devices, memory or quota that the job needs and may have."""
        return available.is_useful(attempt) or (
            self.capacity.quota.counts_against(self.job, attempt, self.kind) and not self._is_within_quota(())
        )

    def _will_borrow(self, attempt: Running) -> bool:
        return self.capacity.quota.is_borrower_beside(attempt, self.job, self.need * self.nodes, self.kind)

    def _is_enough(self, available: Availability, victims: Collection[Running]) -> bool:
        return available.nodes(self.need) >= self.nodes and self._is_within_quota(victims)

    def _is_within_quota(self, victims: Collection[Running]) -> bool:
        return self.borrows or self.capacity.quota.is_within(self.job, self.need * self.nodes, self.kind, victims)


def _preference(job: Job, reservation: Reservation, waits_on: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Sort key: fewest missing devices, then victims of the lowest priority, then the preferred candidate.

    Of equal ones, the nodes for which the job waited in the previous plan come first: else devices that are reserved
    for it would be released to the jobs behind it whenever equal nodes appear.
    """
    priorities = sorted((victim.priority for victim in reservation.victims), reverse=True)
    elsewhere = reservation.nodes != waits_on
    best = rank(job, reservation.candidate)
    return (reservation.missing, priorities, best, elsewhere, reservation.nodes, reservation.candidate)
