"""Where a job could run, told as rows: the best first, by the planner itself."""

from dataclasses import replace

import pytest

from orchestrator.core.controller.scaling import NodeGroup
from orchestrator.core.explanation.explain import explain
from orchestrator.core.explanation.offer import Growth, Offer, Offers, offers
from orchestrator.core.fleet.demand import example_nodes
from orchestrator.core.model import Progress
from orchestrator.core.plan.options.placement_options import NO_DEVICES
from orchestrator.core.rate_source import WorkloadRate
from orchestrator.core.throughput import Measured, Throughput

GROWS = NodeGroup("h100", "h100", "nvidia", "nvidia:H100-80GB", 8, {"GPU": 8}, max_nodes=2, memory_bytes=80 * 2**30)


def rows(found):
    return [(o.candidate, o.pool, o.count, o.nodes, str(o.when), o.chosen) for o in found.offers]


def waits(found):
    return {o.pool: (o.wait, o.reason) for o in found.offers}


def test_a_row_has_all_that_is_known_of_a_place(w):
    measured = Measured(100.0, 98.0, 102.0, "sample", "bench-1", 40.0)
    fleet = [w.devices("a", 8, free=(1, 2, 3), price_per_hour=3.6)]
    seen = w.snapshot(fleet, [], throughput=Throughput({("gpt2", "train", "nvidia:H100-80GB", "bf16"): measured}))
    job = w.job("j", w.want(count=2, precision="bf16"), workload="gpt2")
    assert offers(job, seen) == Offers(
        (
            Offer(
                candidate=0, pool="h100", kind="nvidia:H100-80GB", count=2, min_count=2, nodes=1, when="now",
                wait="now", chosen=True, allocation=(("a/nvidia:H100-80GB", (1, 2)),), after=(), ahead=0,
                earliest_start_s=0.0,
                speed="measured 100 samples/s [98, 102] 60 s ago in bench-1", items_per_s=200.0,
                rate=WorkloadRate("benchmark", 100.0, "sample", 1, 98.0, 102.0, run="bench-1", at_s=40.0),
                price_per_hour=7.2, price_per_million_items=10.0, reason="",
            ),
        ),
        "",
    )  # fmt: skip


def test_the_best_comes_first_and_is_what_the_next_plan_starts(w):
    fleet = [w.cpu(), w.devices("a", 2), w.devices("b", 4, kind="amd:MI300X", pool="amd"), w.xla()]
    job = w.job("j", w.want("any", precision="bf16"), objective="throughput", workload="gpt2")
    seen = w.snapshot(fleet, [])
    found = offers(job, seen)
    assert rows(found) == [
        (0, "h100", 1, 1, "now", True),
        (0, "amd", 1, 1, "now", False),
        (0, "cpu", 1, 1, "now", False),
        (0, "xla", 1, 1, "never", False),
    ]
    assert found.offers[0].allocation == explain(job, seen).would_start.allocation
    assert (found.offers[0].speed, found.offers[0].items_per_s, found.offers[0].price_per_hour) == (
        "unmeasured",
        None,
        None,
    )
    assert "is emulated on the CPU" in found.offers[-1].reason
    faster = Measured(9.0, 8.0, 10.0, "token", "bench-1", 0.0)
    seen = replace(seen, throughput=Throughput({("gpt2", "train", "amd:MI300X", "bf16"): faster}))
    assert [row[1] for row in rows(offers(job, seen))] == ["amd", "h100", "cpu", "xla"]


def test_ordered_candidates_come_in_their_order_and_take_what_a_range_can_have(w):
    fleet = [w.cpu(), w.devices("a", 8, free=range(5))]
    found = offers(w.job("j", w.want("cpu"), w.want(count=8, min_count=2), ordered=True), w.snapshot(fleet, []))
    assert rows(found)[:2] == [(0, "cpu", 1, 1, "now", True), (1, "h100", 5, 1, "now", False)]


