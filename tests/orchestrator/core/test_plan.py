"""Whole plans compared: what starts, who is asked to stop, and every refusal."""

from dataclasses import replace
from itertools import permutations

import pytest

from orchestrator.core.model import Data, Plan, Preempt, Recovery, Start
from orchestrator.core.placement_slots import PlanMemory
from orchestrator.core.plan.options.placement_options import NO_DEVICES
from orchestrator.core.plan.plan import plan
from orchestrator.core.states import State


def test_a_job_nothing_can_run_says_why_for_all_devices(w):
    h200 = w.devices("node-a", kind="nvidia:H200", pool="h200", memory_gib=141)
    big = w.job("big", w.want("tpu:v5e", memory_bytes=40 * w.GiB))
    assert plan(w.snapshot([h200, w.v5e("node-b")], [big])) == Plan(
        why_not={
            "big": {
                (0, "node-a/nvidia:H200"): "is of kind nvidia:H200, but the job accepts tpu:v5e",
                (0, "node-b/tpu:v5e"): "has 16 GiB per device, but the job needs 40 GiB",
            }
        }
    )


def test_an_empty_fleet_and_an_empty_queue_make_an_empty_plan(w):
    assert plan(w.snapshot([], [])) == Plan()
    assert plan(w.snapshot([w.cpu()], [])) == Plan()
    assert plan(w.snapshot([], [w.job("a")])) == Plan(why_not={"a": {(0, ""): NO_DEVICES}})


def test_the_tightest_node_that_fits_is_taken(w):
    roomy, tight, full = w.devices("a", 8), w.devices("b", 8, free=(5, 6)), w.devices("c", 8, free=(7,))
    assert plan(w.snapshot([roomy, tight, full], [w.job("j", count=2)])) == Plan(
        start=(Start("j", 0, (("b/nvidia:H100-80GB", (5, 6)),), "nvidia:H100-80GB in pool h100, the tightest fit"),)
    )


def test_jobs_share_what_is_there_in_order_and_the_last_learns_why_it_waits(w):
    node = w.devices("a", 4)
    first, second, third = (w.job(name, count=2, number=n) for n, name in enumerate(("x", "y", "z"), start=1))
    why = "nvidia:H100-80GB in pool h100, the tightest fit"
    assert plan(w.snapshot([node], [third, second, first])) == Plan(
        start=(Start("x", 0, ((node.id, (0, 1)),), why), Start("y", 0, ((node.id, (2, 3)),), why)),
        why_not={
            "z": {
                (0, node.id): "has 0 of 4 devices free, but the job needs 2",
                (0, ""): f"waits for 2 devices on {node.id}",
            }
        },
        memory=PlanMemory(waits_on={"z": (node.id,)}),
    )


def test_a_higher_priority_is_served_before_an_earlier_job(w):
    early, urgent = w.job("early", number=1), w.job("urgent", number=2, priority=1)
    decided = plan(w.snapshot([w.devices("a", 1)], [early, urgent]))
    assert [s.job for s in decided.start] == ["urgent"]


def test_only_waiting_jobs_are_planned(w):
    jobs = [w.job(state.lower(), state=state) for state in State]
    decided = plan(w.snapshot([w.devices("a", 8)], jobs))
    assert {s.job for s in decided.start} == {"pending", "recovering"}
    assert not decided.why_not


def test_a_job_that_pauses_after_a_failure_says_for_how_long(w):
    job, paused = w.job("j", restarts=2, interruptions=1, state=State.RECOVERING), {"j": 104.0}
    assert plan(w.snapshot([w.devices("a", 1)], [job], now_s=100.0, paused_until_s=paused)) == Plan(
        why_not={"j": {(0, ""): "the server retries the job in 4.0 s, after 2 failures and 1 interruption"}}
    )
    assert [s.job for s in plan(w.snapshot([w.devices("a", 1)], [job], now_s=104.0, paused_until_s=paused)).start] == [
        "j"
    ]


