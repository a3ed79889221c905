"""Processes are stopped for a while (SIGSTOP), as on a machine that swaps or is suspended, and then go on."""

import time

import fleet_processes
import psutil
import pytest
from faults import STALE_S, until

pytestmark = pytest.mark.full

NAMES = {
    "rank": "a rank",
    "agent": "an agent",
    "raylet": "a raylet",
    "server": "the server",
    "machine": "all processes of a node",
}
BRIEF = [
    *(("agent", 3.0), ("agent", 9.0), ("agent", 30.0), ("agent", 120.0)),
    *(("rank", 3.0), ("rank", 9.0), ("rank", 30.0)),
    *(("server", 3.0), ("server", 9.0), ("server", 30.0), ("server", 120.0)),
    *(("raylet", 3.0), ("machine", 3.0)),
]
"""After these the attempt is still what it was. An agent that hangs is replaced, and the next one finds what runs."""
STANDS_STILL = {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE}
RETRIED = {"on_events": {"hang": "retry"}}


def found(fleet, training, target):
    if target == "server":
        return [fleet.server()]
    if target == "agent":
        return [fleet.agent("right-0")]
    if target == "raylet":
        return [fleet_processes.raylet("right-0")]
    if target == "rank":
        return fleet_processes.ranks(training.id, fleet.home)
    return fleet_processes.machine(fleet.home, "right-0")


def each(processes, act):
    for process in processes:
        try:
            act(process)
        except psutil.NoSuchProcess:
            continue


def told_of(target, seconds):
    return f"SIGSTOP of {NAMES[target]} for {seconds:.0f} s"


def stop(now, processes, seconds, unconcerned=None):
    """Between, none of them has run, and the training `unconcerned` has worked."""
    now.inject(lambda: each(processes, psutil.Process.suspend))
    try:
        until(lambda: all(p.status() in STANDS_STILL for p in processes if p.is_running()))
        time.sleep(seconds)
        if unconcerned:
            until(lambda: unconcerned.steps_since(now.at_s + seconds / 2))
    finally:
        now.thawed_s = time.monotonic()
        each(processes, psutil.Process.resume)
    now.fleet.reconnected()


@pytest.mark.chaos
def test_what_stands_still_for_a_while_goes_on_as_it_was(case, fleet, seed):
    with case("F8", told_of(*BRIEF[0]), seed) as now:
        training = now.single(recovery=RETRIED)
        for number, (target, seconds) in enumerate(BRIEF):
            if number:
                now.fault("F8", told_of(target, seconds))
            stop(now, found(fleet, training, target), seconds, None if target in ("rank", "machine") else training)
            now.over(ago_s=time.monotonic() - now.thawed_s)
            now.told(training)
            assert (training.epoch, now.view(training.id)["interruptions"]) == (1, 0)


@pytest.mark.chaos
@pytest.mark.parametrize("target", ["raylet", "machine"])
def test_a_node_that_stands_still_for_about_its_lease_ends_up_with_one_attempt(case, fleet, seed, target):
    with case("F8", told_of(target, 9.0), seed) as now:
        training = now.single()
        stop(now, found(fleet, training, target), 9.0)
        now.over(ago_s=time.monotonic() - now.thawed_s)
        now.told(training)
        assert training.epoch <= 2


@pytest.mark.chaos
@pytest.mark.parametrize(("target", "seconds"), [("raylet", 30.0), ("machine", 30.0), ("machine", 120.0)])
def test_what_stands_still_for_long_is_replaced_and_works_no_more_when_it_goes_on(case, fleet, seed, target, seconds):
    with case("F8", told_of(target, seconds), seed) as now:
        training = now.single()
        stop(now, found(fleet, training, target), seconds)
        replaced(now, training)


@pytest.mark.chaos
def test_a_rank_and_a_raylet_that_stand_still_for_two_minutes_are_replaced(case, fleet, seed):
    """A rank that stands still hangs: that is known after a minute. They are of two jobs, on two nodes."""
    with case("F8", told_of("raylet", 120.0), seed) as now:
        moved = now.train(resources={"ordered": [{"pool": "right"}, {"node": "left-0"}]})
        hung = now.train(resources={"node": "left-1"}, recovery=RETRIED)
        now.works()
        ranks = found(fleet, hung, "rank")
        stop(now, [*ranks, *found(fleet, moved, "raylet")], 120.0)
        replaced(now, moved)
        now.fault("F8", told_of("rank", 120.0))
        replaced(now, hung)


def replaced(now, training):
    """It went on in a newer attempt; how long nothing of it worked, and how long the older one did after SIGCONT."""
    now.goes_on(training)
    time.sleep(STALE_S)
    older = [s["at_s"] for s in training.lines("step") if s["epoch"] == 1]
    newer = until(lambda: [s["at_s"] for s in training.lines("step") if s["epoch"] > 1])
    now.took("stale_s", max(0.0, max(older) - now.thawed_s))
    now.took("gap_s", newer[0] - max(s for s in older if s < newer[0]))