def test_devices_that_are_busy_are_waited_for_and_a_lower_priority_stops(w):
    fleet = [w.devices("a", 4, free=(0,)), w.v5e("b", 2, free=())]
    running = [
        w.running("low", ("a/nvidia:H100-80GB", (1, 2, 3))),
        w.running("same", ("b/tpu:v5e", (0, 1)), priority=1),
    ]
    job = w.job("j", w.want("tpu"), w.want(count=2), priority=1)
    found = offers(job, w.snapshot(fleet, [], running))
    assert [row[1:] for row in rows(found)[:2]] == [
        ("h100", 2, 1, "preempts", True),
        ("v5e", 1, 1, "waits", False),
    ]
    assert found.offers[0].after == ("low",)
    assert (found.offers[1].wait, found.offers[1].reason) == (
        "after running jobs end",
        "waits for 1 device on b/tpu:v5e, held by same",
    )
    assert found.offers[0].wait == "after low stops (lower priority)"


def trained(w, name, *leases, left_s=None, **more):
    """Running attempt of a job, and its progress: at one step per second, or nothing is known of it."""
    known = Progress(0, int(left_s), rates={("nvidia:H100-80GB", 1): 1.0}) if left_s else Progress()
    return w.running(name, *leases, spec=w.job(name), **more), {name: known}


def wait(w, job, *attempts, fleet=None):
    running, progress = [attempt for attempt, _ in attempts], {}
    for _, known in attempts:
        progress |= known
    fleet = fleet or [w.devices("a", 2, free=())]
    [found, *_] = offers(job, w.snapshot(fleet, [], running, progress=progress)).offers
    return found.earliest_start_s, found.wait


def test_a_wait_for_running_jobs_has_the_time_after_which_enough_of_them_have_ended(w):
    both = [
        trained(w, "r", ("a/nvidia:H100-80GB", (0,)), left_s=2400),
        trained(w, "s", ("a/nvidia:H100-80GB", (1,)), left_s=600),
    ]
    assert wait(w, w.job("j"), *both) == (600.0, "after running jobs end, in about 10 min at the earliest")
    assert wait(w, w.job("j", count=2), *both) == (2400.0, "after running jobs end, in about 40 min at the earliest")


def test_a_wait_for_jobs_of_which_nothing_is_known_has_no_time(w):
    known = trained(w, "r", ("a/nvidia:H100-80GB", (0,)), left_s=2400)
    guessed = trained(w, "s", ("a/nvidia:H100-80GB", (1,)))
    assert wait(w, w.job("j", count=2), known, guessed) == (None, "after running jobs end")
    assert wait(w, w.job("j"), known, guessed)[0] == 2400.0, "one of them is enough"


def test_a_gang_waits_for_the_last_of_the_nodes_that_it_needs(w):
    fleet = [w.devices(name, 1, free=()) for name in "abc"]
    held = [trained(w, f"r{n}", (have.id, (0,)), left_s=600 * (n + 1)) for n, have in enumerate(fleet)]
    gang = w.job("j", w.want(nodes=2))
    assert wait(w, gang, *held, fleet=fleet)[0] == 1200.0
    closed = [replace(fleet[0], schedulable=False, reason="drained"), *fleet[1:]]
    assert wait(w, gang, *held, fleet=closed)[0] == 1800.0


def test_an_attempt_that_is_stopping_frees_its_devices_at_once(w):
    stopping = trained(w, "r", ("a/nvidia:H100-80GB", (0, 1)), stopping=True)
    assert wait(w, w.job("j"), stopping) == (0.0, "after running jobs end")


def test_jobs_ahead_that_take_the_same_devices_are_counted(w):
    fleet = [w.devices("a", 2), w.cpu()]
    ahead = [w.job(f"h{n}", count=2, number=n) for n in range(1, 4)]
    other = [w.job("c", w.want("cpu"), number=4), w.job("low", count=1, priority=-1, number=5)]
    found = offers(w.job("j"), w.snapshot(fleet, [*ahead, *other]))
    assert waits(found)["h100"][0] == "behind 3 jobs"
    assert found.offers[0].ahead == 3
    assert offers(w.job("j", priority=1), w.snapshot(fleet, [*ahead, *other])).offers[0].wait == "now"


