"""Make a plan from a snapshot: a pure function without clock, I/O or randomness.

Priorities are strict tiers, the highest first. Within a tier the policy chooses the order of jobs and, for jobs with a
duration per place, also the place; this module chooses the nodes. A job that does not fit waits for devices
that are reserved for it (core/plan/options/backfill.py), and every refusal has a reason.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from orchestrator.core.jobs.expected_duration import expectation, tier
from orchestrator.core.model import Job, Plan, Preempt, Snapshot, Start
from orchestrator.core.placement_slots import Place, PlaceReservation
from orchestrator.core.plan import exchanges, moves, tiers
from orchestrator.core.plan.assignment.job_order import LeavingJob, TierDecision, decide_tier
from orchestrator.core.plan.exploration import Exploration
from orchestrator.core.plan.options import backfill
from orchestrator.core.plan.options.capacity import FreeCapacity
from orchestrator.core.plan.options.gang import PlacementOption
from orchestrator.core.plan.options.placement_options import Reasons, list_options, option_at, refusal_reasons
from orchestrator.core.plan.options.rates import Rates
from orchestrator.core.plan.options.score import reason, score
from orchestrator.core.plan.policies import fifo

ORDER_POLICIES = frozenset({"fifo", "priority"})


def plan(snapshot: Snapshot, *, full: bool = False, most: int | None = None) -> Plan:
    """Decide which jobs start, which attempts stop for them, and why the other jobs wait.

    `full`: attempts of the same priority may also be stopped or moved, where the policy gains more than that costs.
    Otherwise jobs only use free devices and those of lower priority. `most` limits the starts of one plan, because the
    controller's thread has other work too; the remaining jobs wait for the next plan.
    """
    return _Planning(snapshot, full, most).plan()


class _Planning:
    def __init__(self, snapshot: Snapshot, full: bool, most: int | None):
        self.snapshot, self.full, self.max_starts = snapshot, full, most
        self.capacity, self.expect, self.exploration = (
            FreeCapacity(snapshot),
            expectation(snapshot),
            Exploration(snapshot),
        )
        self.start: list[Start] = []
        self.preempt: list[Preempt] = []
        self.why_not: dict[str, Reasons] = {}
        self.with_reservation: set[str] = set()
        self.waits_on: dict[str, tuple[str, ...]] = {}
        self.blocked_shapes: dict[int, tuple[int, Reasons]] = {}
        self.full_shapes: dict[int, int] = {}
        self.memory = replace(snapshot.memory, reserved=moves.current_reservations(snapshot))
        self.value = self.bound = 0.0
        self.decided = False

    def plan(self) -> Plan:
        moves.reserve_for_moving(self.snapshot, self.memory.reserved, self.capacity)
        queue = fifo.fifo(self.snapshot)
        pauses = tiers.pause_reasons(queue, self.snapshot)
        self.why_not |= pauses
        waiting = [job for job in queue if job.id not in pauses] if pauses else queue
        by_value = self.snapshot.policy not in ORDER_POLICIES
        movable = moves.movable_attempts(self.snapshot, self.capacity) if self.full and by_value else []
        for at, jobs in tiers.tiers(waiting, self.snapshot, movable):
            if self.is_full:
                break
            self._tier(at, jobs)
        self._borrow(waiting)
        memory = replace(self.memory, waits_on=self.waits_on)
        result = Plan(tuple(self.start), tuple(self.preempt), self.why_not, memory, self.value, self.bound)
        return replace(result, memory=replace(memory, gap=result.gap)) if self.full else result

    @property
    def is_full(self) -> bool:
        return len(self.start) == self.max_starts

    def _tier(self, at: int, jobs: list[Job]) -> None:
        if self.snapshot.policy in ORDER_POLICIES:
            self._place_all(jobs)
            return
        ahead = self._priority_jobs(at, jobs)
        for job in ahead:
            self._place_reserved(job)
        ahead_ids = {job.id for job in ahead}
        left = [job for job in jobs if job.id not in ahead_ids] if ahead_ids else jobs
        movable = (
            [r for r in moves.movable_attempts(self.snapshot, self.capacity) if r.priority == at] if self.full else []
        )
        if not left and not movable:
            return
        if not self.decided:
            self.memory = replace(self.memory, fault="")  # only failures in this plan count
        self.decided = True
        snapshot = replace(self.snapshot, memory=self.memory)
        decision = decide_tier(snapshot, left, movable, self.capacity, at, self.expect, self.full)
        self.memory, self.value, self.bound = decision.memory, self.value + decision.value, self.bound + decision.bound
        scattered = self._place_as_decided(decision)
        self._move(decision.leaves)
        self._place_all(job for job in scattered if job.id not in decision.nodes)
        # Other jobs took the memory that was reserved for these jobs. They keep their position in the queue.
        displaced = {job.id for job in scattered if job.id in decision.nodes}
        chosen = {job.id for job in decision.first} - displaced
        self._place_then_wait(job for job in left if job.id not in chosen)

    def _priority_jobs(self, at: int, jobs: list[Job]) -> list[Job]:
        """Return jobs for which attempts were stopped, then jobs that have waited too long."""
        drains_s = self.memory.drains_s.get(at, ())
        reserved = [job for job in jobs if job.id in self.memory.reserved]
        starving = (job for job in jobs if moves.is_starving(job, self.snapshot, self.expect, drains_s))
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
        blocked = [(job, shape) for job in jobs if not self._fits_now(job, shape := self.capacity.shape(job))]
        for job, shape in blocked:
            if self.is_full:
                return
            self._wait(job, shape)

    def _borrow(self, waiting: list[Job]) -> None:
        """Give idle devices to jobs beyond the quota of their project, after all others, in their order.

        Only borrowers of their own project that have lower priority stop for them.
        """
        quota, blocked = self.capacity.quota, dict[int, int]()
        for job in self._unplaced([job for job in waiting if quota.may_borrow(job)] if quota.lends else []):
            shape = self.capacity.shape(job)
            if self.is_full or blocked.get(shape) == self.capacity.version:
                continue
            quota.is_lending = True
            is_started = self._try_start(job)
            quota.is_lending = False
            if is_started:
                self.why_not.pop(job.id, None)
            elif reservation := backfill.find_reservation(job, self.capacity, borrows=True):
                self.why_not[job.id] = dict(self.why_not.get(job.id, {}))  # jobs with equal shapes share one dict
                self._stop_for(job, reservation, self.why_not[job.id])
            else:
                blocked[shape] = self.capacity.version

    def _unplaced(self, jobs: list[Job]) -> list[Job]:
        """Return jobs that were not started and have no devices reserved."""
        placed = {start.job for start in self.start} | self.with_reservation
        return [job for job in jobs if job.id not in placed]

    def _place_reserved(self, job: Job) -> None:
        reserved = self.memory.reserved.get(job.id)
        if not self.is_full and not (reserved and self._placed_there(job, reserved.place, moves.NO_LEAVING_JOBS)):
            self._place(job)

    def _place_as_decided(self, decision: TierDecision) -> list[Job]:
        """Start jobs at the places of the policy's decision; return those for which that failed.

        Enough may be free for them, but not on suitable nodes. Jobs with decided nodes come first.
        """
        leaves, left = moves.LeavingJobs(decision.leaves), []
        for job in sorted(decision.first, key=lambda j: not (j.id in decision.nodes and j.id in decision.strict)):
            if self.is_full:
                break
            if not self._placed_as(job, decision, leaves):
                left.append(job)
        return left

    def _placed_as(self, job: Job, decision: TierDecision, leaves: moves.LeavingJobs) -> bool:
        place, strictly = decision.places[job.id], job.id in decision.strict
        if strictly and self._placed_there(job, place, leaves, decision.nodes.get(job.id, ())):
            return True
        return self._try_start(job) or (not strictly and self._reserve_there(job, place, leaves))

    def _placed_there(self, job: Job, place: Place, leaves: moves.LeavingJobs, nodes: tuple[str, ...] = ()) -> bool:
        if option := option_at(job, place, self.capacity, nodes) or (
            option_at(job, place, self.capacity) if nodes else None
        ):
            self._start(job, option)
        return bool(option) or self._reserve_there(job, place, leaves)

    def _reserve_there(self, job: Job, place: Place, leaves: moves.LeavingJobs) -> bool:
        """Return True if attempts stop for the job at `place`, from now on or already, and then nothing is missing."""
        equals, reserved = leaves.up_to(job.priority), job.id in self.memory.reserved
        if not (reserved or backfill.can_stop_any(job, self.capacity, equals)):
            return False
        reservation = backfill.reservation_at(job, place, self.capacity, equals)
        if reservation is None or reservation.missing or not (reservation.victims or reserved):
            return False
        why = leaves.reasons(job, reservation, self.expect)
        self.preempt += backfill.apply(job, reservation, self.capacity, why)
        self.with_reservation.add(job.id)
        self.why_not[job.id] = {(reservation.candidate, ""): backfill.waiting_sentence(reservation, self.capacity, why)}
        self._reserve(job.id, place)
        return True

    def _start(self, job: Job, best: PlacementOption, rates: Rates | None = None) -> None:
        rates = rates or Rates.of(job, [best], self.snapshot.throughput, self.snapshot.history)
        self.exploration.count_start(job, best)
        self.capacity.allocate(job.candidates[best.candidate], best)
        self.capacity.quota.allocate(job, best)
        why, aged = reason(job, best, rates, self.snapshot.wall_s), tier(job, self.snapshot) - job.priority
        if self.capacity.quota.is_lending and (more := self.capacity.quota.borrowing_note(job, best)):
            why += f"; {more}: other projects may reclaim them"
        self.start.append(Start(job.id, best.candidate, best.allocation, why, aged))
        self._drop_reservation(job.id)

    def _place(self, job: Job) -> None:
        """Start the job anywhere it fits, else reserve the place that can serve it first."""
        if not self._fits_now(job, shape := self.capacity.shape(job)):
            self._wait(job, shape)

    def _fits_now(self, job: Job, shape: int) -> bool:
        """Start the job if it fits and return True.

        If a job of the same shape did not fit, the result is the same until capacity changes.
        """
        if self.is_full or self.full_shapes.get(shape) == self.capacity.version:
            return False
        if self._try_start(job):
            return True
        self.full_shapes[shape] = self.capacity.version
        return False

    def _wait(self, job: Job, shape: int) -> None:
        before, reasons = self.blocked_shapes.get(shape, (-1, {}))
        if before != self.capacity.version:  # else a job of this shape was blocked, and nothing has changed since
            before, reasons = self.capacity.version, refusal_reasons(job, self.capacity)
            self._try_reserve(job, reasons)
            self.blocked_shapes[shape] = (before, reasons)
        self.why_not[job.id] = reasons

    def _try_reserve(self, job: Job, reasons: Reasons) -> None:
        """Reserve devices for the job, or the rest of its project's quota."""
        if reservation := backfill.find_reservation(job, self.capacity):
            self._stop_for(job, reservation, reasons)
        else:
            backfill.reserve_quota(job, self.capacity)

    def _stop_for(self, job: Job, reservation: backfill.Reservation, reasons: Reasons) -> None:
        borrowed = self.capacity.quota.borrowed
        self.preempt += backfill.apply(job, reservation, self.capacity)
        self.with_reservation.add(job.id)
        self.waits_on[job.id] = reservation.nodes
        reasons[reservation.candidate, ""] = backfill.waiting_sentence(reservation, self.capacity, borrowed)

    def _try_start(self, job: Job) -> bool:
        if options := list_options(job, self.capacity):
            explored_kinds = self.exploration.explored_kinds(job, options)
            rates = Rates.of(job, options, self.snapshot.throughput, self.snapshot.history, explored_kinds)
            self._start(job, min(options, key=lambda o: score(job, o, rates)), rates)
        return bool(options)

    def _move(self, leaves: Mapping[str, LeavingJob]) -> None:
        for move in exchanges.profitable_moves(leaves, self.snapshot, self.capacity):
            job, place = move.leave.attempt.spec, move.leave.place
            assert place is not None and job is not None
            if self.capacity.quota.refusal_reason(job, place.devices, place.island.kind, move.leave.attempt):
                continue
            self.capacity.quota.reserve_more(job, place.island.kind, place.devices, move.leave.attempt)
            self.capacity.count_as_stopping(move.leave.attempt)
            for victim in move.victims:
                self.capacity.count_as_stopping(victim.attempt)
                why = exchanges.exchange_reason(victim, move, self.snapshot)
                self.preempt.append(Preempt(victim.attempt.job, job.id, why))
            for devices_id in move.nodes:
                self.capacity.reserve(job.id, job.candidates[place.candidate], devices_id, place.count)
            self.preempt.append(Preempt(job.id, job.id, moves.move_reason(move.leave, self.snapshot)))
            self._reserve(job.id, place)

    def _reserve(self, job: str, place: Place) -> None:
        if job not in self.memory.reserved:  # setting it again would extend the reservation for ever
            reservation = PlaceReservation(place, self.snapshot.now_s + moves.RESERVATION_S)
            self.memory = replace(self.memory, reserved={**self.memory.reserved, job: reservation})

    def _drop_reservation(self, job: str) -> None:
        if job in self.memory.reserved:
            others = {other: reservation for other, reservation in self.memory.reserved.items() if other != job}
            self.memory = replace(self.memory, reserved=others)