# -- candidates


def test_ordered_candidates_are_taken_in_their_order_when_they_are_free(w):
    job = w.job("j", w.want("tpu:v5e"), w.want("nvidia"), w.want("cpu"), ordered=True)
    fleet = [w.cpu(), w.devices("a", 1), w.v5e()]
    assert plan(w.snapshot(fleet, [job])).start[0] == Start(
        "j", 0, (("v5e-0/tpu:v5e", (0,)),), "candidate 1 of 3: tpu:v5e in pool v5e, the tightest fit"
    )
    busy = [w.cpu(), w.devices("a", 1, free=()), w.v5e(free=())]
    assert plan(w.snapshot(busy, [job])).start[0].candidate == 2


def test_after_a_bad_end_ordered_candidates_are_tried_from_the_next_one_on(w):
    wants = (w.want("tpu:v5e"), w.want("nvidia"), w.want("cpu"))
    fleet = [w.cpu(), w.devices("a", 1), w.v5e()]

    def chosen(first, devices=fleet):
        job = w.job("j", *wants, ordered=True, first_candidate=first)
        return plan(w.snapshot(devices, [job])).start[0].candidate

    assert [chosen(first) for first in (0, 1, 2, 3)] == [0, 1, 2, 0]
    assert chosen(1, fleet[:1] + fleet[2:]) == 2
    assert chosen(2, fleet[1:]) == 0


def test_of_unordered_candidates_the_one_that_ended_badly_comes_last(w):
    wants = (w.want("nvidia:H100-80GB"), w.want("tpu:v5e"))
    fleet = [w.devices("a", 1), w.v5e(total=1)]
    chosen = [plan(w.snapshot(fleet, [w.job("j", *wants, first_candidate=n)])).start[0].candidate for n in (0, 1, 2)]
    assert chosen == [0, 1, 0]


def test_an_accelerator_is_taken_before_a_cpu_although_the_cpu_fits_tighter(w):
    decided = plan(w.snapshot([w.cpu(), w.v5e()], [w.job("j", w.want("any"))]))
    assert decided.start[0].allocation == (("v5e-0/tpu:v5e", (0,)),)


def test_the_plain_cpu_is_taken_before_a_variant_that_only_matches(w):
    fleet = [w.ipex("a"), w.cpu("b")]
    assert plan(w.snapshot(fleet, [w.job("j", w.want("cpu"))])).start[0].allocation[0][0] == "b/cpu"
    assert plan(w.snapshot(fleet, [w.job("j", w.want("cpu:ipex"))])).start[0].allocation[0][0] == "a/cpu:ipex"


def test_any_never_falls_to_an_emulated_device(w):
    assert plan(w.snapshot([w.xla()], [w.job("j", w.want("any"))])) == Plan(
        why_not={"j": {(0, "xla-0/tpu:emulated"): "is emulated on the CPU; request tpu:emulated or pool xla to use it"}}
    )


# -- objectives


def test_for_cost_the_cheapest_place_and_the_lower_end_of_a_range_are_taken(w):
    dear = w.devices("dear", 2, pool="cloud", price_per_hour=4.0)
    cheap = w.devices("cheap", 8, pool="ours", price_per_hour=1.5)
    job = w.job("j", w.want(count=4, min_count=2), objective="cost")
    assert plan(w.snapshot([dear, cheap], [job])).start == (
        Start("j", 0, ((cheap.id, (0, 1)),), "nvidia:H100-80GB in pool ours, 3.00 per hour"),
    )


def test_a_pool_without_a_price_is_said_to_have_none(w):
    job = w.job("j", objective="cost")
    assert plan(w.snapshot([w.devices("a", 1)], [job])).start[0].reason.endswith("which declares no price")


