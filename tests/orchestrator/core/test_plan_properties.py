"""What must hold whatever happens: jobs come, end, fail and are cancelled, nodes go and return, and the core decides.

The world here is small and honest: events are folded as the server folds them, leases are what the log says.
"""

from dataclasses import replace
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.core import retry
from orchestrator.core.fold import Ledger, ended, fold, placed, running, submitted
from orchestrator.core.model import Candidate, Devices, Event, Job, Recovery, Snapshot
from orchestrator.core.plan import plan
from orchestrator.core.policies.fifo import fifo
from orchestrator.core.states import TERMINAL, WAITING, State

KINDS = ("nvidia:H100-80GB", "nvidia:A100-80GB", "tpu:v5e", "cpu", "tpu:emulated")
PATTERNS = ("nvidia", "nvidia:H100", "nvidia:A100-80GB", "tpu:v5e", "cpu", "any", "tpu:emulated")

nodes = st.tuples(st.sampled_from(KINDS), st.integers(1, 4), st.sampled_from(["one", "two"]))
candidates = st.builds(
    lambda kind, low, more, nodes: Candidate((kind,), count=low + more, min_count=low, nodes=nodes),
    st.sampled_from(PATTERNS),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(1, 2),
)
outcomes = st.sampled_from(
    [
        ("succeeded", "", (0,)),
        ("failed", "user", (1,)),
        ("failed", "signal", (-9,)),
        ("failed", "memory", (1,)),
        ("lost", "internal", ()),
        ("preempted", "", (0,)),
    ]
)


def fits(want: Candidate, fleet: list[Devices], free: dict[str, set[int]]) -> bool:
    """Whether a candidate could start on these free devices: written again, without the code under test."""
    islands: dict[tuple, int] = {}
    for have in fleet:
        [pattern] = want.kinds
        if have.emulated:
            right = pattern == have.kind
        else:
            right = pattern in ("any", have.backend, have.kind) or have.kind.startswith(f"{pattern}-")
        if right and have.schedulable and len(free[have.id]) >= want.min_count:
            key = (have.pool, have.kind, have.environment)
            islands[key] = islands.get(key, 0) + 1
    return any(count >= want.nodes for count in islands.values())


