"""What must hold whatever happens: of every plan, and of a small world in which jobs come, end, fail and are cancelled,
nodes go and return, events are folded as the server folds them, and leases are what the log says.
"""

from dataclasses import replace
from random import Random

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.core.explanation.explain import explain
from orchestrator.core.explanation.offer import offers
from orchestrator.core.jobs import retry
from orchestrator.core.jobs.expected_duration import expectation, restart_s
from orchestrator.core.jobs.fold import apply, ended, fold, placed, running, submitted
from orchestrator.core.model import (
    Candidate,
    Devices,
    Event,
    Job,
    Plan,
    Progress,
    Recovery,
    Running,
    Since,
    Snapshot,
)
from orchestrator.core.plan.plan import plan
from orchestrator.core.plan.policies.fifo import fifo
from orchestrator.core.plan.policies.priced_policies import POLICIES
from orchestrator.core.states import TERMINAL, WAITING

Free = dict[str, set[int]]
ANYTHING = list(HealthCheck)

kinds = st.sampled_from(["nvidia:H100-80GB", "nvidia:H100-80GB", "nvidia:A100-80GB", "cpu", "tpu:emulated"])
patterns = st.sampled_from(["nvidia", "nvidia", "nvidia:H100", "any", "cpu", "tpu:emulated"])
nodes = st.tuples(kinds, st.integers(1, 4), st.sampled_from(["one", "one", "two"]))
fleets = st.lists(nodes, min_size=1, max_size=5)
counted = st.builds(
    lambda kind, low, more, nodes: Candidate((kind,), count=low + more, min_count=low, nodes=nodes),
    patterns,
    st.integers(1, 4),
    st.integers(0, 2),
    st.sampled_from([1, 1, 2]),
)
exclusive = st.builds(
    lambda kind, nodes: Candidate((kind,), nodes=nodes, exclusive=True), patterns, st.sampled_from([1, 1, 2])
)
wants = st.one_of(counted, counted, exclusive)
job_parts = st.fixed_dictionaries(
    {
        "candidates": st.lists(wants, min_size=1, max_size=3).map(tuple),
        "priority": st.integers(0, 3),
        "ordered": st.booleans(),
        "objective": st.sampled_from(["any", "cost", "throughput"]),
    }
)
vendors = st.sampled_from(
    [{}, {}, {}, *({"backend": name, "recovery": Recovery(cross_vendor=False)} for name in ("", "nvidia", "cpu"))]
)


def fleet_of(told) -> list[Devices]:
    return [
        Devices(
            f"node-{i}/{kind}", f"node-{i}", pool, "torch", kind.partition(":")[0], kind,
            tuple(range(total)), total, emulated=kind == "tpu:emulated",
        )
        for i, (kind, total, pool) in enumerate(told)
    ]  # fmt: skip


@st.composite
def snapshots(draw) -> Snapshot:
    """A busy fleet: every device is free or belongs to one of a few attempts, some of which are stopping."""
    fleet = fleet_of(draw(fleets))
    held: dict[int, dict[str, list[int]]] = {}
    free: Free = {d.id: set() for d in fleet}
    for have in fleet:
        for number in range(have.total):
            owner = draw(st.integers(0, 5))
            if owner:
                held.setdefault(owner, {}).setdefault(have.id, []).append(number)
            else:
                free[have.id].add(number)
    attempts = [
        Running(
            f"run-{owner}", draw(st.integers(0, 3)), draw(st.integers(0, 3)),
            tuple((i, tuple(numbers)) for i, numbers in leases.items()),
            preemptible=draw(st.integers(0, 5)) > 0, stopping=draw(st.integers(0, 5)) == 0,
        )
        for owner, leases in held.items()
    ]  # fmt: skip
    devices = [
        replace(d, free=tuple(sorted(free[d.id])), schedulable=draw(st.integers(0, 9)) > 0, reason="node is lost")
        for d in fleet
    ]
    jobs = [
        Job(f"job-{n}", "job", "train", number=draw(st.integers(0, 2)), **parts, **draw(vendors))
        for n, parts in enumerate(draw(st.lists(job_parts, min_size=1, max_size=5)))
    ]
    paused = {job.id: 104.0 for job in jobs if draw(st.integers(0, 5)) == 0}
    return Snapshot(100.0, tuple(devices), tuple(jobs), tuple(attempts), paused_until_s=paused)


