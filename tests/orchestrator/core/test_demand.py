"""What an autoscaler is asked for: whole demands compared."""

from orchestrator.core.controller.scaling import Demand, NodeGroup
from orchestrator.core.fleet.demand import demand, requests
from orchestrator.core.plan.plan import plan

GiB = 2**30


def group(pool="h100", kind="nvidia:H100-80GB", devices=8, most=4, memory_gib=80, **more):
    backend = kind.partition(":")[0]
    resources = {"CPU": 96, "GPU": devices}
    return NodeGroup(pool, pool, backend, kind, devices, resources, most, memory_bytes=memory_gib * GiB, **more)


V5E = group("v5e", "tpu:v5e", devices=4, most=8, memory_gib=16, hosts=4)


def asked(w, devices, jobs, *groups, **more):
    seen = w.snapshot(devices, jobs)
    return demand(seen, plan(seen), groups, **more)


def test_an_empty_queue_asks_for_the_nodes_in_use_alone(w):
    busy, idle = w.devices("a", 8, free=(0, 1)), w.devices("b", 8)
    assert asked(w, [busy, idle], [], group()) == Demand({"h100": 1})


def test_a_job_that_waits_asks_for_a_node_of_a_pool_that_has_none_yet(w):
    assert asked(w, [], [w.job("j", count=8)], group()) == Demand({"h100": 1}, {"j": "h100"})


def test_jobs_that_fit_on_one_node_ask_for_one(w):
    jobs = [w.job(f"j{n}", count=4, number=n) for n in range(1, 4)]
    assert asked(w, [], jobs, group()).nodes == {"h100": 2}


def test_busy_nodes_count_beside_new_ones_since_ray_is_told_the_whole(w):
    busy = w.devices("a", 8, free=())
    found = asked(w, [busy], [w.job("j", count=8)], group())
    assert (found.nodes, found.jobs) == ({"h100": 2}, {"j": "h100"})


def test_what_starts_now_on_an_idle_node_keeps_it(w):
    assert asked(w, [w.devices("a", 8)], [w.job("j", count=8)], group()) == Demand({"h100": 1})


def test_a_gang_asks_for_all_its_nodes_and_an_idle_one_is_among_them(w):
    gang = w.job("g", w.want(count=8, nodes=3))
    assert asked(w, [w.devices("a", 8)], [gang], group()) == Demand({"h100": 3}, {"g": "h100"})


def test_no_more_nodes_are_asked_for_than_there_may_be_and_the_rest_waits(w):
    jobs = [w.job(f"j{n}", count=8, number=n) for n in range(1, 7)]
    found = asked(w, [w.devices("a", 8, free=())], jobs, group(most=4))
    assert found.nodes == {"h100": 4}
    assert list(found.jobs) == ["j1", "j2", "j3"] and list(found.why_not) == ["j4", "j5", "j6"]


def test_a_gang_that_no_pool_could_ever_hold_asks_for_nothing(w):
    found = asked(w, [], [w.job("g", w.want(count=8, nodes=5))], group(most=4))
    assert found == Demand(
        {"h100": 0}, {}, {"g": "no node that an autoscaler may start can run the job: h100 can grow"}
    )


def test_nodes_that_take_no_work_do_not_count_for_a_job_that_needs_one(w):
    drained = w.devices("a", 8, schedulable=False, reason="node a is drained")
    closed = {"h100": {"a"}}
    assert asked(w, [drained], [w.job("j", count=8)], group(), closed=closed).nodes == {"h100": 2}
    assert asked(w, [drained], [], group(), closed=closed).nodes == {"h100": 0}


def test_a_pool_dearer_than_the_job_pays_is_not_asked_for(w):
    cheap = w.job("j", w.want("nvidia", max_price=2.0))
    assert asked(w, [], [cheap], group("dear", price_per_hour=4.0), group("spot", price_per_hour=1.5)).jobs == {
        "j": "spot"
    }


def test_slices_come_whole(w):
    assert asked(w, [], [w.job("t", w.want("tpu:v5e", count=4))], V5E).nodes == {"v5e": 4}
    assert asked(w, [], [w.job("t", w.want("tpu", count=4, nodes=4))], V5E).nodes == {"v5e": 4}


def test_the_first_candidate_is_asked_for_and_the_next_where_its_nodes_could_not_be_had(w):
    job = w.job("j", w.want("nvidia:H100", count=8), w.want("tpu:v5e", count=4), ordered=True)
    assert asked(w, [], [job], group(), V5E).jobs == {"j": "h100"}
    again = asked(w, [], [job], group(), V5E, unavailable={"h100": 101.0})
    assert again == Demand({"h100": 0, "v5e": 4}, {"j": "v5e"})
    assert asked(w, [], [job], group(), V5E, unavailable={"h100": 100.0}).jobs == {"j": "h100"}


def test_of_two_pools_that_would_do_the_cheaper_is_asked_for(w):
    dear, cheap = group("dear", price_per_hour=4.0), group("spot", price_per_hour=1.0)
    assert asked(w, [], [w.job("j", count=8)], dear, cheap).jobs == {"j": "spot"}


def test_memory_and_the_pool_a_job_names_hold_for_nodes_that_do_not_exist_too(w):
    jobs = [w.job("big", w.want("nvidia", memory_bytes=100 * GiB), number=1), w.job("b", w.want("any", pool="b"))]
    found = asked(w, [], jobs, group("a"), group("b"))
    assert found.jobs == {"b": "b"} and list(found.why_not) == ["big"]


def test_a_job_that_pauses_asks_for_nothing(w):
    seen = w.snapshot([], [w.job("j", count=8)], paused_until_s={"j": 160.0})
    assert demand(seen, plan(seen), (group(),)) == Demand({"h100": 0})


def test_where_no_pool_can_grow_nothing_is_asked_for(w):
    assert asked(w, [], [w.job("j")]) == Demand({}, {}, {"j": "no pool of this fleet can grow"})


def test_ray_is_told_a_whole_node_with_its_pools_label_for_each(w):
    found = asked(w, [], [w.job("g", w.want(count=8, nodes=2))], group(), V5E)
    one = {"resources": {"CPU": 96, "GPU": 8}, "label_selector": {"polyfleet.io/pool": "h100"}}
    assert requests(found, (group(), V5E)) == [one, one]