def test_a_node_that_may_be_started_is_an_offer_until_the_pool_has_all_of_its_nodes(w):
    job, may_grow = w.job("j", count=8), Growth((GROWS,))
    seen = w.snapshot([], [], startable=tuple(example_nodes(GROWS, GROWS.max_nodes)))
    assert rows(offers(job, seen, may_grow)) == [(0, "h100", 8, 1, "new_node", False)]
    assert waits(offers(job, seen, may_grow))["h100"][0] == "a node is started for it"
    ahead = [w.job(f"h{n}", count=8, number=n) for n in (1, 2)]
    full = replace(seen, jobs=tuple(ahead))
    assert [o.when for o in offers(job, full, may_grow).offers] == ["closed"]
    gone = offers(job, seen, Growth((GROWS,), {"h100": seen.now_s + 60}))
    assert "nodes of h100 could not be started recently" in gone.offers[0].reason
    busy = [w.devices(f"a{n}", 8, free=()) for n in range(2)]
    assert waits(offers(job, replace(seen, devices=tuple(busy)), may_grow))["h100"][0] == "after running jobs end"


@pytest.mark.parametrize(
    "want, reason",
    [
        ({"kinds": ("tpu:v5e",)}, "is of kind nvidia:H100-80GB, but the job accepts tpu:v5e"),
        ({"memory_bytes": 100 * 2**30}, "has 80 GiB per device, but the job needs 100 GiB"),
        ({"count": 8}, "has 4 devices in all, but the job needs 8"),
        ({"count": 4, "nodes": 2}, "the job needs 2 nodes of one pool and kind, each with 4 devices; pool h100 has 1"),
        ({"max_price": 1.0}, "costs 2 per device and hour, but the job pays at most 1"),
    ],
)
def test_what_can_never_be_had_there_says_the_first_rule_that_refused_it(w, want, reason):
    kinds = want.pop("kinds", ("nvidia",))
    found = offers(w.job("j", w.want(*kinds, **want)), w.snapshot([w.devices("a", 4, price_per_hour=2.0)], []))
    [one] = found.offers
    assert one.when == ("not_asked_for" if "accepts" in reason else "never")
    assert (one.wait, one.chosen) == ("never here", False)
    assert one.reason.startswith(reason)
    assert found.impossible


def test_a_node_that_takes_no_jobs_now_says_why(w):
    fleet = [w.devices("a", 4, schedulable=False, reason="node a is drained")]
    assert waits(offers(w.job("j"), w.snapshot(fleet, []))) == {
        "h100": ("once a node there takes jobs", "node a is drained")
    }


def test_slices_of_a_device_are_a_place_of_their_own(w):
    """Their kind begins with that of the whole device, whose name takes both."""
    whole = w.devices("a", 2, free=())
    slices = w.devices("a", 7, kind="nvidia:H100-80GB-MIG-1g.10gb", memory_gib=10)
    found = offers(w.job("j", w.want("nvidia:H100")), w.snapshot([whole, slices], []))
    assert [(o.kind, str(o.when), o.chosen) for o in found.offers] == [
        ("nvidia:H100-80GB-MIG-1g.10gb", "now", True),
        ("nvidia:H100-80GB", "waits", False),
    ]


def test_a_fleet_without_nodes_offers_nothing_and_says_so(w):
    assert offers(w.job("j"), w.snapshot([], [])) == Offers((), NO_DEVICES)


def test_to_be_asked_changes_nothing_for_others(w):
    """A job of the same id that waits is the one asked about, not another one ahead of it."""
    job = w.job("j", count=2, number=3)
    assert offers(job, w.snapshot([w.devices("a", 2)], [job])).offers[0].wait == "now"