@pytest.mark.parametrize("objective", ["throughput", "finish_time"])
def test_for_speed_most_devices_are_taken_and_the_unmeasured_is_called_so(w, objective):
    job = w.job("j", w.want(count=8, min_count=2), objective=objective)
    fleet = [w.devices("a", 2), w.devices("b", 8, free=(0, 1, 2, 3))]
    assert plan(w.snapshot(fleet, [job])).start == (
        Start(
            "j",
            0,
            (("b/nvidia:H100-80GB", (0, 1, 2, 3)),),
            "nvidia:H100-80GB in pool h100, the tightest fit: throughput of this job is unmeasured",
        ),
    )


def test_of_equally_tight_places_the_cheaper_is_taken_and_of_equal_ones_the_first(w):
    dear = w.devices("a", 2, pool="a", price_per_hour=4.0)
    cheap, same = (w.devices(name, 2, pool=name, price_per_hour=1.0) for name in ("b", "c"))
    decided = plan(w.snapshot([same, dear, cheap], [w.job("x", number=1), w.job("y", number=2), w.job("z", number=3)]))
    assert [s.allocation for s in decided.start] == [((cheap.id, (0,)),), ((cheap.id, (1,)),), ((same.id, (0,)),)]


# -- gangs


def test_of_equal_nodes_and_pools_the_one_that_has_the_data_is_taken_and_a_tighter_or_cheaper_one_before_it(w):
    data = (Data("s3://bucket/tokens", "data/"), Data("./local", "more/", "ab" * 32))
    keys = tuple(one.key for one in data)
    assert keys[1] == "ab" * 8
    job = w.job("j", data=data)
    nodes = [w.devices("a"), w.devices("b", data=keys[:1]), w.devices("c", data=keys)]

    def chosen(*devices):
        return plan(w.snapshot(devices, [job])).start[0].allocation[0][0].partition("/")[0]

    assert chosen(*nodes) == "c" and chosen(*nodes[:2]) == "b" and chosen(nodes[0]) == "a"
    elsewhere = w.devices("z", pool="other", data=keys)
    assert chosen(*nodes[:2], elsewhere) == "z"
    assert chosen(*nodes[:2], replace(elsewhere, price_per_hour=1.0)) == "b"
    assert chosen(w.devices("a"), w.devices("c", 8, data=keys)) == "a"
    assert chosen(*nodes, w.devices("d", 2, free=(1,), data=keys)) == "c"
    told = plan(w.snapshot(nodes, [job])).start[0].reason
    assert told == "nvidia:H100-80GB in pool h100, where its data is cached, the tightest fit"


def test_a_gang_goes_to_nodes_that_have_the_data(w):
    job = w.job("j", w.want(nodes=2), data=(Data("s3://bucket/tokens", "data/"),))
    have = [w.devices(name, data=(job.data[0].key,) if name in "bd" else ()) for name in "abcd"]
    assert [d for d, _ in plan(w.snapshot(have, [job])).start[0].allocation] == [
        "b/nvidia:H100-80GB",
        "d/nvidia:H100-80GB",
    ]


def test_a_gang_takes_equal_shares_of_the_tightest_nodes_of_one_island(w):
    fleet = [w.devices("a", 8), w.devices("b", 8, free=(4, 5, 6, 7)), w.devices("c", 8, free=(2, 3, 4, 5, 6))]
    decided = plan(w.snapshot(fleet, [w.job("gang", w.want(count=4, nodes=2))]))
    assert [s.allocation for s in decided.start] == [
        (("b/nvidia:H100-80GB", (4, 5, 6, 7)), ("c/nvidia:H100-80GB", (2, 3, 4, 5)))
    ]


