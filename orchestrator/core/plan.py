"""Make a plan from a snapshot: a pure function without clock, I/O or randomness.

Priorities are strict tiers, the highest first. Within a tier the policy chooses the order of jobs and, for jobs whose
duration is known per place, also the place; this module chooses the nodes. A job that does not fit waits for devices
that are reserved for it (core/backfill.py), and every refusal has a reason.
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
"""Key that is equal for jobs that a plan treats alike."""

IN_ORDER = frozenset({"fifo", "priority"})


def plan(snapshot: Snapshot, *, full: bool = False, most: int | None = None) -> Plan:
    """Decide which jobs start, which attempts stop for them, and why the other jobs wait.

    `full`: attempts of the same priority may also be stopped or moved, where the policy gains more than that costs.
    Otherwise jobs only use free devices and those of lower priority. `most` limits the starts of one plan, because the
    controller's thread has other work too; the remaining jobs wait for the next plan.
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
        result = Plan(tuple(self.start), tuple(self.preempt), self.why_not, self.memory, self.value, self.bound)
        return replace(result, memory=replace(self.memory, gap=result.gap)) if self.full else result

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
        ahead_ids = {job.id for job in ahead}
        left = [job for job in jobs if job.id not in ahead_ids] if ahead_ids else jobs
        movable = [r for r in moves.movable(self.seen, self.room) if r.priority == at] if self.full else []
        if not left and not movable:
            return
        if not self.decided:
            self.memory = replace(self.memory, fault="")  # only failures in this plan count
        self.decided = True
        snapshot = replace(self.seen, memory=self.memory)
        decision = turn(snapshot, left, movable, self.room, at, self.expect, self.full)
        self.memory, self.value, self.bound = decision.memory, self.value + decision.value, self.bound + decision.bound
        scattered = self._place_as_decided(decision)
        self._move(decision.leaves)
        self._place_all(job for job in scattered if job.id not in decision.nodes)
        # Other jobs took the memory that was reserved for these jobs. They keep their place in the queue.
        displaced = {job.id for job in scattered if job.id in decision.nodes}
        chosen = {job.id for job in decision.first} - displaced
        self._place_then_wait(job for job in left if job.id not in chosen)

    def _ahead(self, at: int, jobs: list[Job]) -> list[Job]:
        """Return jobs for which attempts were stopped, then jobs that have waited too long."""
        drains_s = self.memory.drains_s.get(at, ())
        reserved = [job for job in jobs if job.id in self.memory.reserved]
        starving = (job for job in jobs if moves.starves(job, self.seen, self.expect, drains_s))
        return [*reserved, *(job for job in starving if job.id not in self.memory.reserved)]

    def _place_all(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if self.is_full:
                return
            self._place(job)

    def _place_then_wait(self, jobs: Iterable[Job]) -> None:
        """Start all jobs that fit, then reserve devices for the others.

        Nothing is reserved against jobs of the same priority, because their order is decided already.
        """
        blocked = [(job, shape) for job in jobs if not self._fits_now(job, shape := self.room.shape(job))]
        for job, shape in blocked:
            if self.is_full:
                return
            self._wait(job, shape)

    def _borrow(self, waiting: list[Job]) -> None:
        """Give idle devices to jobs beyond the quota of their project, after all others; no attempt stops for them."""
        borrowers = [job for job in waiting if self.room.quota.may_borrow(job)] if self.room.quota.lends else []
        self.room.quota.lent = True
        for job in self._without_place(borrowers):
            if not self.is_full and self._started(job):
                self.why_not.pop(job.id, None)
        self.room.quota.lent = False
        for job in self._without_place(borrowers):
            if not self.is_full:
                self.why_not[job.id] = own = dict(self.why_not.get(job.id, {}))  # jobs with equal shapes share one dict
                self._claim(job, own, own=True)

    def _without_place(self, jobs: list[Job]) -> list[Job]:
        """Return jobs that were not started and have no devices reserved."""
        placed = {start.job for start in self.start} | self.claimed
        return [job for job in jobs if job.id not in placed]

    def _place_reserved(self, job: Job) -> None:
        reserved = self.memory.reserved.get(job.id)
        if not self.is_full and not (reserved and self._placed_there(job, reserved.place, moves.NOBODY)):
            self._place(job)

    def _place_as_decided(self, decision: Turn) -> list[Job]:
        """Start jobs at the places of the policy's decision; return those for which that failed.

        Enough may be free for them, but not on suitable nodes. Jobs with decided nodes come first.
        """
        leaves, left = moves.Leaves(decision.leaves), []
        for job in sorted(decision.first, key=lambda j: not (j.id in decision.nodes and j.id in decision.strictly)):
            if self.is_full:
                break
            if not self._placed_as(job, decision, leaves):
                left.append(job)
        return left

    def _placed_as(self, job: Job, decision: Turn, leaves: moves.Leaves) -> bool:
        place, strictly = decision.places[job.id], job.id in decision.strictly
        if strictly and self._placed_there(job, place, leaves, decision.nodes.get(job.id, ())):
            return True
        return self._started(job) or (not strictly and self._waits_there(job, place, leaves))

    def _placed_there(self, job: Job, place: Place, leaves: moves.Leaves, nodes: tuple[str, ...] = ()) -> bool:
        if option := there(job, place, self.room, nodes) or (there(job, place, self.room) if nodes else None):
            self._begin(job, option)
        return bool(option) or self._waits_there(job, place, leaves)

    def _waits_there(self, job: Job, place: Place, leaves: moves.Leaves) -> bool:
        """Return True if attempts stop for the job at `place`, from now on or already, and then nothing is missing."""
        equals, reserved = leaves.up_to(job.priority), job.id in self.memory.reserved
        if not (reserved or backfill.could_stop(job, self.room, equals)):
            return False
        reservation = backfill.claim_at(job, place, self.room, equals)
        if reservation is None or reservation.missing or not (reservation.victims or reserved):
            return False
        why = leaves.sentences(job, reservation, self.expect)
        self.preempt += backfill.apply(job, reservation, self.room, why)
        self.claimed.add(job.id)
        self.why_not[job.id] = {(reservation.candidate, ""): backfill.sentence(reservation, self.room, why)}
        self._reserve(job.id, place)
        return True

    def _begin(self, job: Job, best: Option, rates: Rates | None = None) -> None:
        rates = rates or Rates.of(job, [best], self.seen.throughput, self.seen.history)
        self.explored.began(job, best)
        self.room.take(job.candidates[best.candidate], best)
        self.room.quota.take(job, best)
        why, aged = reason(job, best, rates, self.seen.wall_s), tier(job, self.seen) - job.priority
        if self.room.quota.lent and (more := self.room.quota.beyond(job, best)):
            why += f"; {more}: other projects may reclaim them"
        self.start.append(Start(job.id, best.candidate, best.allocation, why, aged))
        self._forget(job.id)

    def _place(self, job: Job) -> None:
        """Start the job anywhere it fits, else reserve the place that can serve it first."""
        if not self._fits_now(job, shape := self.room.shape(job)):
            self._wait(job, shape)

    def _fits_now(self, job: Job, shape: Shape) -> bool:
        """Start the job if it fits and return True.

        If a job of the same shape did not fit, the result is the same until capacity changes.
        """
        if self.is_full or self.tight.get(shape) == self.room.version:
            return False
        if self._started(job):
            return True
        self.tight[shape] = self.room.version
        return False

    def _wait(self, job: Job, shape: Shape) -> None:
        before, reasons = self.blocked.get(shape, (-1, {}))
        if before != self.room.version:  # else a job of this shape was blocked, and nothing has changed since
            before, reasons = self.room.version, refusals(job, self.room)
            self._claim(job, reasons)
            self.blocked[shape] = (before, reasons)
        self.why_not[job.id] = reasons

    def _claim(self, job: Job, reasons: Reasons, own: bool = False) -> None:
        """Reserve devices for the job. `own`: attempts of its project may stop for it although it may borrow."""
        if reservation := backfill.claim(job, self.room, own):
            self.preempt += backfill.apply(job, reservation, self.room)
            self.claimed.add(job.id)
            reasons[reservation.candidate, ""] = backfill.sentence(reservation, self.room, self.room.quota.borrowed)
        elif not own:
            backfill.keep_quota(job, self.room)

    def _started(self, job: Job) -> bool:
        if options := options_of(job, self.room):
            explored_kinds = self.explored.over(job, options)
            rates = Rates.of(job, options, self.seen.throughput, self.seen.history, explored_kinds)
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
        if job not in self.memory.reserved:  # setting it again would extend the reservation for ever
            reservation = Reserved(place, self.seen.now_s + moves.KEPT_S)
            self.memory = replace(self.memory, reserved={**self.memory.reserved, job: reservation})

    def _forget(self, job: str) -> None:
        if job in self.memory.reserved:
            others = {other: reservation for other, reservation in self.memory.reserved.items() if other != job}
            self.memory = replace(self.memory, reserved=others)
