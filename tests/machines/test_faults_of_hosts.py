"""Faults of hosts that were joined over SSH, under a fleet that runs: a job goes on, at most one attempt of it counts,
and once the fault is healed every node runs a job.

The first fleet's machines have one clock, but for the one whose processes are told another time.
"""

import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from bed import ROOT, Bed
from bed_machine import HOME, Machine
from test_faults import Beating
from test_hosts import Fleet as Hosts
from their_ray import wait

pytestmark = pytest.mark.chaos

CLOCK = ROOT / "tests" / "chaos" / "skewed_clock.c"
SKEW_S = 10
FREE_BYTES = 600 << 20
"""More than `hosts add` asks for, on the small disk that is filled later."""


class Fleet(Hosts):
    """m1 has head, server and node `near-0`; m2 and m3 are hosts of pool `far`, in which jobs run."""

    def add(self, machine: Machine) -> str:
        words = ("hosts", "add", "far", machine.name, "--address", machine.address)
        added = self.user(*words)
        return added.stdout + added.stderr

    def refused(self, machine: Machine, said: str) -> None:
        """Nothing of the host is left in the fleet."""
        words = ("hosts", "add", "far", machine.name, "--address", machine.address)
        told = self.user(*words, check=False)
        assert told.returncode == 2, told.stdout + told.stderr
        assert said in " ".join((told.stdout + told.stderr).split())
        assert machine.name not in {row["host"] for row in self.listed()}
        assert self.raylet(machine) == ""

    def other(self, name: str) -> Machine:
        [found] = [machine for machine in (self.m2, self.m3) if machine.name != name]
        return found

    def probe(self) -> None:
        """A job runs on each host."""
        jobs = {name: self.submitted("hostname", node=f"far-{name}") for name in ("m2", "m3")}
        assert {self.user.ended(job)["state"] for job in jobs.values()} == {"SUCCEEDED"}
        assert {name: self.user("logs", job).stdout.strip() for name, job in jobs.items()} == {n: n for n in jobs}


@pytest.fixture(scope="module")
def fleet(shared_bed: Bed) -> Iterator[Fleet]:
    made = Fleet(shared_bed)
    made.user("up", "--file", made.write(made.host(made.m2), made.host(made.m3), devices=2))
    yield made
    shared_bed.heal()
    made.user("down")
    for machine in shared_bed.machines.values():
        machine.power_off()
        machine.boot()


@contextmanager
def a_job_that_beats(fleet: Fleet, name: str, where: str = "") -> Iterator[Beating]:
    wait(fleet.all_ready)
    asked = {"node": f"far-{where}"} if where else {"pool": "far"}
    job = Beating(fleet, fleet.bed.shared / f"hosts-{name}", partial(fleet.submitted, **asked))
    yield job
    fleet.bed.heal()
    wait(fleet.all_ready)
    job.let_end()
    fleet.probe()


def goes_on(job: Beating) -> None:
    """In the attempt that it was in before."""
    before = job.lines()
    wait(lambda: len(job.lines()) > len(before) + 10)
    assert {epoch for epoch, _, _ in job.lines()} == {epoch for epoch, _, _ in before}


def test_a_host_without_its_sshd_runs_on_and_cannot_be_left_until_it_is_back(fleet: Fleet):
    with a_job_that_beats(fleet, "sshd") as job:
        machine = fleet.bed.machines[job.on]
        machine.stop_sshd()
        goes_on(job)
        told = fleet.user("hosts", "list").stdout
        assert fleet.user.states()[f"far-{machine.name}"] == "ready", told
        fleet.user("up", "--file", str(HOME / "fleet.yaml"), check=False)
        assert fleet.user.states()[f"far-{machine.name}"] == "ready"
        goes_on(job)


def test_a_host_that_refuses_our_key_or_has_no_python_is_not_added_and_is_once_it_can_be(fleet: Fleet):
    with a_job_that_beats(fleet, "refused") as job:
        machine = fleet.other(job.on)
        fleet.user("hosts", "remove", machine.name)
        fleet.write_ssh(key=fleet.bed.stranger.file)
        fleet.refused(machine, "refuses our key")
        fleet.write_ssh()
        machine.hide_python()
        fleet.refused(machine, "has no Python 3.")
        machine.heal()
        goes_on(job)
        fleet.add(machine)