@pytest.mark.parametrize(
    "other", [{"pool": "h100-b"}, {"environment": "torch-2.8"}, {"kind": "nvidia:H100-94GB"}, {"kind": "amd:MI300X"}]
)
def test_a_gang_never_spans_islands(w, other):
    fleet = [w.devices("a", 8), w.devices("b", 8, **other)]
    job = w.job("gang", w.want("nvidia:H100", "amd:MI300X", count=8, nodes=2))
    decided = plan(w.snapshot(fleet, [job]))
    assert decided.start == ()
    assert (
        "the job needs 2 nodes of one pool and kind, each with 8 devices; pool h100" in decided.why_not["gang"][0, ""]
    )


def test_a_gang_over_a_range_gets_the_same_number_on_each_node(w):
    fleet = [w.devices("a", 8, free=(0, 1, 2, 3, 4)), w.devices("b", 8, free=(0, 1, 2)), w.devices("c", 8, free=(0,))]
    decided = plan(w.snapshot(fleet, [w.job("gang", w.want(count=8, min_count=2, nodes=2))]))
    assert [s.allocation for s in decided.start] == [
        (("b/nvidia:H100-80GB", (0, 1, 2)), ("a/nvidia:H100-80GB", (0, 1, 2)))
    ]


def test_of_a_range_as_many_devices_are_taken_as_divide_the_whole_batch(w):
    want = w.want(count=4, min_count=1, batch_size=12, nodes=2, whole_batch=True)
    fleet = [w.devices("a", 8, free=(0, 1, 2, 3)), w.devices("b", 8, free=tuple(range(8)))]
    assert [len(numbers) for _, numbers in plan(w.snapshot(fleet, [w.job("j", want)])).start[0].allocation] == [3, 3]
    want = replace(want, batch_size=16)
    fleet[0] = w.devices("a", 8, free=(0, 1, 2))
    assert [len(numbers) for _, numbers in plan(w.snapshot(fleet, [w.job("j", want)])).start[0].allocation] == [2, 2]


# -- who waits, and who makes room


def test_a_blocked_gang_keeps_what_it_needs_from_all_later_jobs(w):
    a, b = w.devices("a", 4), w.devices("b", 4, free=(0, 1))
    gang = w.job("gang", w.want(count=4, nodes=2), priority=5)
    small = w.job("small", count=1)
    refusal = "has 0 of 4 devices free, but the job needs 1; {} more reserved for gang, which is ahead in the queue"
    assert plan(w.snapshot([a, b], [small, gang])) == Plan(
        why_not={
            "gang": {
                (0, b.id): "has 2 of 4 devices free, but the job needs 4",
                (0, ""): f"waits for 2 of 8 devices on {a.id}, {b.id}; the others are reserved for it",
            },
            "small": {
                (0, a.id): refusal.format(4),
                (0, b.id): refusal.format(2),
                (0, ""): f"waits for 1 device on {a.id}",
            },
        },
        memory=PlanMemory(waits_on={"gang": (a.id, b.id), "small": (a.id,)}),
    )


def test_what_a_blocked_job_does_not_need_stays_free_for_later_ones(w):
    node = w.devices("a", 8, free=(0, 1, 2))
    decided = plan(w.snapshot([node, w.cpu()], [w.job("j", count=4, number=1), w.job("c", w.want("cpu"), number=2)]))
    assert [s.job for s in decided.start] == ["c"]


def test_a_job_that_nothing_can_ever_run_keeps_nothing_from_others(w):
    impossible = w.job("impossible", count=16, priority=9)
    decided = plan(w.snapshot([w.devices("a", 8)], [impossible, w.job("small", count=8)]))
    assert [s.job for s in decided.start] == ["small"]
    assert decided.why_not == {"impossible": {(0, "a/nvidia:H100-80GB"): "has 8 devices in all, but the job needs 16"}}


