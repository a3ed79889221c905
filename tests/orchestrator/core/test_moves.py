"""Equals that are stopped or moved: only trainings that have a checkpoint, only where it pays, with the numbers."""

from dataclasses import replace

import pytest

from orchestrator.core.model import DeclaredWork, Preempt, Progress, Recovery, Since, Start
from orchestrator.core.placement_slots import Island, Place, PlaceReservation, PlanMemory
from orchestrator.core.plan.plan import plan

OLD = Since(-10_000.0, -9_000.0)


@pytest.fixture
def fleet(w):
    """A slow training on one device of a pool of two, both held."""

    def made(jobs=(), running=(), devices=None, **more):
        seen = w.snapshot(devices or [w.cpu("a", 2, free=()), w.v5e("t", 1)], jobs, running, policy="finish_time")
        since = {r.job: OLD for r in running}
        return replace(seen, since=since, **more)

    return made


def training(w, name="slow", kinds=("cpu", "tpu"), **more):
    return w.job(name, *(w.want(kind) for kind in kinds), number=1, **more)


def held(w, job, *leases, saves=True, **more):
    return w.running(job.id, *leases, spec=job, saves=saves, **more)


FAR = Progress(step=100, of=10_100, rates={("cpu", 1): 1.0, ("tpu:v5e", 1): 10.0}, starts_s=30.0)
"""10,000 s are left on the CPU, and 1,000 s on the TPU."""

ON_CPU = ("a/cpu", (0,))


def test_a_job_moves_to_devices_on_which_it_ends_so_much_earlier_that_the_move_pays(w, fleet):
    job = training(w)
    seen = fleet(running=[held(w, job, ON_CPU)], progress={"slow": FAR})
    decided = plan(seen, full=True)
    [moved] = decided.preempt
    assert (moved.victim, moved.job) == ("slow", "slow")
    assert moved.reason == (
        "moves to 1 tpu:v5e in pool v5e: about 16.7 min are left there, 2.78 h here, and the move costs about 30 s"
    )
    assert decided.memory.reserved["slow"].place == Place(1, Island("v5e", "tpu:v5e", "tpu", "v5e"), 1)
    assert plan(seen).preempt == (), "between full decisions nothing that runs is touched"


@pytest.mark.parametrize(
    "untouched",
    [
        {"task": "run"},
        {"recovery": Recovery(max_interruptions=3)},
        {"ordered": True},
        {"objective": "cost"},
    ],
)
def test_jobs_whose_users_do_not_want_it_are_not_moved(w, fleet, untouched):
    job = replace(training(w), **untouched)
    assert plan(fleet(running=[held(w, job, ON_CPU)], progress={"slow": FAR}), full=True).preempt == ()


@pytest.mark.parametrize(
    "attempt", [{"saves": False}, {"preemptible": False}, {"stopping": True}], ids=lambda told: next(iter(told))
)
def test_attempts_that_would_lose_something_are_not_moved(w, fleet, attempt):
    running = held(w, training(w), ON_CPU, **attempt)
    assert plan(fleet(running=[running], progress={"slow": FAR}), full=True).preempt == ()


def test_a_job_that_has_only_just_started_is_left_alone(w, fleet):
    seen = fleet(running=[held(w, training(w), ON_CPU)], progress={"slow": FAR})
    assert plan(replace(seen, since={"slow": Since(0.0, 50.0)}), full=True).preempt == ()


def test_a_guess_moves_nobody(w, fleet):
    known_here = replace(FAR, rates={("cpu", 1): 1.0})
    assert plan(fleet(running=[held(w, training(w), ON_CPU)], progress={"slow": known_here}), full=True).preempt == ()


def test_a_move_that_costs_more_than_it_saves_is_not_made(w, fleet):
    for progress in (
        replace(FAR, starts_s=6000.0),
        replace(FAR, step=10_050),
        replace(FAR, rates={**FAR.rates, ("tpu:v5e", 1): 1.05}),
    ):
        seen = fleet(running=[held(w, training(w), ON_CPU)], progress={"slow": progress})
        assert plan(replace(seen, since={"slow": Since(-1e6, -1e6)}), full=True).preempt == ()


def test_a_job_that_saves_before_it_moves_finds_its_next_place_kept(w, fleet):
    kept = PlaceReservation(Place(1, Island("v5e", "tpu:v5e", "tpu", "v5e"), 1), until_s=200.0)
    attempt = held(w, training(w), ON_CPU, stopping=True)
    other = w.job("other", w.want("tpu"), number=2)
    seen = fleet([other], [attempt], memory=PlanMemory(reserved={"slow": kept}))
    decided = plan(seen)
    assert decided.start == ()
    assert "1 more reserved for slow" in decided.why_not["other"][0, "t/tpu:v5e"]
    late = plan(replace(seen, now_s=201.0))
    assert [start.job for start in late.start] == ["other"], "not for ever"


