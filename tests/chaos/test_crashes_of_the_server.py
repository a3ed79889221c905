"""The server ends, as by kill -9, at each named point of its life; the next one brings all jobs to the same end."""

import os
import threading
import time
from contextlib import suppress

import pytest
from faults import some_or_all, until

from cluster.errors import FleetError, PolyfleetError
from orchestrator import Orchestrator
from orchestrator.client import client
from orchestrator.home import daemon
from orchestrator.runtime import crash_points

pytestmark = pytest.mark.full

IN_CI = ["event:placed:before", "command:Launch:after", "event:released:after"]
ELSEWHERE = {
    "refused": "the last possible pool of a job has to leave the fleet",
    "overtaken": "an older backup has to be restored: test_job_stores.py",
    "RestartAgent": "an agent has to hang: test_frozen_processes.py",
    "UnwatchAgent": "a node has to leave: test_killed_processes.py",
    "RestartNode": "Ray has to lose count of a node: test_lost_messages.py",
    "EndIdleAgent": "an autoscaler has to be there: test_autoscaler.py",
    "RequestNodes": "an autoscaler has to be there: test_autoscaler.py",
    "replicated": "another machine has to be there: tests/machines/test_hosts.py",
    "unreplicated": "another machine has to be there: tests/machines/test_hosts.py",
    "Replicate": "another machine has to be there: tests/machines/test_hosts.py",
    "Reject": "answers a wrong request, and nothing is stored",
    "LogWarning": "writes a line of the log",
}
"""What a life of jobs does not come to, and why."""
POINTS = [name for name in crash_points.names() if name.split(":")[1] not in ELSEWHERE]
POINT = "POLYFLEET_CRASH_AT"
QUICK = {"max_restarts": 1, "backoff": "0.1s"}


class Chain(threading.Thread):
    """Starts a server whenever there is none, as an init system does: one that ends at the next point. `deaths` has
    how long it took until the next one answered, by point; None where that one came to its own point first.
    """

    def __init__(self, fleet, left):
        super().__init__(daemon=True)
        self._fleet, self._left = fleet, list(left)
        self._over, self.deaths, self.wrong = threading.Event(), {}, ""
        self._log_at = len(fleet.log())

    @property
    def point(self):
        """Where the server will end; "" once there is no point left."""
        return self._left[0] if self._left else ""

    def run(self):
        home, ended_s = self._fleet.home, None
        while not self._over.wait(0.02) and not self.wrong:
            if daemon.find_server(home) is not None:
                continue
            if ended_s is not None:
                self._died()
            ended_s = time.monotonic()
            os.environ[POINT] = self.point
            with suppress(FleetError):  # it may come to the point before it answers
                daemon.start_server(home)
                self.deaths |= {list(self.deaths)[-1]: time.monotonic() - ended_s} if self.deaths else {}

    def _died(self):
        log = self._fleet.log()
        if crash_points.crash_line(self.point) in log[self._log_at :]:
            self.deaths[self._left.pop(0)] = None
        else:
            self.wrong = f"the server ended, and not at {self.point}: {log[self._log_at :][-500:]}"
        self._log_at = len(log)

    def __enter__(self):
        daemon.stop_server(self._fleet.home)
        self.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self.join()
        os.environ.pop(POINT, None)


@pytest.mark.parametrize("names", some_or_all(IN_CI, POINTS))
def test_crashes_at_named_points_change_no_ending(case, fleet, seed, names):
    what = "the server ends at a named point of its life"
    with case("F4", what, seed, point=names[0]) as now:
        now.random.shuffle(names := list(names))
        training = now.train(resources={"ordered": [{"pool": "right"}, {"pool": "left"}]})
        now.works()
        with Chain(fleet, names) as chain:
            asked = until(Asked)
            while (point := chain.point) and not chain.wrong:
                act = ACTS.get(point.split(":")[1], a_job_that_ends_well)
                act(now, asked, training)
                if act not in OFTEN:
                    until(lambda point=point: chain.point != point or chain.wrong)
            assert not chain.wrong
            until(lambda: daemon.find_server(fleet.home))
        assert list(chain.deaths) == names
        for name, back_s in chain.deaths.items():
            now.fault("F4", what, point=name, **({"back_s": round(back_s, 2)} if back_s else {}))
        now.records.pop(0)


