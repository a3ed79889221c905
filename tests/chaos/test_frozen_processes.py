"""Processes are stopped for a while (SIGSTOP), as on a machine that swaps or is suspended, and then go on."""

import time

import fleet_processes
import psutil
import pytest

SHORT, LONG = 3.0, 30.0
MOVES_FROM_S = {"rank": 60.0, "agent": 1e9, "raylet": 1e9, "server": 1e9, "machine": 20.0}
"""From so long on the attempt is given up. An agent that hangs is replaced, and the next one finds what runs."""


def rows():
    for target in ("rank", "agent", "raylet", "server", "machine"):
        for seconds in (SHORT, 9.0, LONG, 120.0):
            in_ci = target == "agent" and seconds in (SHORT, LONG)
            yield pytest.param(target, seconds, marks=() if in_ci else pytest.mark.chaos)


def found(fleet, training, target):
    if target == "server":
        return [fleet.server()]
    if target == "agent":
        return [fleet.agent("right-0")]
    if target == "raylet":
        return [fleet_processes.raylet("right-0")]
    return fleet_processes.ranks(training.id, fleet.home) if target == "rank" else machine(fleet)


def machine(fleet):
    return fleet_processes.machine(fleet.home, "right-0")


def each(processes, act):
    for process in processes:
        try:
            act(process)
        except psutil.NoSuchProcess:
            continue


@pytest.mark.parametrize(("target", "seconds"), rows())
def test_a_process_that_stands_still_and_goes_on(case, fleet, seed, target, seconds):
    with case("F8", f"SIGSTOP of {target} for {seconds:.0f} s", seed) as now:
        training = now.single()
        stopped = found(fleet, training, target)
        now.inject(lambda: each(stopped, psutil.Process.suspend))
        try:
            while time.monotonic() < now.at_s + seconds:
                now.record.setdefault("moved_s", None)
                if now.record["moved_s"] is None and training.epoch > 1:
                    now.took("moved_s", training.steps_since(now.at_s, 0)[0]["at_s"] - now.at_s)
                time.sleep(0.1)
        finally:
            now.thawed_s = time.monotonic()
            each(stopped, psutil.Process.resume)
        if target != "server":
            now.told(training, "told_again_s")
        after(now, fleet, training, target, seconds)


def after(now, fleet, training, target, seconds):
    """Short: the same attempt. Long: another one, and nothing of the first works for longer than two seconds."""
    if seconds >= MOVES_FROM_S[target]:
        now.goes_on(training, newer=False)
        assert training.epoch == 2
        stale = [s["at_s"] - now.thawed_s for s in training.lines("step") if s["epoch"] == 1]
        now.took("stale_s", max(0.0, *stale))
        return
    fleet.reconnected()
    now.at_s = now.thawed_s
    now.told(training)
    assert (training.epoch, now.view(training.id)["interruptions"]) == (1, 0)