def test_it_goes_there_first_once_it_has_saved(w, fleet):
    kept = PlaceReservation(Place(1, Island("v5e", "tpu:v5e", "tpu", "v5e"), 1), until_s=200.0)
    other = w.job("other", w.want("tpu"), number=1)
    seen = fleet(
        [other, replace(training(w), number=2)],
        devices=[w.cpu("a", 2), w.v5e("t", 1)],
        memory=PlanMemory(reserved={"slow": kept}),
    )
    decided = plan(seen)
    assert [(s.job, s.allocation) for s in decided.start] == [("slow", (("t/tpu:v5e", (0,)),))]
    assert decided.memory.reserved == {}


# -- exchanges


def exchange(w, fleet, left=50_000, **more):
    """`slow` would be ten times as fast on the only TPU, which is held by a job that is as fast on a CPU."""
    slow, there = training(w), training(w, "there")
    attempts = [held(w, slow, ON_CPU), held(w, there, ("t/tpu:v5e", (0,)), **more)]
    progress = {"slow": FAR, "there": Progress(0, left, rates={("cpu", 1): 1.0, ("tpu:v5e", 1): 1.0}, starts_s=30.0)}
    return fleet(running=attempts, devices=[w.cpu("a", 1, free=()), w.v5e("t", 1, free=())], progress=progress)


def test_running_jobs_exchange_their_places_where_one_gains_more_than_the_other_loses(w, fleet):
    decided = plan(exchange(w, fleet), full=True)
    assert [(p.victim, p.job) for p in decided.preempt] == [("there", "slow"), ("slow", "slow")]
    makes_way, moves = (p.reason for p in decided.preempt)
    assert makes_way.startswith(
        "stops on t/tpu:v5e for slow of the same priority, which ends there about 2.5 h earlier"
    )
    assert makes_way.endswith("this job loses about 17.2 min")
    assert moves.startswith("moves to 1 tpu:v5e in pool v5e")
    assert decided.memory.reserved["slow"].place.island.pool == "v5e"
    assert plan(exchange(w, fleet)).preempt == (), "between full decisions nothing that runs is touched"


@pytest.mark.parametrize("more", [{"saves": False}, {"preemptible": False}, {"priority": 1}])
def test_who_may_not_be_stopped_for_equals_makes_no_room_for_one(w, fleet, more):
    assert plan(exchange(w, fleet, **more), full=True).preempt == ()


def test_nobody_makes_room_for_a_job_that_gains_less_than_it_costs(w, fleet):
    seen = exchange(w, fleet)
    somewhat = replace(FAR, rates={("cpu", 1): 1.0, ("tpu:v5e", 1): 1.5})
    assert plan(replace(seen, progress={**seen.progress, "slow": somewhat}), full=True).preempt == ()


def test_small_jobs_make_whole_nodes_free_for_a_gang_that_ends_sooner_there(w, fleet):
    gang = w.job("gang", w.want("cpu", count=2), w.want("tpu", count=2), number=1)
    small = [w.job(name, w.want("tpu"), number=2) for name in ("s1", "s2")]
    attempts = [
        held(w, gang, ("a/cpu", (0, 1))),
        held(w, small[0], ("t/tpu:v5e", (0,))),
        held(w, small[1], ("u/tpu:v5e", (0,))),
    ]
    devices = [w.cpu("a", 2, free=()), w.v5e("t", 2, free=(1,)), w.v5e("u", 2, free=(1,))]
    far = replace(FAR, rates={("cpu", 2): 1.0, ("tpu:v5e", 2): 10.0})
    progress = {"gang": far} | {
        name: Progress(0, 50_000, rates={("tpu:v5e", 1): 1.0}, starts_s=30.0) for name in ("s1", "s2")
    }
    decided = plan(fleet(running=attempts, devices=devices, progress=progress), full=True)
    [made_room, moved] = decided.preempt
    assert made_room.victim in ("s1", "s2") and (made_room.job, moved.victim) == ("gang", "gang")
    assert made_room.reason.endswith("this job loses about 30 s")
    dear = {name: replace(told, starts_s=8000.0) for name, told in progress.items() if name != "gang"}
    since = dict.fromkeys(("gang", "s1", "s2"), Since(-1e6, -1e6))
    too_dear = replace(fleet(running=attempts, devices=devices, progress=progress | dear), since=since)
    assert plan(too_dear, full=True).preempt == (), "their restarts cost more than it saves"


# -- numbers of devices


def elastic(w, **more):
    return w.job("e", w.want("cpu", count=2, min_count=1), number=1, **more)