def test_a_job_that_may_not_cross_vendors_keeps_and_empties_nothing_of_another_vendor(w):
    """It last ran on a TPU: what the H100 node has is no use to it, whoever runs there."""
    node = w.devices("a", 2, free=(1,))
    stays = w.job("stays", w.want("any", count=2), priority=5, backend="tpu", recovery=Recovery(cross_vendor=False))
    other = w.running("other", (node.id, (0,)))
    decided = plan(w.snapshot([node], [stays, w.job("small", number=2)], [other]))
    assert [start.job for start in decided.start] == ["small"]
    assert decided.preempt == ()
    told = "is nvidia; the job last ran on tpu, and recovery.cross_vendor is false"
    assert decided.why_not["stays"] == {(0, node.id): told}


def test_a_job_claims_the_place_with_the_fewest_missing_devices(w):
    a, b = w.devices("a", 4, free=(0,)), w.devices("b", 4, free=(0, 1, 2))
    decided = plan(w.snapshot([a, b], [w.job("j", count=4, number=1), w.job("small", number=2)]))
    assert decided.start == (Start("small", 0, ((a.id, (0,)),), "nvidia:H100-80GB in pool h100, the tightest fit"),)
    assert decided.why_not["j"][0, ""] == f"waits for 1 of 4 devices on {b.id}; the others are reserved for it"


def test_of_several_islands_the_one_with_the_fewest_missing_is_claimed(w):
    a, b = w.devices("a", 4, free=(0,)), w.devices("b", 4, free=(0, 1, 2), pool="other")
    decided = plan(w.snapshot([a, b], [w.job("j", count=4)]))
    assert decided.why_not["j"][0, ""] == f"waits for 1 of 4 devices on {b.id}; the others are reserved for it"


def test_of_several_places_the_one_with_the_cheapest_victims_is_emptied(w):
    a, b = w.devices("a", 1, free=()), w.devices("b", 1, free=(), pool="other")
    running = [w.running("dear", (a.id, (0,)), priority=3), w.running("cheap", (b.id, (0,)), priority=1)]
    decided = plan(w.snapshot([a, b], [w.job("urgent", priority=5)], running))
    assert [p.victim for p in decided.preempt] == ["cheap"]


def test_a_job_of_higher_priority_asks_the_fewest_and_least_to_stop(w):
    node = w.devices("a", 4, free=())
    running = [
        w.running("old", (node.id, (0,)), priority=1, order=1),
        w.running("young", (node.id, (1,)), priority=1, order=9),
        w.running("dear", (node.id, (2,)), priority=3),
        w.running("equal", (node.id, (3,)), priority=5),
    ]
    decided = plan(w.snapshot([node], [w.job("urgent", priority=5)], running))
    assert decided == Plan(
        preempt=(Preempt("young", "urgent", f"urgent (priority 5) needs 1 of {node.id}"),),
        why_not={
            "urgent": {
                (0, node.id): "has 0 of 4 devices free, but the job needs 1",
                (0, ""): f"waits for young of lower priority to save and stop on {node.id}",
            }
        },
        memory=PlanMemory(waits_on={"urgent": (node.id,)}),
    )


def test_nobody_is_stopped_where_that_would_not_be_enough(w):
    node = w.devices("a", 4, free=())
    running = [
        w.running("low", (node.id, (0, 1)), priority=0),
        w.running("equal", (node.id, (2, 3)), priority=5),
    ]
    decided = plan(w.snapshot([node], [w.job("urgent", count=4, priority=5)], running))
    assert decided.preempt == ()
    assert "waits for 4 devices" in decided.why_not["urgent"][0, ""]


def test_nobody_is_stopped_while_another_candidate_is_free(w):
    node = w.devices("a", 1, free=())
    job = w.job("urgent", w.want("nvidia"), w.want("cpu"), ordered=True, priority=5)
    decided = plan(w.snapshot([node, w.cpu()], [job], [w.running("low", (node.id, (0,)))]))
    assert decided.preempt == ()
    assert decided.start[0].candidate == 1


