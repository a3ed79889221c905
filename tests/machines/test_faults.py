"""Faults of machines and of the wire between them, under a fleet of three: one attempt counts, and nothing is lost.

The machines' clocks are one clock, and one folder is seen by all: so what attempts did, and when, can be compared.
"""

import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bed import Bed
from bed_machine import Machine
from their_ray import TheirRay, User, wait

pytestmark = pytest.mark.chaos

LABEL = "--labels=polyfleet.io/node={}"
BEATS = 'while [ ! -e "{end}" ]; do echo "$POLYFLEET_EPOCH $(hostname) $(date +%s.%N)" >>"{beats}"; sleep 0.2; done'
CUT_S = 15.0
PROBE = "{{task: run, command: hostname, resources: {{node: {node}}}}}"


class Fleet:
    """m1 has Ray's head and the server; m2 and m3 compute, one job at a time each."""

    def __init__(self, bed: Bed):
        self.bed = bed
        m1, *self.workers = bed.machines.values()
        self.ray, self.user = TheirRay(bed, m1, "--num-cpus=0"), User(m1)
        self._nodes = {machine.name: self.start(machine) for machine in self.workers}
        self.user("up", "--address", self.ray.address)

    def start(self, machine: Machine) -> "subprocess.Popen[str]":
        return self.ray.node(machine, "--num-cpus=1", LABEL.format(machine.name))

    def keep(self) -> None:
        """As whoever runs the nodes does with those that have ended."""
        for machine in self.workers:
            if self._nodes[machine.name].poll() is not None:
                self._nodes[machine.name] = self.start(machine)

    def await_ready(self) -> None:
        def ready() -> bool:
            self.keep()
            states = self.user.states()
            for name, state in states.items():
                if state == "quarantined":  # by the third fault that a test has made on it
                    self.user("node", "resume", name)
            return states == {machine.name: "ready" for machine in self.workers}

        wait(ready)

    def probe(self) -> None:
        """A job runs on each node."""
        jobs = {machine.name: self.probe_one(machine.name) for machine in self.workers}
        assert {name: self.result(job) for name, job in jobs.items()} == {name: name for name in jobs}

    def probe_one(self, node: str) -> str:
        job = self.bed.shared / f"probe-{node}.yaml"
        job.write_text(PROBE.format(node=node))
        return str(self.user.told("submit", str(job))["id"])

    def result(self, job: str) -> str:
        view = self.user.ended(job)
        assert view["state"] == "SUCCEEDED", view
        return self.user("logs", job).stdout.strip()


class Beating:
    """A job that writes down where it is, five times a second, until it is let end."""

    def __init__(self, fleet: Any, folder: Path, submit: Callable[[str], str] | None = None):
        self._fleet, self._end, self._beats = fleet, folder / "end", folder / "beats"
        folder.mkdir()
        self.id = (submit or fleet.user.submit)(BEATS.format(end=self._end, beats=self._beats))
        self.on = wait(self.places)[-1]

    def lines(self) -> list[tuple[int, str, float]]:
        """Epoch, machine, when."""
        found = [line.split() for line in self._beats.read_text().splitlines()] if self._beats.exists() else []
        return [(int(words[0]), words[1], float(words[2])) for words in found if len(words) == 3]

    def places(self) -> list[str]:
        """The machines where it has been, in order."""
        return list(dict.fromkeys(machine for _, machine, _ in self.lines()))

    def let_end(self) -> None:
        """It succeeds, and no two of its attempts ran at one time."""
        self._end.touch()
        assert self._fleet.user.ended(self.id)["state"] == "SUCCEEDED"
        times = defaultdict(list)
        for epoch, _, at_s in self.lines():
            times[epoch].append(at_s)
        spans = [(min(times[epoch]), max(times[epoch])) for epoch in sorted(times)]
        assert all(ended < begun for (_, ended), (begun, _) in pairwise(spans)), spans


@pytest.fixture(scope="module")
def fleet(shared_bed: Bed) -> Iterator[Fleet]:
    made = Fleet(shared_bed)
    yield made
    made.user("down")
    made.ray.close()


@contextmanager
def a_job_that_beats(fleet: Fleet, name: str) -> Iterator[Beating]:
    """Before a fault; afterwards the wire is healed, the job ends well, and every node runs a job."""
    fleet.await_ready()
    job = Beating(fleet, fleet.bed.shared / name)
    yield job
    fleet.bed.heal()
    job.let_end()
    fleet.await_ready()
    fleet.probe()


def test_a_job_on_a_machine_that_is_cut_off_goes_on_elsewhere_and_nowhere_twice(fleet: Fleet):
    with a_job_that_beats(fleet, "cut") as job:
        fleet.bed.cut(job.on)
        begun_s = time.monotonic()
        wait(lambda: len(job.places()) == 2)
        wait(lambda: time.monotonic() - begun_s > CUT_S)


def test_a_job_on_a_machine_that_loses_its_power_goes_on_elsewhere_and_the_machine_comes_back(fleet: Fleet):
    with a_job_that_beats(fleet, "power") as job:
        machine = fleet.bed.machines[job.on]
        machine.power_off()
        wait(lambda: len(job.places()) == 2)
        machine.boot()


def test_a_machine_that_reboots_at_once_runs_its_job_again_or_another_does(fleet: Fleet):
    with a_job_that_beats(fleet, "reboot") as job:
        machine = fleet.bed.machines[job.on]
        before = len(job.lines())
        machine.power_off()
        machine.boot()
        fleet.keep()
        wait(lambda: any(epoch > 1 for epoch, _, _ in job.lines()[before:]))


def test_a_job_on_a_machine_that_hears_and_is_not_heard_goes_on_elsewhere(fleet: Fleet):
    with a_job_that_beats(fleet, "unheard") as job:
        fleet.bed.cut(job.on, one_way=True)
        wait(lambda: len(job.places()) == 2)


def test_a_fleet_whose_wire_is_slow_long_and_loses_packets_runs_jobs(fleet: Fleet):
    with a_job_that_beats(fleet, "wire") as job:
        fleet.bed.delay(0.025)
        fleet.bed.loss(0.05)
        fleet.bed.rate("8mbit")
        before = len(job.lines())
        fleet.await_ready()
        [other] = [machine.name for machine in fleet.workers if machine.name != job.on]
        assert fleet.result(fleet.probe_one(other)) == other
        wait(lambda: len(job.lines()) > before)