def test_a_host_whose_python_goes_loses_its_node_and_gets_it_again_once_it_is_back(fleet: Fleet):
    with a_job_that_beats(fleet, "python") as job:
        machine = fleet.bed.machines[job.on]
        machine.hide_python()
        machine.run(["kill", "-9", fleet.raylet(machine)])
        wait(lambda: len(job.places()) == 2)


def test_a_host_whose_disk_is_full_runs_no_new_job_until_there_is_space(fleet: Fleet):
    machine = fleet.m3
    fleet.user("hosts", "remove", machine.name)
    folder = HOME / ".polyfleet"
    machine.run(["mkdir", "-p", str(folder)])
    machine.fill_disk(folder, size_bytes=FREE_BYTES, left_bytes=FREE_BYTES)
    fleet.add(machine)
    with a_job_that_beats(fleet, "disk", "m3") as job:
        machine.fill_disk(folder)
        goes_on(job)
        other, here = fleet.waiting("hostname", pool="far"), fleet.waiting("hostname", node="far-m3")
        assert fleet.user.ended(other)["state"] == "SUCCEEDED"
        assert fleet.user("logs", other).stdout.strip() == "m2"
        wait(lambda: "cannot create the attempt's folder" in str(fleet.user.job(here)))
        machine.run(["rm", str(folder / ".filler")])
        wait(fleet.all_ready)
        assert fleet.user.ended(here)["state"] == "SUCCEEDED"
        goes_on(job)
        job.let_end()
        fleet.user("hosts", "remove", "m3")
        machine.heal()
        fleet.add(machine)


@pytest.mark.parametrize("fault", ["delay", "loss", "rate"])
def test_jobs_run_over_a_wire_that_is_late_or_loses_packets_or_is_slow(fleet: Fleet, fault: str):
    faults = {"delay": (fleet.bed.delay, 0.05), "loss": (fleet.bed.loss, 0.05), "rate": (fleet.bed.rate, "8mbit")}
    with a_job_that_beats(fleet, fault) as job:
        make, how = faults[fault]  # late by 100 ms each way between two machines; 1 MB/s
        make(how)
        goes_on(job)
        other = fleet.other(job.on).name
        assert fleet.user.ended(fleet.submitted("hostname", node=f"far-{other}"))["state"] == "SUCCEEDED"
        goes_on(job)


def test_a_host_that_boots_again_later_has_its_old_attempt_fenced(fleet: Fleet):
    with a_job_that_beats(fleet, "boot") as job:
        machine = fleet.bed.machines[job.on]
        machine.power_off()
        wait(lambda: len(job.places()) == 2)
        machine.boot()
        old = machine.disk / ".polyfleet" / "hosts"
        assert list(old.glob(f"*/nodes/*/attempts/{job.id}.1.0")), "its files are those from before"


def test_a_host_whose_clock_is_ten_seconds_off_says_so_and_runs_jobs(fleet: Fleet):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed here, which makes the library that sets a process's clock")
    machine, library, clock = fleet.m3, fleet.bed.shared / "clock.so", fleet.bed.shared / "clock"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(CLOCK), "-ldl"], check=True)
    clock.write_bytes(struct.pack("q", SKEW_S))
    fleet.user("hosts", "remove", machine.name)
    with sessions_of(machine, LD_PRELOAD=library, CHAOS_CLOCK=clock):
        said = fleet.add(machine)
        assert f"its clock is {SKEW_S} s ahead of this machine's" in " ".join(said.split())
        with a_job_that_beats(fleet, "clock", "m3") as job:
            goes_on(job)
            with clock.open("r+b") as file:  # set back by 20 s under what runs
                file.write(struct.pack("q", -SKEW_S))
            goes_on(job)
        fleet.user("hosts", "remove", machine.name)
    fleet.add(machine)


@contextmanager
def sessions_of(machine: Machine, **variables: Path) -> Iterator[None]:
    """What sshd starts there has these variables."""
    settings = machine.inside("/run/sshd.conf")
    before = settings.read_text()
    settings.write_text(f"{before}SetEnv {' '.join(f'{name}={value}' for name, value in variables.items())}\n")
    machine.stop_sshd()
    machine.start_sshd()
    try:
        yield
    finally:
        machine.inside("/run/sshd.conf").write_text(before)
        machine.stop_sshd()
        machine.start_sshd()