# -- the laws of one plan


def fits(job: Job, seen: Snapshot, free: Free) -> bool:
    """Whether a candidate of the job could start on these free devices: written again, without the code under test."""
    mine = [have for have in seen.devices if job.recovery.cross_vendor or job.backend in ("", have.backend)]
    return any(_fits(want, mine, free) for want in job.candidates)


def _fits(want: Candidate, devices: list[Devices], free: Free) -> bool:
    islands: dict[tuple, int] = {}
    for have in devices:
        [pattern] = want.kinds
        right = pattern in ("any", have.backend, have.kind) or have.kind.startswith(f"{pattern}-")
        if have.emulated:
            right = pattern == have.kind
        needed = have.total if want.exclusive else want.min_count
        if right and have.schedulable and len(free[have.id]) >= needed:
            key = (have.pool, have.kind, have.environment, have.total if want.exclusive else 0)
            islands[key] = islands.get(key, 0) + 1
    return any(count >= want.nodes for count in islands.values())


def plus(free: Free, attempts) -> Free:
    more = {devices_id: set(numbers) for devices_id, numbers in free.items()}
    for attempt in attempts:
        for devices_id, numbers in attempt.allocation:
            more[devices_id] |= set(numbers)
    return more


def may_start(job: Job, seen: Snapshot) -> bool:
    return seen.paused_until_s.get(job.id, 0.0) <= seen.now_s


def left_by_those_ahead(job: Job, seen: Snapshot, decided: Plan) -> Free:
    """Free devices less what jobs ahead of `job` start on."""
    free = {d.id: set(d.free) for d in seen.devices}
    started = {s.job: s for s in decided.start}
    for other in fifo(seen):
        if other.id == job.id:
            return free
        for devices_id, numbers in started[other.id].allocation if other.id in started else ():
            free[devices_id] -= set(numbers)
    raise AssertionError(f"{job.id} is not in line")


def check_starts(seen: Snapshot, decided: Plan) -> None:
    """Each on free devices of its own, all of one island, in equal numbers within what was asked for."""
    free = {d.id: set(d.free) for d in seen.devices}
    devices, jobs = {d.id: d for d in seen.devices}, {j.id: j for j in seen.jobs}
    for start in decided.start:
        job = jobs[start.job]
        want = job.candidates[start.candidate]
        have = [devices[devices_id] for devices_id, _ in start.allocation]
        assert job.state in WAITING
        assert may_start(job, seen)
        assert len({d.node for d in have}) == len(have) == want.nodes
        assert len({(d.pool, d.kind, d.environment, d.backend) for d in have}) == 1
        assert all(d.schedulable and (not d.emulated or d.kind in want.kinds) for d in have)
        if want.exclusive:
            event("whole nodes are given")
            assert [set(numbers) for _, numbers in start.allocation] == [set(range(d.total)) for d in have]
        else:
            assert {len(numbers) for _, numbers in start.allocation} <= set(range(want.min_count, want.count + 1))
        assert len({len(numbers) for _, numbers in start.allocation}) == 1
        for devices_id, numbers in start.allocation:
            assert set(numbers) <= free[devices_id]
            free[devices_id] -= set(numbers)


def check_the_first_in_line_is_not_overtaken(seen: Snapshot, decided: Plan) -> None:
    """The first job that waits would not have started with all that jobs behind it got, either."""
    started = {s.job for s in decided.start}
    for job in fifo(seen):
        if job.id not in started and may_start(job, seen):
            free = left_by_those_ahead(job, seen, decided)
            assert not fits(job, seen, free)
            return