class World(RuleBasedStateMachine):
    @initialize(fleet=st.lists(nodes, min_size=1, max_size=6))
    def start(self, fleet):
        self.now_s = 0.0
        self.events: list[Event] = []
        self.ledger = Ledger()
        self.fleet = [
            Devices(
                f"node-{i}/{kind}", f"node-{i}", f"{pool}-{kind}", pool, kind.partition(":")[0], kind,
                tuple(range(total)), total, emulated=kind == "tpu:emulated",
            )
            for i, (kind, total, pool) in enumerate(fleet)
        ]  # fmt: skip

    # -- what happens

    @rule(
        wants=st.lists(candidates, min_size=1, max_size=3),
        priority=st.integers(0, 2),
        ordered=st.booleans(),
        objective=st.sampled_from(["any", "cost", "throughput"]),
        budget=st.tuples(st.integers(0, 2), st.integers(-1, 2)),
    )
    def submit(self, wants, priority, ordered, objective, budget):
        job = Job(
            f"job-{len(self.ledger.records)}", "job", "train", tuple(wants), ordered, priority, objective,
            self.now_s, Recovery(*budget),
        )  # fmt: skip
        self.write(submitted(job, {}, "", self.now_s))

    @rule()
    def turn(self):
        seen = self.snapshot()
        decided = plan(seen)
        self.check_starts(seen, decided)
        self.check_nobody_is_overtaken(seen, decided)
        self.check_preemption(seen, decided)
        self.check_every_waiting_job_is_told_why(seen, decided)
        have = {d.id: d for d in self.fleet}
        for start in decided.start:
            first = have[start.leases[0][0]]
            self.write(placed(self.job(start.job), start, first.kind, first.pool, self.now_s))
        for preempt in decided.preempt:
            self.write(Event(preempt.victim, "preempted", self.job(preempt.victim).epoch, self.now_s))

    @rule(seed=st.integers(0, 2**16))
    def the_order_of_what_is_told_changes_nothing(self, seed):
        seen, shuffle = self.snapshot(), Random(seed)
        parts = {name: list(getattr(seen, name)) for name in ("devices", "jobs", "running")}
        for part in parts.values():
            shuffle.shuffle(part)
        assert plan(replace(seen, **{name: tuple(part) for name, part in parts.items()})) == plan(seen)

    @precondition(lambda self: any(r.live for r in self.ledger.records.values()))
    @rule(data=st.data(), outcome=outcomes)
    def an_attempt_ends(self, data, outcome):
        live = [r for r in self.ledger.records.values() if r.live]
        record = data.draw(st.sampled_from(live))
        job, (state, failure, codes) = record.job, outcome
        if job.state in TERMINAL:
            self.write(Event(job.id, "released", job.epoch, self.now_s, {"outcome": "cancelled"}))
            return
        how = retry.Ended(state, record.live.candidate, failure, "", codes)
        self.write(ended(job, retry.after(job, how, self.now_s), self.now_s))

    @precondition(lambda self: self.ledger.records)
    @rule(data=st.data(), event=st.sampled_from(["started", "finished", "failed", "checkpoint", "preempted"]))
    def an_old_or_odd_event_arrives(self, data, event):
        record = data.draw(st.sampled_from(list(self.ledger.records.values())))
        epoch = data.draw(st.integers(0, record.job.epoch))
        if epoch == record.job.epoch and event in ("finished", "failed"):
            event = "started"
        before = dict(self.ledger.records)
        self.write(Event(record.job.id, event, epoch, self.now_s, {"reason": "late"}))
        if epoch < record.job.epoch:
            assert self.ledger.records == before

    @precondition(lambda self: self.ledger.records)
    @rule(data=st.data())
    def a_user_cancels(self, data):
        record = data.draw(st.sampled_from(list(self.ledger.records.values())))
        self.write(Event(record.job.id, "cancelled", 0, self.now_s, {"reason": "by its user"}))

    @rule(data=st.data())
    def a_node_goes_or_returns(self, data):
        index = data.draw(st.integers(0, len(self.fleet) - 1))
        have = self.fleet[index]
        self.fleet[index] = replace(have, schedulable=not have.schedulable, reason=f"node {have.node} is lost")

    @rule(seconds=st.integers(1, 90))
    def time_passes(self, seconds):
        self.now_s += seconds

    # -- what must hold

    @invariant()
    def a_device_belongs_to_at_most_one_attempt_and_none_is_invented(self):
        if not hasattr(self, "fleet"):
            return
        total = {d.id: d.total for d in self.fleet}
        held = [(i, n) for r in self.live() for i, numbers in r.live.leases for n in numbers]
        assert len(held) == len(set(held))
        assert all(0 <= number < total[devices_id] for devices_id, number in held)

    @invariant()
    def a_job_holds_all_it_needs_or_nothing_and_epochs_grow_by_one(self):
        if not hasattr(self, "fleet"):
            return
        for record in self.ledger.records.values():
            assert [a.epoch for a in record.attempts] == list(range(1, record.job.epoch + 1))
            assert all(a.ended_s is not None for a in record.attempts[:-1])
            assert record.live is None or record.job.state not in WAITING
            for attempt in record.attempts:
                want = record.job.candidates[attempt.candidate]
                counts = {len(numbers) for _, numbers in attempt.leases}
                assert len({devices_id for devices_id, _ in attempt.leases}) == len(attempt.leases) == want.nodes
                assert len(counts) == 1
                assert want.min_count <= counts.pop() <= want.count
                assert len({self.island(devices_id) for devices_id, _ in attempt.leases}) == 1

    @invariant()
    def replaying_the_log_gives_the_same_jobs(self):
        if not hasattr(self, "fleet"):
            return
        assert fold(self.events) == self.ledger.records
        twice = [event for event in self.events for _ in range(2)]
        assert {k: r.job for k, r in fold(twice).items()} == {k: r.job for k, r in self.ledger.records.items()}

    def check_starts(self, seen, decided):
        free = {d.id: set(d.free) for d in seen.devices}
        by_id = {d.id: d for d in seen.devices}
        for start in decided.start:
            job = self.job(start.job)
            assert job.state in WAITING
            assert job.not_before_s <= seen.now_s
            for devices_id, numbers in start.leases:
                have = by_id[devices_id]
                assert have.schedulable
                assert set(numbers) <= free[devices_id]
                free[devices_id] -= set(numbers)
                assert not have.emulated or have.kind in job.candidates[start.candidate].kinds

    def check_nobody_is_overtaken(self, seen, decided):
        """A job that did not start would not have started with all that later jobs got, either."""
        started = {s.job: s for s in decided.start}
        free = {d.id: set(d.free) for d in seen.devices}
        for job in fifo(seen):
            if job.id in started:
                for devices_id, numbers in started[job.id].leases:
                    free[devices_id] -= set(numbers)
            elif job.not_before_s <= seen.now_s and self.nothing_kept_before(job, decided):
                assert not any(fits(want, list(seen.devices), free) for want in job.candidates)

    def nothing_kept_before(self, job, decided):
        return not any("kept for" in why for why in decided.why_not[job.id].values())

    def check_preemption(self, seen, decided):
        """Strictly lower priority, each asked once, and of each job's victims none could have been spared."""
        held = {r.job: r for r in seen.running}
        victims = [p.victim for p in decided.preempt]
        assert len(victims) == len(set(victims))
        for preempt in decided.preempt:
            assert held[preempt.victim].priority < self.job(preempt.job).priority
            assert not held[preempt.victim].stopping
        asking = [job for job in fifo(seen) if any(p.job == job.id for p in decided.preempt)]
        if asking and not any(r.stopping for r in seen.running):
            self.check_none_could_be_spared(seen, decided, asking[0], held)

    def check_none_could_be_spared(self, seen, decided, job, held):
        order = [j.id for j in fifo(seen)]
        ahead = order[: order.index(job.id)]
        if any(name in decided.why_not for name in ahead):
            return
        free = {d.id: set(d.free) for d in seen.devices}
        for start in decided.start:
            if start.job in ahead:
                for devices_id, numbers in start.leases:
                    free[devices_id] -= set(numbers)
        mine = [p.victim for p in decided.preempt if p.job == job.id]

        def enough(stopped):
            after = {devices_id: set(numbers) for devices_id, numbers in free.items()}
            for victim in stopped:
                for devices_id, numbers in held[victim].leases:
                    after[devices_id] |= set(numbers)
            return any(fits(want, list(seen.devices), after) for want in job.candidates)

        assert enough(mine)
        assert not any(enough([v for v in mine if v != spared]) for spared in mine)

    def check_every_waiting_job_is_told_why(self, seen, decided):
        started = {s.job for s in decided.start}
        waiting = {job.id for job in seen.jobs if job.state in WAITING}
        assert started | set(decided.why_not) == waiting
        assert not started & set(decided.why_not)
        assert all(why for reasons in decided.why_not.values() for why in reasons.values())

    # -- helpers

    def write(self, event):
        event = replace(event, seq=len(self.events) + 1)
        self.events.append(event)
        self.ledger.apply(event)

    def job(self, job_id):
        return self.ledger.records[job_id].job

    def live(self):
        return [r for r in self.ledger.records.values() if r.live]

    def island(self, devices_id):
        return next((d.pool, d.kind, d.environment) for d in self.fleet if d.id == devices_id)

    def snapshot(self):
        held = {d.id: set() for d in self.fleet}
        for record in self.live():
            for devices_id, numbers in record.live.leases:
                held[devices_id] |= set(numbers)
        devices = tuple(replace(d, free=tuple(sorted(set(d.free) - held[d.id]))) for d in self.fleet)
        records = self.ledger.records.values()
        waiting = tuple(r.job for r in records if r.job.state in WAITING and not r.live)
        return Snapshot(self.now_s, devices, waiting, running(records))


