"""Who has waited too long goes first: not where all have to wait long."""

from dataclasses import replace

from orchestrator.core.jobs.expected_duration import expectation
from orchestrator.core.model import DeclaredWork, Since
from orchestrator.core.placement_slots import PlanMemory
from orchestrator.core.plan.moves import STARVES_S, is_starving
from orchestrator.core.plan.plan import plan

HOUR_S = 3600.0


def job(w, name, hours, number, **more):
    return w.job(name, w.want("cpu", **more), number=number, work=DeclaredWork(hours=hours, on="cpu"))


def world(w, jobs, waited_s, nodes=1, **more):
    seen = w.snapshot([w.cpu(f"c{n}", 1) for n in range(nodes)], jobs, policy="finish_time", now_s=1e6, **more)
    return replace(seen, since={one.id: Since(1e6 - waited_s, 1e6 - waited_s) for one in jobs})


def test_a_job_starves_after_ten_times_as_long_as_it_runs_and_half_an_hour(w):
    short, long = job(w, "short", 0.01, 1), job(w, "long", 1.0, 2)

    def starving(waited_s):
        seen = world(w, [short, long], waited_s)
        return [is_starving(one, seen, expectation(seen)) for one in (short, long)]

    assert starving(STARVES_S - 1) == [False, False]
    assert starving(STARVES_S + 1) == [True, False]
    assert starving(10 * HOUR_S + 1) == [True, True]


def test_it_does_not_while_as_much_of_its_size_waits_as_takes_half_of_that_time(w):
    one = job(w, "one", 1.0, 1)
    seen = world(w, [one], 11 * HOUR_S)
    small = tuple(0.0 for _ in range(11))
    assert not is_starving(one, seen, expectation(seen), (*small, *[6 * HOUR_S] * 20))
    assert is_starving(one, seen, expectation(seen), (*small, *[5 * HOUR_S] * 20))
    assert is_starving(one, seen, expectation(seen), (*small, 0.0, 0.0, *[6 * HOUR_S] * 18)), "larger ones do not count"


def test_what_waits_is_remembered_by_size_and_forgotten_slowly(w):
    jobs = [job(w, f"h{n}", 1.0, n) for n in range(1, 6)]
    told = plan(world(w, jobs, 0.0, nodes=2)).memory
    [drains] = told.drains_s.values()
    assert drains[11] == 0.0 and drains[12] == drains[-1] == 2.5 * HOUR_S
    later = replace(world(w, jobs[:1], 0.0, nodes=2), now_s=1e6 + HOUR_S, memory=told)
    assert plan(later).memory.drains_s[0][-1] == 2.0 * HOUR_S


def test_where_the_last_job_counts_all_that_waits_counts_for_each(w):
    jobs = [job(w, "small", 0.1, 1), job(w, "large", 10.0, 2)]
    told = plan(replace(world(w, jobs, 0.0), policy="makespan")).memory.drains_s[0]
    assert set(told) == {told[-1]} and told[-1] > 10 * HOUR_S


def test_places_for_which_others_stopped_go_before_jobs_that_starve(w):
    from orchestrator.core.placement_slots import Island, Place, PlaceReservation

    gang, old = job(w, "gang", 50.0, 9), job(w, "old", 0.1, 1)
    kept = PlaceReservation(Place(0, Island("cpu", "cpu", "cpu", "cpu"), 1), until_s=2e6)
    seen = world(w, [old, gang], 20 * HOUR_S, memory=PlanMemory(reserved={"gang": kept}))
    assert [start.job for start in plan(seen).start] == ["gang"]
    assert [start.job for start in plan(replace(seen, memory=PlanMemory())).start] == ["old"]


def test_devices_that_no_chosen_job_takes_are_not_kept_from_equals(w):
    gang = w.job("gang", w.want("cpu", count=2), number=1)
    small = w.job("small", w.want("cpu"), number=2)
    busy = w.cpu("c", 2, free=(0,))
    seen = w.snapshot([busy], [gang, small], policy="finish_time")
    assert [start.job for start in plan(seen).start] == ["small"]
    lower = replace(seen, jobs=(gang, replace(small, priority=-1)))
    assert not plan(lower).start, "but from jobs of lower priority"


def test_a_blocked_job_keeps_its_reservation_when_equal_nodes_appear(w):
    """An attempt on node `a` stops for another job; then `a` would be enough for the first job, too."""
    a, b, c = w.cpu("a", 3, free=(0,)), w.cpu("b", 4, free=(0, 1)), w.cpu("c", 2, free=(0,))
    jobs = [
        w.job("first", w.want("cpu", count=3), priority=2, number=1),
        w.job("small", w.want("cpu", count=2), priority=2, number=2),
        w.job("later", w.want("cpu", count=3), priority=1, number=3),
    ]
    ending = w.running("ending", (a.id, (1,)), (b.id, (2,)), (c.id, (1,)), priority=9, stopping=True)
    low = w.running("low", (a.id, (2,)))
    seen = w.snapshot([a, b, c], jobs, [ending, low, w.running("high", (b.id, (3,)), priority=9)], policy="fifo")

    decided = plan(seen)
    assert [(p.victim, p.job) for p in decided.preempt] == [("low", "later")]
    assert decided.memory.waits_on["first"] == (b.id,)

    stopped = replace(seen, running=tuple(replace(r, stopping=r.stopping or r.job == "low") for r in seen.running))
    assert [start.job for start in plan(stopped).start] == ["small"], "without memory, the first job turns to `a`"
    again = plan(replace(stopped, memory=decided.memory))
    assert (again.start, again.preempt) == ((), ())
    assert again.memory.waits_on == decided.memory.waits_on