def check_preemption(seen: Snapshot, decided: Plan) -> None:
    """Only strictly lower priority, each asked once; whoever asks first is helped by it and needs every one of them."""
    held, jobs = {r.job: r for r in seen.running}, {j.id: j for j in seen.jobs}
    victims = [p.victim for p in decided.preempt]
    assert len(victims) == len(set(victims))
    for preempt in decided.preempt:
        victim = held[preempt.victim]
        assert victim.priority < jobs[preempt.job].priority
        assert victim.preemptible
        assert not victim.stopping
    blocked = next((j for j in fifo(seen) if j.id in decided.why_not and may_start(j, seen)), None)
    if blocked is None:
        return
    soon = plus(left_by_those_ahead(blocked, seen, decided), (r for r in seen.running if r.stopping))
    mine = [held[p.victim] for p in decided.preempt if p.job == blocked.id]
    lower = [r for r in seen.running if r.priority < blocked.priority and r.preemptible and not r.stopping]
    if mine:
        event("somebody is asked to stop")
        assert fits(blocked, seen, plus(soon, mine))
        for spared in mine:
            rest = [r for r in mine if r is not spared]
            assert not fits(blocked, seen, plus(soon, rest))
    elif not fits(blocked, seen, soon):
        assert not fits(blocked, seen, plus(soon, lower))


def check_every_waiting_job_is_told(seen: Snapshot, decided: Plan) -> None:
    started = {s.job for s in decided.start}
    assert started | set(decided.why_not) == {job.id for job in seen.jobs if job.state in WAITING}
    assert not started & set(decided.why_not)
    assert all(why for reasons in decided.why_not.values() for why in reasons.values())


def check_all(seen: Snapshot, decided: Plan) -> None:
    check_starts(seen, decided)
    check_the_first_in_line_is_not_overtaken(seen, decided)
    check_preemption(seen, decided)
    check_every_waiting_job_is_told(seen, decided)


def check_the_first_that_asks_starts_once_its_victims_have_stopped(seen: Snapshot, decided: Plan) -> None:
    first = next((j for j in fifo(seen) if j.id in decided.why_not), None)
    mine = [p.victim for p in decided.preempt if first and p.job == first.id]
    if not mine:
        return
    started = {s.job: s for s in decided.start}
    gone = [r for r in seen.running if r.stopping or r.job in mine]
    free = plus({d.id: set(d.free) for d in seen.devices}, gone)
    for start in started.values():
        for devices_id, numbers in start.allocation:
            free[devices_id] -= set(numbers)
    later = replace(
        seen,
        devices=tuple(replace(d, free=tuple(sorted(free[d.id]))) for d in seen.devices),
        jobs=tuple(j for j in seen.jobs if j.id not in started),
        running=tuple(r for r in seen.running if r not in gone),
    )
    assert first.id in {s.job for s in plan(later).start}


@settings(max_examples=600, deadline=None, suppress_health_check=ANYTHING)
@given(seen=snapshots())
def test_every_plan_keeps_the_laws(seen):
    decided = plan(seen)
    check_all(seen, decided)
    check_the_first_that_asks_starts_once_its_victims_have_stopped(seen, decided)


@settings(max_examples=200, deadline=None, suppress_health_check=ANYTHING)
@given(seen=snapshots(), chance=st.randoms(use_true_random=False))
def test_the_order_in_which_things_are_told_changes_nothing(seen, chance):
    parts = {name: list(getattr(seen, name)) for name in ("devices", "jobs", "running")}
    for part in parts.values():
        chance.shuffle(part)
    assert repr(plan(replace(seen, **{name: tuple(part) for name, part in parts.items()}))) == repr(plan(seen))


# -- of every policy


@st.composite
def priced(draw) -> Snapshot:
    """As above, with jobs that have told how far they are, and attempts of which some may move."""
    seen = draw(snapshots())
    all_kinds = ["nvidia:H100-80GB", "nvidia:A100-80GB", "cpu", "tpu:emulated"]
    rates = st.fixed_dictionaries({(kind, 1): st.sampled_from([0.1, 1.0, 10.0]) for kind in all_kinds})
    progress = st.builds(Progress, st.integers(0, 50), st.integers(50, 10_000), rates=rates, starts_s=st.just(5.0))
    names = [*(job.id for job in seen.jobs), *(r.job for r in seen.running)]
    alike = draw(st.booleans())
    attempts = [replace(r, priority=0, stopping=False, preemptible=True) if alike else r for r in seen.running]
    held = tuple(replace(r, spec=_asked(draw, r, seen), saves=alike or draw(st.booleans())) for r in attempts)
    return replace(
        seen,
        running=held,
        progress={name: draw(progress) for name in names if draw(st.integers(0, 4))},
        since={name: Since(0.0, draw(st.sampled_from([-9000.0, 80.0, 99.0]))) for name in names},
        jobs=tuple(replace(job, objective="any", ordered=False, priority=0) for job in seen.jobs)
        if alike
        else seen.jobs,
        policy=draw(st.sampled_from(POLICIES)),
    )