World.TestCase.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestWorld = World.TestCase


def test_a_gang_starts_although_small_jobs_never_stop_coming(w):
    """Of equal priority, so nobody is stopped for it; the small ones take a free device whenever they may."""
    for seed in range(30):
        chance = Random(seed)
        fleet = [w.devices(f"n{i}", 4) for i in range(3)]
        free = {d.id: set(d.free) for d in fleet}
        jobs, ends, now, started_at = {}, {}, 0, None

        def snapshot(now, jobs=jobs, free=free, fleet=fleet):
            devices = [replace(d, free=tuple(sorted(free[d.id]))) for d in fleet]
            return w.snapshot(devices, jobs.values(), now_s=now)

        while started_at is None:
            now += 1
            assert now < 60, f"seed {seed}: the gang starves"
            for job, (end, leases) in list(ends.items()):
                if end <= now:
                    del ends[job]
                    for devices_id, numbers in leases:
                        free[devices_id] |= set(numbers)
            for n in range(3):
                jobs[f"s{now}.{n}"] = w.job(f"s{now}.{n}", count=chance.choice([1, 2]), submitted_s=now)
            if now == 5:
                jobs["gang"] = w.job("gang", w.want(count=4, nodes=2), submitted_s=4.5)
            for start in plan(snapshot(now)).start:
                del jobs[start.job]
                ends[start.job] = (now + chance.randint(1, 8), start.leases)
                for devices_id, numbers in start.leases:
                    free[devices_id] -= set(numbers)
                if start.job == "gang":
                    started_at = now


def test_an_interrupted_job_of_every_state_finds_its_end(w):
    """From every state that is not terminal a few events lead to an end: nothing is stuck."""
    for state in set(State) - TERMINAL:
        job = w.job("j", state=state, recovery=Recovery(max_restarts=0, max_interruptions=0))
        if state in WAITING:
            continue
        assert retry.after(job, retry.Ended("lost"), 1.0).event == "failed"