def test_an_attempt_that_is_stopping_is_counted_on_and_not_asked_again(w):
    node = w.devices("a", 2, free=())
    stopping = w.running("low", (node.id, (0,)), stopping=True)
    other = w.running("other", (node.id, (1,)))
    decided = plan(w.snapshot([node], [w.job("urgent", priority=5)], [stopping, other]))
    assert decided.preempt == ()
    assert decided.why_not["urgent"][0, ""] == f"waits for attempts that are stopping on {node.id}"


def test_two_urgent_jobs_do_not_count_on_the_same_victim(w):
    node = w.devices("a", 2, free=())
    running = [w.running("one", (node.id, (0,))), w.running("two", (node.id, (1,)))]
    urgent = [w.job("u1", priority=5, number=1), w.job("u2", priority=5, number=2)]
    decided = plan(w.snapshot([node], urgent, running))
    assert sorted((p.victim, p.job) for p in decided.preempt) == [("one", "u2"), ("two", "u1")]


def test_what_a_victim_holds_beyond_the_need_serves_the_next_job(w):
    node = w.devices("a", 4, free=())
    urgent = [w.job("u1", priority=5, number=1), w.job("u2", priority=5, number=2)]
    decided = plan(w.snapshot([node], urgent, [w.running("wide", (node.id, (0, 1, 2, 3)))]))
    assert [(p.victim, p.job) for p in decided.preempt] == [("wide", "u1")]
    assert decided.why_not["u2"][0, ""] == f"waits for attempts that are stopping on {node.id}"


@pytest.mark.parametrize("full", [False, True])
def test_no_attempt_stops_for_a_job_where_a_job_ahead_of_it_would_get_its_devices(w, full):
    """The next plan would stop another one for that job, because it still could not start."""
    a, b = w.devices("a", 2, free=()), w.devices("b", 1, free=())
    running = [
        w.running("pinned", (a.id, (0,)), preemptible=False),
        w.running("low", (a.id, (1,))),
        w.running("other", (b.id, (0,)), priority=1),
    ]
    jobs = [w.job("gang", count=2, priority=5), w.job("next", priority=2)]
    decided = plan(w.snapshot([a, b], jobs, running), full=full)
    assert [(p.victim, p.job) for p in decided.preempt] == [("other", "next")]
    assert decided.why_not["gang"][0, ""] == f"waits for 2 devices on {a.id}, held by low, pinned"


def test_what_a_victim_holds_beyond_what_a_job_ahead_misses_serves_the_next_job(w):
    a, b = w.devices("a", 2, free=()), w.devices("b", 1, free=())
    low, pinned = w.running("low", (a.id, (0, 1))), w.running("pinned", (b.id, (0,)), preemptible=False)
    gang, following = w.job("gang", w.want(nodes=2), priority=5), w.job("next", priority=2)
    decided = plan(w.snapshot([a, b], [gang, following], [low, pinned]))
    assert [(p.victim, p.job) for p in decided.preempt] == [("low", "next")]
    stopping = replace(low, stopping=True)
    again = plan(w.snapshot([a, b], [gang, following], [stopping, pinned], memory=decided.memory))
    assert again.preempt == ()
    assert again.why_not["next"][0, ""] == f"waits for attempts that are stopping on {a.id}"


def test_one_wide_victim_is_stopped_for_a_gang_over_its_nodes(w):
    a, b = w.devices("a", 2, free=()), w.devices("b", 2, free=())
    running = [w.running("wide", (a.id, (0, 1)), (b.id, (0, 1))), w.running("small", (a.id, (0,)), priority=1)]
    decided = plan(w.snapshot([a, b], [w.job("gang", w.want(count=2, nodes=2), priority=5)], running))
    assert [p.victim for p in decided.preempt] == ["wide"]


def test_an_attempt_that_may_not_be_preempted_is_left_alone(w):
    node = w.devices("a", 1, free=())
    running = [w.running("pinned", (node.id, (0,)), preemptible=False)]
    assert plan(w.snapshot([node], [w.job("urgent", priority=5)], running)).preempt == ()