def _asked(draw, attempt: Running, seen: Snapshot) -> Job | None:
    """The job of an attempt, where its devices are of one kind and equally many on each node."""
    of = {have.id: have for have in seen.devices}
    shapes = {(of[i].kind, of[i].pool, len(numbers)) for i, numbers in attempt.allocation}
    if len(shapes) > 1:
        return None
    [(kind, _, count)] = shapes
    wanted = (kind, "any") if draw(st.booleans()) else (kind,)
    want = Candidate(wanted, draw(st.integers(count, 4)), draw(st.integers(1, count)), nodes=len(attempt.allocation))
    task = draw(st.sampled_from(["train", "train", "run"]))
    return Job(attempt.job, "running", task, (want,), priority=attempt.priority, number=9)


def check_any_policy(seen: Snapshot, decided: Plan, full: bool) -> None:
    check_starts(seen, decided)
    check_every_waiting_job_is_told(seen, decided)
    check_who_stops(seen, decided, full)
    check_that_moves_pay(seen, decided)
    check_the_highest_blocked_tier(seen, decided)


def check_who_stops(seen: Snapshot, decided: Plan, full: bool) -> None:
    held, jobs = {r.job: r for r in seen.running}, {j.id: j for j in seen.jobs}
    assert len({p.victim for p in decided.preempt}) == len(decided.preempt)
    for preempt in decided.preempt:
        victim = held[preempt.victim]
        assert victim.preemptible
        assert not victim.stopping
        if preempt.job in jobs and victim.priority < jobs[preempt.job].priority:
            continue
        event("an equal stops or moves")
        assert full
        assert seen.policy not in ("fifo", "priority")
        assert victim.saves
        assert victim.spec is not None
        assert victim.spec.task == "train"
        goes_there = jobs[preempt.job] if preempt.job in jobs else held[preempt.job]
        assert victim.priority == goes_there.priority
        if preempt.job not in jobs:  # it runs, and moves itself
            assert any(other.victim == other.job == preempt.job for other in decided.preempt)


def check_that_moves_pay(seen: Snapshot, decided: Plan) -> None:
    """A job moves itself only where it ends earlier by more than twice what the move costs, as far as that is known."""
    held, expect = {r.job: r for r in seen.running}, expectation(seen)
    for move in (p for p in decided.preempt if p.job == p.victim and p.job not in seen.memory.reserved):
        attempt, place = held[move.job], decided.memory.reserved[move.job].place
        kind, devices = attempt.allocation[0][0].partition("/")[2], sum(len(n) for _, n in attempt.allocation)
        here, there = expect(attempt.spec, kind, devices), expect(attempt.spec, place.island.kind, place.devices)
        event("a move pays")
        assert here.has_evidence and there.has_evidence
        assert here.seconds - there.seconds > 2 * restart_s(move.job, seen)


def check_the_highest_blocked_tier(seen: Snapshot, decided: Plan) -> None:
    """Of its jobs, one at least fits nothing that those of its tier and above have left. Where a place is reserved for
    which others stop, devices may lie idle for it meanwhile.
    """
    waits = [j for j in seen.jobs if j.id in decided.why_not and may_start(j, seen)]
    if not waits or decided.memory.reserved:
        return
    highest = max(job.priority for job in waits)
    free = {d.id: set(d.free) for d in seen.devices}
    jobs = {j.id: j for j in seen.jobs}
    for start in decided.start:
        for devices_id, numbers in start.allocation if jobs[start.job].priority >= highest else ():
            free[devices_id] -= set(numbers)
    moved = any(preempt.job == preempt.victim for preempt in decided.preempt)
    assert moved or not all(fits(job, seen, free) for job in waits if job.priority == highest)


@settings(max_examples=500, deadline=None, suppress_health_check=ANYTHING)
@given(seen=priced(), full=st.booleans())
def test_every_plan_of_every_policy_keeps_the_laws(seen, full):
    decided = plan(seen, full=full)
    check_any_policy(seen, decided, full)
    assert decided.value <= decided.bound * (1 + 1e-9)
    again = replace(seen, memory=decided.memory)
    check_any_policy(again, plan(again, full=full), full)


