"""Processes are stopped for a while (SIGSTOP), as on a machine that swaps or is suspended, and then go on."""

import time

import fleet_processes
import psutil
import pytest
from faults import STALE_S

TARGETS = ("rank", "agent", "raylet", "server", "machine")
IN_CI = {("agent", 3.0), ("agent", 9.0)}
NEVER_S = float("inf")
STAYS_TO_S = {"rank": 45.0, "agent": NEVER_S, "raylet": 5.0, "server": NEVER_S, "machine": 5.0}
"""So long the attempt stays what it is. An agent that hangs is replaced, and the next one finds what runs."""
MOVES_FROM_S = {"rank": 90.0, "agent": NEVER_S, "raylet": 20.0, "server": NEVER_S, "machine": 20.0}
"""From so long on it is given up. A rank that stands still hangs: that is known after a minute."""


def rows():
    for target in TARGETS:
        for seconds in (3.0, 9.0, 30.0, *([120.0] if target in ("rank", "server", "machine") else [])):
            in_ci = (target, seconds) in IN_CI
            name = f"{target}-{seconds:.0f}s"
            yield pytest.param(target, seconds, marks=() if in_ci else pytest.mark.chaos, id=name)


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


@pytest.mark.parametrize(("target", "seconds"), list(rows()))
def test_a_process_that_stands_still_and_goes_on(case, fleet, seed, target, seconds):
    with case("F8", f"SIGSTOP of {NAMES[target]} for {seconds:.0f} s", seed) as now:
        training = now.single(recovery={"on_events": {"hang": "retry"}})
        stopped = found(fleet, training, target)
        now.inject(lambda: each(stopped, psutil.Process.suspend))
        try:
            time.sleep(seconds)
        finally:
            now.thawed_s = time.monotonic()
            each(stopped, psutil.Process.resume)
        fleet.reconnected()
        if seconds >= MOVES_FROM_S[target]:
            now.goes_on(training)
            time.sleep(STALE_S)
            first = [s["at_s"] - now.thawed_s for s in training.lines("step") if s["epoch"] == 1]
            now.took("stale_s", max(0.0, *first))
            return
        frozen_s, now.at_s = now.at_s, now.thawed_s
        now.told(training)
        gone_s = now.thawed_s if target in ("rank", "machine") else frozen_s
        assert training.steps_since(gone_s)
        if seconds <= STAYS_TO_S[target]:
            assert (training.epoch, now.view(training.id)["interruptions"]) == (1, 0)


NAMES = {
    "rank": "a rank",
    "agent": "an agent",
    "raylet": "a raylet",
    "server": "the server",
    "machine": "all processes of a node",
}
