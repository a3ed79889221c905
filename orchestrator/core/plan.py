"""The decision: a snapshot in, a plan out. No clock, no I/O, no chance.

Priorities are strict tiers, the highest first. In a tier the policy says whose turn it is, and for jobs of which it is
known how long they run where, at which place; here they find their nodes. What does not fit waits for a place that is
kept for it (core/backfill.py), and every refusal has its sentence.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from orchestrator.core import backfill, exchanges, moves, tiers
from orchestrator.core.capacity import Room
from orchestrator.core.expected_duration import expected, tier
from orchestrator.core.exploration import Exploration
from orchestrator.core.gang import Option
from orchestrator.core.model import Job, Plan, Preempt, Snapshot, Start
from orchestrator.core.placement_options import Reasons, options_of, refusals, there
from orchestrator.core.placement_slots import Place, Reserved
from orchestrator.core.planner.job_order import Leave, Turn, turn
from orchestrator.core.policies import fifo
from orchestrator.core.score import reason, score
from orchestrator.core.throughput import Rates

Shape = tuple[object, ...]
"""Equal for jobs that a plan treats alike."""

IN_ORDER = frozenset({"fifo", "priority"})


def plan(snapshot: Snapshot, *, full: bool = False, most: int | None = None) -> Plan:
    """What to start and whom to ask to stop, and why not the rest. `full`: equals may be stopped or moved where the
    policy gains more by that than it costs; else only what is free is filled, and the less urgent make room.

    After `most` starts the others wait for the next plan: whoever makes plans has other things to do as well.
    """
    return _Planning(snapshot, full, most).plan()


class _Planning:
    def __init__(self, snapshot: Snapshot, full: bool, most: int | None):
        self.seen, self.full, self.most = snapshot, full, most
        self.room, self.expect, self.explored = Room(snapshot), expected(snapshot), Exploration(snapshot)
        self.start: list[Start] = []
        self.preempt: list[Preempt] = []
        self.why_not: dict[str, Reasons] = {}
        self.claimed: set[str] = set()
        self.blocked: dict[Shape, tuple[int, Reasons]] = {}
        self.tight: dict[Shape, int] = {}
        self.memory = replace(snapshot.memory, reserved=moves.still(snapshot))
        self.value = self.bound = 0.0
        self.decided = False

    def plan(self) -> Plan:
        moves.keep_for_those_that_stop(self.seen, self.memory.reserved, self.room)
        queue = fifo.fifo(self.seen)
        pauses = tiers.pauses(queue, self.seen)
        self.why_not |= pauses
        waiting = [job for job in queue if job.id not in pauses] if pauses else queue
        by_value = self.seen.policy not in IN_ORDER
        movable = moves.movable(self.seen, self.room) if self.full and by_value else []
        for at, jobs in tiers.tiers(waiting, self.seen, movable):
            if self.is_full:
                break
            self._tier(at, jobs)
        self._borrow(waiting)
        found = Plan(tuple(self.start), tuple(self.preempt), self.why_not, self.memory, self.value, self.bound)
        return replace(found, memory=replace(self.memory, gap=found.gap)) if self.full else found

    @property
    def is_full(self) -> bool:
        return len(self.start) == self.most

    def _tier(self, at: int, jobs: list[Job]) -> None:
        if self.seen.policy in IN_ORDER:
            self._place_all(jobs)
            return
        ahead = self._ahead(at, jobs)
        for job in ahead:
            self._place_reserved(job)
        early = {job.id for job in ahead}
        left = [job for job in jobs if job.id not in early] if early else jobs
        movable = [r for r in moves.movable(self.seen, self.room) if r.priority == at] if self.full else []
        if not left and not movable:
            return
        if not self.decided:
            self.memory = replace(self.memory, fault="")  # what tiers of this plan find counts
        self.decided = True
        seen = replace(self.seen, memory=self.memory)
        said = turn(seen, left, movable, self.room, at, self.expect, self.full)
        self.memory, self.value, self.bound = said.memory, self.value + said.value, self.bound + said.bound
        scattered = self._place_as_decided(said)
        self._move(said.leaves)
        self._place_all(job for job in scattered if job.id not in said.nodes)
        # Other jobs took the memory that was reserved for these jobs. They keep their place in the queue.
        late = {job.id for job in scattered if job.id in said.nodes}
        chosen = {job.id for job in said.first} - late
        self._place_then_wait(job for job in left if job.id not in chosen)

    def _ahead(self, at: int, jobs: list[Job]) -> list[Job]:
        """Those for which others stopped, then those that have waited too long."""
        drains_s = self.memory.drains_s.get(at, ())
        reserved = [job for job in jobs if job.id in self.memory.reserved]
        starve = (job for job in jobs if moves.starves(job, self.seen, self.expect, drains_s))
        return [*reserved, *(job for job in starve if job.id not in self.memory.reserved)]

    def _place_all(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if self.is_full:
                return
            self._place(job)

    def _place_then_wait(self, jobs: Iterable[Job]) -> None:
        """Nothing is kept from an equal: whose turn it is was decided. Then devices are kept from lower priorities."""
        blocked = [(job, shape) for job in jobs if not self._fits_now(job, shape := self.room.shape(job))]
        for job, shape in blocked:
            if self.is_full:
                return
            self._wait(job, shape)

    def _borrow(self, waiting: list[Job]) -> None:
        """Beyond the quota of their project jobs get what is idle after all others; nobody stops for them."""
        may = [job for job in waiting if self.room.quota.may_borrow(job)] if self.room.quota.lends else []
        self.room.quota.lent = True
        for job in self._without_place(may):
            if not self.is_full and self._started(job):
                self.why_not.pop(job.id, None)
        self.room.quota.lent = False
        for job in self._without_place(may):
            if not self.is_full:
                self.why_not[job.id] = own = dict(self.why_not.get(job.id, {}))  # those of jobs alike are one object
                self._claim(job, own, own=True)

    def _without_place(self, jobs: list[Job]) -> list[Job]:
        """Neither started nor waiting for devices that are kept for them."""
        placed = {start.job for start in self.start} | self.claimed
        return [job for job in jobs if job.id not in placed]

    def _place_reserved(self, job: Job) -> None:
        kept = self.memory.reserved.get(job.id)
        if not self.is_full and not (kept and self._placed_there(job, kept.place, moves.NOBODY)):
            self._place(job)

    def _place_as_decided(self, said: Turn) -> list[Job]:
        """Those that find no place: enough may be free for them, but not where it would have to be. Nodes that were
        decided are given away before others choose theirs.
        """
        leaves, left = moves.Leaves(said.leaves), []
        for job in sorted(said.first, key=lambda job: not (job.id in said.nodes and job.id in said.strictly)):
            if self.is_full:
                break
            if not self._placed_as(job, said, leaves):
                left.append(job)
        return left

    def _placed_as(self, job: Job, said: Turn, leaves: moves.Leaves) -> bool:
        place, strictly = said.places[job.id], job.id in said.strictly
        if strictly and self._placed_there(job, place, leaves, said.nodes.get(job.id, ())):
            return True
        return self._started(job) or (not strictly and self._waits_there(job, place, leaves))

    def _placed_there(self, job: Job, place: Place, leaves: moves.Leaves, nodes: tuple[str, ...] = ()) -> bool:
        if found := there(job, place, self.room, nodes) or (there(job, place, self.room) if nodes else None):
            self._begin(job, found)
        return bool(found) or self._waits_there(job, place, leaves)

    def _waits_there(self, job: Job, place: Place, leaves: moves.Leaves) -> bool:
        """Whether attempts stop for it there, from now on or since it was decided: then nothing is missing any more."""
        equals, reserved = leaves.up_to(job.priority), job.id in self.memory.reserved
        if not (reserved or backfill.could_stop(job, self.room, equals)):
            return False
        claimed = backfill.claim_at(job, place, self.room, equals)
        if claimed is None or claimed.missing or not (claimed.victims or reserved):
            return False
        why = leaves.sentences(job, claimed, self.expect)
        self.preempt += backfill.apply(job, claimed, self.room, why)
        self.claimed.add(job.id)
        self.why_not[job.id] = {(claimed.candidate, ""): backfill.sentence(claimed, self.room, why)}
        self._reserve(job.id, place)
        return True

    def _begin(self, job: Job, best: Option, rates: Rates | None = None) -> None:
        rates = rates or Rates.of(job, [best], self.seen.throughput, self.seen.history)
        self.explored.began(job, best)
        self.room.take(job.candidates[best.candidate], best)
        self.room.quota.take(job, best)
        told, aged = reason(job, best, rates, self.seen.wall_s), tier(job, self.seen) - job.priority
        if self.room.quota.lent and (more := self.room.quota.beyond(job, best)):
            told += f"; {more}: others may take them back"
        self.start.append(Start(job.id, best.candidate, best.leases, told, aged))
        self._forget(job.id)

    def _place(self, job: Job) -> None:
        """Anywhere it fits; else it waits at the place that can serve it first."""
        if not self._fits_now(job, shape := self.room.shape(job)):
            self._wait(job, shape)

    def _fits_now(self, job: Job, shape: Shape) -> bool:
        """It is started, if so. Where one like it did not fit, nothing has changed until something is taken or kept."""
        if self.is_full or self.tight.get(shape) == self.room.version:
            return False
        if self._started(job):
            return True
        self.tight[shape] = self.room.version
        return False

    def _wait(self, job: Job, shape: Shape) -> None:
        before, reasons = self.blocked.get(shape, (-1, {}))
        if before != self.room.version:  # else one like it was blocked, and nothing has changed since
            before, reasons = self.room.version, refusals(job, self.room)
            self._claim(job, reasons)
            self.blocked[shape] = (before, reasons)
        self.why_not[job.id] = reasons

    def _claim(self, job: Job, reasons: Reasons, own: bool = False) -> None:
        """`own`: attempts of its project may stop for it although it may borrow."""
        if claimed := backfill.claim(job, self.room, own):
            self.preempt += backfill.apply(job, claimed, self.room)
            self.claimed.add(job.id)
            reasons[claimed.candidate, ""] = backfill.sentence(claimed, self.room, self.room.quota.borrowed)
        elif not own:
            backfill.keep_quota(job, self.room)

    def _started(self, job: Job) -> bool:
        if options := options_of(job, self.room):
            over = self.explored.over(job, options)
            rates = Rates.of(job, options, self.seen.throughput, self.seen.history, over)
            self._begin(job, min(options, key=lambda o: score(job, o, rates)), rates)
        return bool(options)

    def _move(self, leaves: Mapping[str, Leave]) -> None:
        for move in exchanges.worth(leaves, self.seen, self.room):
            job, place = move.leave.attempt.asked, move.leave.place
            assert place is not None and job is not None
            if self.room.quota.refusal(job, place.devices, place.island.kind, move.leave.attempt):
                continue
            self.room.quota.keep_more(job, place.island.kind, place.devices, move.leave.attempt)
            self.room.stop(move.leave.attempt)
            for victim in move.victims:
                self.room.stop(victim.attempt)
                why = exchanges.makes_room(victim, move, self.seen)
                self.preempt.append(Preempt(victim.attempt.job, job.id, why))
            for devices_id in move.nodes:
                self.room.keep(job.id, job.candidates[place.candidate], devices_id, place.count)
            self.preempt.append(Preempt(job.id, job.id, moves.sentence(move.leave, self.seen)))
            self._reserve(job.id, place)

    def _reserve(self, job: str, place: Place) -> None:
        if job not in self.memory.reserved:  # or the end of its time would never come
            kept = Reserved(place, self.seen.now_s + moves.KEPT_S)
            self.memory = replace(self.memory, reserved={**self.memory.reserved, job: kept})

    def _forget(self, job: str) -> None:
        if job in self.memory.reserved:
            others = {other: kept for other, kept in self.memory.reserved.items() if other != job}
            self.memory = replace(self.memory, reserved=others)