@settings(max_examples=200, deadline=None, suppress_health_check=ANYTHING)
@given(seen=priced(), full=st.booleans(), chance=st.randoms(use_true_random=False))
def test_no_policy_depends_on_the_order_in_which_things_are_told(seen, full, chance):
    parts = {name: list(getattr(seen, name)) for name in ("devices", "jobs", "running")}
    for part in parts.values():
        chance.shuffle(part)
    other = replace(seen, **{name: tuple(part) for name, part in parts.items()})
    assert repr(plan(other, full=full)) == repr(plan(seen, full=full))


@settings(max_examples=300, deadline=None, suppress_health_check=ANYTHING)
@given(seen=priced(), full=st.booleans(), tier=st.integers(0, 3))
def test_jobs_of_lower_priority_change_nothing_for_those_above(seen, full, tier):
    above = replace(seen, jobs=tuple(job for job in seen.jobs if job.priority >= tier))
    ids = {job.id for job in above.jobs}
    assert [s for s in plan(seen, full=full).start if s.job in ids] == list(plan(above, full=full).start)


@settings(max_examples=200, deadline=None, suppress_health_check=ANYTHING)
@given(seen=snapshots())
def test_the_first_offer_is_what_the_next_plan_does_with_the_job(seen):
    new = replace(seen.jobs[0], id="new", number=0, backend="")
    told, found = explain(new, seen), offers(new, seen).offers
    chosen = [offer for offer in found if offer.chosen]
    assert len(found) == len(new.candidates) * len({(have.pool, have.kind) for have in seen.devices})
    if told.would_start:
        event("the job would start")
        assert chosen == [found[0]]
        assert (found[0].candidate, found[0].allocation) == (told.would_start.candidate, told.would_start.allocation)
    else:
        assert not any(offer.allocation for offer in found)
        assert [offer.after for offer in chosen] == ([told.preempt] if told.preempt else [])
    assert bool(told.impossible) == all(offer.wait == "never here" for offer in found)


# -- a small world