class Asked:
    """Whoever asks asks again until answered; never starts a server, which is the chain's part."""

    def __init__(self):
        Orchestrator.connect(start=False).close()

    def __call__(self, act):
        def once():
            try:
                with client.connect(start=False) as there:
                    return act(there)
            except PolyfleetError:
                return None

        return until(once)


def submitted(now, asked, command, ends="SUCCEEDED", **fields):
    number = len(now.expected)
    spec = {"task": "run", "command": command, "resources": {"pool": "left"}, **fields}
    job = asked(lambda there: there.jobs.submit(spec, key=f"{now.folder}-{number}"))["id"]
    now.expected[job] = ends
    return job


def state(asked, job):
    return asked(lambda there: there.jobs.show(job))["state"]


def a_job_that_ends_well(now, asked, _):
    job = submitted(now, asked, "true")
    until(lambda: state(asked, job) == "SUCCEEDED")


def a_job_that_fails(now, asked, _):
    job = submitted(now, asked, "exit 3", "FAILED")
    until(lambda: state(asked, job) == "FAILED")


def a_job_that_fails_once(now, asked, _):
    mark = now.folder / f"failed-{len(now.expected)}"
    job = submitted(now, asked, f"test -e {mark} || {{ touch {mark}; exit 1; }}", recovery=QUICK)
    until(lambda: state(asked, job) == "SUCCEEDED")


def a_job_that_is_cancelled(now, asked, _):
    job = submitted(now, asked, "sleep 300", "CANCELLED")
    until(lambda: state(asked, job) == "RUNNING")
    until(lambda: state(asked, job) == "CANCELLED" or asked(lambda there: there.jobs.cancel(job)))


def a_job_that_is_renamed(now, asked, _):
    job, name = submitted(now, asked, "sleep 300", "CANCELLED"), f"renamed-{len(now.expected)}"
    asked(lambda there: there.jobs.rename(job, name))
    until(lambda: asked(lambda there: there.jobs.show(job))["name"] == name)
    until(lambda: state(asked, job) == "CANCELLED" or asked(lambda there: there.jobs.cancel(job)))


def a_training_that_moves(now, asked, training):
    before = asked(lambda there: there.jobs.show(training.id))
    to = "left" if before["attempts"][-1]["pool"] == "right" else "right"

    def moved(there):
        view = there.jobs.show(training.id)
        if view["attempt"] > before["attempt"] and view["state"] == "RUNNING":
            return True
        there.jobs.migrate(training.id, to)
        return False

    asked(moved)
    until(lambda: [s for s in training.lines("saved") if s["epoch"] > before["attempt"]])


def a_node_that_is_drained(now, asked, _):
    asked(lambda there: there.nodes.drain("left-1", reason=f"chaos {time.monotonic()}"))
    asked(lambda there: there.nodes.resume("left-1"))


def nothing(now, asked, _):
    """A training goes on, and a server that starts greets its nodes."""
    time.sleep(0.1)


ACTS = {
    "failed": a_job_that_fails,
    "interrupted": a_job_that_fails_once,
    "cancelled": a_job_that_is_cancelled,
    "released": a_job_that_is_cancelled,
    "renamed": a_job_that_is_renamed,
    "Stop": a_job_that_is_cancelled,
    "preempted": a_training_that_moves,
    "migrated": a_training_that_moves,
    "resumed": a_training_that_moves,
    "drained": a_node_that_is_drained,
    "undrained": a_node_that_is_drained,
    "checkpoint": nothing,
    "StoreReport": nothing,
    "Fence": nothing,
    "StartAgent": nothing,
}
OFTEN = (nothing, a_node_that_is_drained)