def test_a_node_that_takes_no_jobs_is_neither_used_nor_emptied(w):
    lost = w.devices("a", 1, free=(), schedulable=False, reason="node a is lost: silent for 9 s")
    decided = plan(w.snapshot([lost], [w.job("urgent", priority=5)], [w.running("low", (lost.id, (0,)))]))
    assert decided == Plan(why_not={"urgent": {(0, lost.id): "node a is lost: silent for 9 s"}})


def test_the_order_in_which_things_are_told_changes_nothing(w):
    fleet = [w.devices("a", 4, free=(1, 3)), w.devices("b", 4), w.cpu()]
    jobs = [w.job("x", count=4), w.job("y", w.want("any")), w.job("z", count=2, priority=1)]
    running = [w.running("r", ("a/nvidia:H100-80GB", (0,))), w.running("s", ("a/nvidia:H100-80GB", (2,)))]
    plans = [
        plan(w.snapshot(devices, order, held))
        for devices in permutations(fleet)
        for order in permutations(jobs)
        for held in permutations(running)
    ]
    assert all(repr(p) == repr(plans[0]) for p in plans)


def test_an_exclusive_job_takes_a_whole_node_and_no_node_of_which_another_job_holds_a_device(w):
    whole = w.job("whole", w.want("nvidia:H100", exclusive=True))
    busy, idle = w.devices("a", 8, free=(1, 2, 3, 4, 5, 6, 7)), w.devices("b", 4)
    assert plan(w.snapshot([busy, idle], [whole])) == Plan(
        start=(Start("whole", 0, ((idle.id, (0, 1, 2, 3)),), "nvidia:H100-80GB in pool h100, the tightest fit"),)
    )
    assert plan(w.snapshot([busy], [whole])).why_not == {
        "whole": {
            (0, busy.id): "has 7 of 8 devices free, but the job needs all of them (exclusive)",
            (0, ""): f"waits for 1 of 8 devices on {busy.id}; the others are reserved for it",
        }
    }


def test_an_exclusive_job_that_waits_has_its_node_reserved_from_later_ones(w):
    whole = w.job("whole", w.want("nvidia:H100", exclusive=True), number=1)
    later = w.job("later", number=2)
    decided = plan(w.snapshot([w.devices("a", 2, free=(1,))], [whole, later]))
    assert decided.start == ()
    assert decided.why_not["later"][0, "a/nvidia:H100-80GB"] == (
        "has 0 of 2 devices free, but the job needs 1; 1 more reserved for whole, which is ahead in the queue"
    )


def test_an_exclusive_job_of_higher_priority_stops_all_others_of_one_node(w):
    node = w.devices("a", 4, free=(3,))
    held = [w.running("x", (node.id, (0,))), w.running("y", (node.id, (1, 2)))]
    whole = w.job("whole", w.want("nvidia:H100", exclusive=True), priority=1)
    decided = plan(w.snapshot([node], [whole], held))
    assert decided.preempt == tuple(Preempt(v, "whole", f"whole (priority 1) needs 4 of {node.id}") for v in "xy")


def test_an_exclusive_gang_takes_nodes_with_equally_many_devices(w):
    gang = w.job("gang", w.want("nvidia:H100", nodes=2, exclusive=True))
    unequal = [w.devices("a", 8), w.devices("b", 4)]
    assert plan(w.snapshot(unequal, [gang])).why_not["gang"] == {
        (0, ""): "the job needs 2 nodes of one pool and kind, each with as many devices as the others; "
        "pool h100 has 1 (nvidia:H100-80GB)"
    }
    [start] = plan(w.snapshot([*unequal, w.devices("c", 4)], [gang])).start
    assert start.allocation == (("b/nvidia:H100-80GB", (0, 1, 2, 3)), ("c/nvidia:H100-80GB", (0, 1, 2, 3)))