class World(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.events: list[Event] = []
        self.records, self.doubled = {}, {}

    @initialize(told=fleets)
    def start(self, told):
        self.now_s = 0.0
        self.fleet = fleet_of(told)
        self.paused: dict[str, float] = {}

    @rule(parts=job_parts, budget=st.tuples(st.integers(0, 2), st.integers(-1, 2)))
    def a_job_comes(self, parts, budget):
        name = f"job-{len(self.records)}"
        job = Job(name, "job", "train", recovery=Recovery(*budget), **parts)
        self.write(submitted(job, {}, self.now_s))

    @rule()
    def a_turn(self):
        seen = self.snapshot()
        decided = plan(seen)
        check_all(seen, decided)
        have = {d.id: d for d in self.fleet}
        for start in decided.start:
            first = have[start.allocation[0][0]]
            self.write(placed(self.job(start.job), start, first.kind, first.pool, self.now_s))
        for preempt in decided.preempt:
            self.write(Event(preempt.victim, "preempted", self.job(preempt.victim).epoch, self.now_s))

    @precondition(lambda self: self.live())
    @rule(
        data=st.data(),
        outcome=st.sampled_from(
            [
                ("succeeded", "", (0,)),
                ("failed", "user", (1,)),
                ("failed", "signal", (-9,)),
                ("failed", "oom", (1,)),
                ("lost", "internal", ()),
                ("preempted", "", (0,)),
            ]
        ),
    )
    def an_attempt_ends(self, data, outcome):
        record = data.draw(st.sampled_from(self.live()))
        job, (state, failure, codes) = record.job, outcome
        if job.state in TERMINAL:
            self.write(Event(job.id, "released", job.epoch, self.now_s, {"outcome": "cancelled"}))
            return
        how = retry.AttemptEnd(state, record.live_attempt.candidate, failure, "", codes)
        decided = retry.decide_retry(job, how)
        self.paused[job.id] = self.now_s + decided.pause_s
        self.write(ended(job, decided, self.now_s))

    @precondition(lambda self: self.records)
    @rule(data=st.data(), event=st.sampled_from(["started", "finished", "failed", "checkpoint", "preempted"]))
    def an_old_or_odd_event_arrives(self, data, event):
        record = data.draw(st.sampled_from(list(self.records.values())))
        epoch = data.draw(st.integers(0, record.job.epoch))
        if epoch == record.job.epoch and event in ("finished", "failed"):
            event = "started"
        before = dict(self.records)
        self.write(Event(record.job.id, event, epoch, self.now_s, {"reason": "late"}))
        if epoch < record.job.epoch:
            assert self.records == before

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def a_user_cancels(self, data):
        record = data.draw(st.sampled_from(list(self.records.values())))
        self.write(Event(record.job.id, "cancelled", 0, self.now_s, {"reason": "by its user"}))

    @rule(data=st.data())
    def a_node_goes_or_returns(self, data):
        index = data.draw(st.integers(0, len(self.fleet) - 1))
        have = self.fleet[index]
        self.fleet[index] = replace(have, schedulable=not have.schedulable, reason=f"node {have.node} is lost")

    @rule(seconds=st.integers(1, 90))
    def time_passes(self, seconds):
        self.now_s += seconds

    @invariant()
    def a_device_belongs_to_at_most_one_attempt_and_none_is_invented(self):
        total = {d.id: d.total for d in self.fleet}
        held = [(i, n) for r in self.live() for i, numbers in r.live_attempt.allocation for n in numbers]
        assert len(held) == len(set(held))
        assert all(0 <= number < total[devices_id] for devices_id, number in held)

    @invariant()
    def epochs_grow_by_one_and_only_the_last_attempt_lives(self):
        for record in self.records.values():
            assert [a.epoch for a in record.attempts] == list(range(1, record.job.epoch + 1))
            assert all(a.ended_s is not None for a in record.attempts[:-1])
            assert record.live_attempt is None or record.job.state not in WAITING

    @invariant()
    def each_event_twice_gives_the_same_jobs(self):
        assert {k: r.job for k, r in self.doubled.items()} == {k: r.job for k, r in self.records.items()}

    def teardown(self):
        """The log folded from its beginning; after each step, that would take the square of the time."""
        assert fold(self.events) == self.records
        twice = [event for event in self.events for _ in range(2)]
        assert fold(twice) == self.doubled

    def write(self, event):
        event = replace(event, seq=len(self.events) + 1)
        self.events.append(event)
        for records, times in ((self.records, 1), (self.doubled, 2)):
            for _ in range(times):
                if record := apply(records.get(event.job), event):
                    records[event.job] = record

    def job(self, job_id):
        return self.records[job_id].job

    def live(self):
        return [r for r in self.records.values() if r.live_attempt]

    def snapshot(self):
        records = self.records.values()
        held = plus({d.id: set() for d in self.fleet}, (r.live_attempt for r in self.live()))
        devices = tuple(replace(d, free=tuple(sorted(set(d.free) - held[d.id]))) for d in self.fleet)
        waiting = tuple(r.job for r in records if r.job.state in WAITING and not r.live_attempt)
        return Snapshot(self.now_s, devices, waiting, running(records), paused_until_s=self.paused)


World.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=ANYTHING
)
TestWorld = World.TestCase


def test_a_gang_starts_although_small_jobs_never_stop_coming(w):
    """Of equal priority, so nobody is stopped for it; the small ones take a free device whenever they may."""
    for seed in range(30):
        chance = Random(seed)
        fleet = [w.devices(f"n{i}", 4) for i in range(3)]
        free = {d.id: set(d.free) for d in fleet}
        jobs, ends, now, started_at = {}, [], 0, None
        while started_at is None:
            now += 1
            assert now < 60, f"seed {seed}: the gang starves"
            free = plus(free, [start for end, start in ends if end <= now])
            ends = [(end, start) for end, start in ends if end > now]
            for n in range(3):
                jobs[f"s{now}.{n}"] = w.job(f"s{now}.{n}", count=chance.choice([1, 2]), number=10 * now + n)
            if now == 5:
                jobs["gang"] = w.job("gang", w.want(count=4, nodes=2), number=49)
            devices = [replace(d, free=tuple(sorted(free[d.id]))) for d in fleet]
            for start in plan(w.snapshot(devices, jobs.values(), now_s=now)).start:
                del jobs[start.job]
                ends.append((now + chance.randint(1, 8), start))
                for devices_id, numbers in start.allocation:
                    free[devices_id] -= set(numbers)
                if start.job == "gang":
                    started_at = now