def test_a_job_grows_onto_a_device_that_falls_free(w, fleet):
    progress = Progress(step=0, of=10_000, rates={("cpu", 1): 1.0}, starts_s=30.0)
    seen = fleet(running=[held(w, elastic(w), ON_CPU)], devices=[w.cpu("a", 2, free=(1,))], progress={"e": progress})
    decided = plan(seen, full=True)
    told = "about 83.3 min are left there, 2.78 h here, and the move costs about 30 s"
    assert decided.preempt == (Preempt("e", "e", f"moves to 2 cpu in pool cpu: {told}"),)
    assert decided.memory.reserved["e"].place.devices == 2


def test_it_shrinks_again_for_an_equal_that_waits(w, fleet):
    progress = Progress(step=0, of=10_000, rates={("cpu", 2): 2.0}, starts_s=30.0)
    job = elastic(w)
    new = w.job("new", w.want("cpu"), number=2, work=DeclaredWork(hours=0.1, on="cpu"))
    running = held(w, job, ("a/cpu", (0, 1)))
    seen = fleet([new], [running], devices=[w.cpu("a", 2, free=())], progress={"e": progress})
    decided = plan(seen, full=True)
    [stopped] = decided.preempt
    assert (stopped.victim, stopped.job) == ("e", "new")
    told = "stops on a/cpu for new of the same priority, which gains more from them"
    assert stopped.reason == f"{told}: 6 min left of new, 83.3 min left of this job"
    unknown = plan(replace(seen, jobs=(replace(new, work=DeclaredWork()),)), full=True).preempt[0].reason
    assert unknown == f"{told}: the duration of new is unknown, 83.3 min left of this job"
    assert decided.why_not["new"] == {(0, ""): "waits for e to save and stop on a/cpu"}
    assert plan(seen).preempt == ()
    after = fleet(
        [replace(job, state="RECOVERING"), new],
        devices=[w.cpu("a", 2)],
        progress={"e": progress},
        memory=decided.memory,
    )
    assert {s.job: s.allocation for s in plan(after).start} == {"new": (("a/cpu", (0,)),), "e": (("a/cpu", (1,)),)}


# -- who waits


def test_a_short_job_stops_a_long_one_and_a_long_one_does_not_stop_a_short_one(w, fleet):
    long, short = (
        training(w, "long", ["cpu"]),
        w.job("short", w.want("cpu"), number=2, work=DeclaredWork(hours=0.05, on="cpu")),
    )
    progress = {"long": Progress(step=0, of=100_000, rates={("cpu", 1): 1.0}, starts_s=10.0)}
    seen = fleet([short], [held(w, long, ON_CPU)], devices=[w.cpu("a", 1, free=())], progress=progress)
    assert [(p.victim, p.job) for p in plan(seen, full=True).preempt] == [("long", "short")]
    other_way = replace(short, work=DeclaredWork(hours=500, on="cpu"))
    brief = {"long": Progress(step=0, of=600, rates={("cpu", 1): 1.0}, starts_s=10.0)}
    assert plan(replace(seen, jobs=(other_way,), progress=brief), full=True).preempt == ()


def test_a_gang_that_has_waited_long_goes_before_short_jobs(w, fleet):
    gang = w.job("gang", w.want("cpu", count=2), number=1)
    small = [w.job(f"s{n}", w.want("cpu"), number=2 + n) for n in range(3)]
    busy = w.running("busy", ("a/cpu", (0,)))
    seen = fleet([gang, *small], [busy], devices=[w.cpu("a", 2, free=(1,))])
    assert [s.job for s in plan(seen).start] == ["s0"], "nothing lies idle at first"
    waited = plan(replace(seen, since={"gang": Since(-90_000.0, -90_000.0)}))
    assert waited.start == ()
    assert (
        waited.why_not["gang"][0, ""]
        == "waits for 1 of 2 devices on a/cpu, held by busy; the others are reserved for it"
    )


def test_with_a_policy_of_order_nothing_is_ever_moved(w, fleet):
    seen = fleet(running=[held(w, training(w), ON_CPU)], progress={"slow": FAR})
    assert plan(replace(seen, policy="priority"), full=True).preempt == ()
    assert plan(replace(seen, policy="fifo"), full=True) == plan(replace(seen, policy="fifo"))


def test_the_decision_is_certified(w, fleet):
    jobs = [w.job(f"j{n}", w.want("cpu"), number=n + 1, work=DeclaredWork(hours=n + 1, on="cpu")) for n in range(5)]
    decided = plan(fleet(jobs, devices=[w.cpu("a", 2)]), full=True)
    assert [s.job for s in decided.start] == ["j0", "j1"]
    assert 0.0 <= decided.gap < 0.05
    assert decided.start[0] == Start("j0", 0, (("a/cpu", (0,)),), decided.start[0].reason)
