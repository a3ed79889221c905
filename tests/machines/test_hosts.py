"""A fleet file with hosts: brought up, changed, broken and taken down by a user on m1, over real SSH, Ray with TLS."""

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bed import ROOT, Bed
from bed_machine import HOME, Machine
from bed_ssh import client_config, known_hosts
from their_ray import User, bare_python, wait

pytestmark = pytest.mark.full
ORDERED = True  # the last tests end the fleet

SSH = HOME / ".ssh"


class Fleet:
    """The user's files on m1: `~/fleet.yaml`, `~/.ssh`."""

    def __init__(self, bed: Bed):
        self.bed, self.user = bed, User(bed.machines["m1"])
        self.m1, self.m2, self.m3 = bed.machines.values()
        self.ssh = self.m1.disk / ".ssh"
        self.ssh.mkdir(mode=0o700, exist_ok=True)
        self.write_ssh()

    def write_ssh(self, *, known: bool = True, key: Path | None = None) -> None:
        keys = {name: machine.key for name, machine in self.bed.machines.items()} if known else {}
        (self.ssh / "known_hosts").write_text(known_hosts(keys, self.bed.addresses))
        (self.ssh / "config").write_text(client_config(self.bed.addresses, SSH / "key", SSH / "known_hosts"))
        shutil.copy(key or self.bed.identity.file, self.ssh / "key")
        (self.ssh / "key").chmod(0o600)

    def write(self, *hosts: Any, name: str = "fleet.yaml", python: str = sys.executable, **pool: Any) -> str:
        environment = {"interpreter": python}
        far = {"backend": "cpu", "environment": environment, "hosts": list(hosts), **pool}
        near = {"backend": "cpu", "environment": {"interpreter": sys.executable}}
        fleet = {"name": "lab", "head": {"address": self.m1.address}, "pools": {"near": near, "far": far}}
        (self.m1.disk / name).write_text(json.dumps(fleet))  # JSON is YAML
        return str(HOME / name)

    def host(self, machine: Machine, **more: Any) -> dict[str, Any]:
        return {"host": machine.name, "address": machine.address} | more

    def raylet(self, machine: Machine) -> str:
        return machine.run(["pgrep", "-x", "raylet"], check=False).stdout.strip()

    def listed(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.user("hosts", "list", "-o", "json").stdout)
        return rows

    def waiting(self, command: str, launch: str = "node", **resources: Any) -> str:
        """The id of a job."""
        asked = {"task": "run", "command": ["sh", "-c", command], "launch": launch, "resources": resources}
        (self.m1.disk / "job.yaml").write_text(json.dumps(asked))
        return str(self.user.told("submit", str(HOME / "job.yaml"))["id"])

    def submitted(self, command: str, launch: str = "node", **resources: Any) -> str:
        """The id of a job that has begun to run."""
        job = self.waiting(command, launch, **resources)
        wait(lambda: self.user.job(job)["state"] not in ("PENDING", "STARTING"))
        return job

    def all_ready(self) -> bool:
        """A node that these tests have broken three times is quarantined; its user takes it back."""
        states = self.user.states()
        for node in (node for node, state in states.items() if state == "quarantined"):
            self.user("node", "resume", node)
        return set(states.values()) == {"ready"}


@pytest.fixture(scope="module")
def lab(shared_bed: Bed) -> Iterator[Fleet]:
    fleet = Fleet(shared_bed)
    fleet.user.env["POLYFLEET_COPY_RATE"] = "100MB"
    file = fleet.write(fleet.host(fleet.m2), fleet.host(fleet.m3))
    fleet.user("up", "--file", file)
    yield fleet
    for machine in shared_bed.machines.values():
        machine.power_off()
        machine.boot()


@pytest.fixture
def whole(lab: Fleet, bed: Bed) -> Iterator[Fleet]:
    """All nodes are ready before; whatever a test broke is healed by `bed` after it."""
    wait(lab.all_ready)
    yield lab


def test_every_host_has_a_node_that_runs_jobs_and_a_gang_spans_them(whole: Fleet):
    assert whole.user.states() == {"near-0": "ready", "far-m2": "ready", "far-m3": "ready"}
    assert {row["host"]: set(row["nodes"].values()) for row in whole.listed()} == {
        "m2": {"ready"},
        "m3": {"ready"},
    }
    job = whole.user.ended(whole.submitted("hostname; sleep 1", pool="far", nodes=2))
    assert job["state"] == "SUCCEEDED"
    assert set(whole.user("logs", job["id"]).stdout.split()) >= {"m2", "m3"}


SUM = """
import os, torch, torch.distributed as ranks
ranks.init_process_group("gloo")
told = torch.ones(1)
ranks.all_reduce(told)
print(int(told), os.environ["GLOO_SOCKET_IFNAME"], flush=True)
ranks.barrier()  # a rank that is gone before its sister is done aborts it
ranks.destroy_process_group()
"""


def test_a_gang_meets_on_the_interface_that_its_hosts_share(whole: Fleet):
    """Each host's name leads to a second interface, which nobody else reaches."""
    hosts = {machine: machine.inside("/etc/hosts").read_text() for machine in (whole.m2, whole.m3)}
    for machine, text in hosts.items():
        alone = ("link add eth1 type veth peer name nowhere", "addr add 10.1.1.1/24 dev eth1", "link set eth1 up")
        machine.run(["sh", "-ec", "; ".join(f"ip {line}" for line in alone)])
        machine.inside("/etc/hosts").write_text(text.replace(machine.address, "10.1.1.1"))
    try:
        command = f"{sys.executable} -c {shlex.quote(SUM)}"
        job = whole.user.ended(whole.submitted(command, pool="far", nodes=2, launch="ranks"))
        assert job["state"] == "SUCCEEDED", whole.user("logs", job["id"]).stdout
        assert whole.user("logs", job["id"]).stdout.count("2 eth0") == 2
    finally:
        for machine, text in hosts.items():
            machine.run(["ip", "link", "del", "eth1"])
            machine.inside("/etc/hosts").write_text(text)


GREET = """
import socket, ssl, sys
host, port, folder, own = sys.argv[1].rpartition(":")[0], sys.argv[1].rpartition(":")[2], sys.argv[2], sys.argv[3]
context = ssl.create_default_context(cafile=folder + "/ca.crt")
context.set_alpn_protocols(["h2"])
if own == "own":
    context.load_cert_chain(folder + "/node.crt", folder + "/node.key")
with socket.create_connection((host, int(port)), 10) as s, context.wrap_socket(s, server_hostname=host) as t:
    t.settimeout(10)
    t.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    print(len(t.recv(9)))
"""
"""Begins HTTP/2 with Ray's state server: prints how many bytes of the answer's first frame came."""


def test_ray_talks_to_nobody_who_has_no_certificate_of_the_fleet(whole: Fleet):
    head, folder = whole.user.file("fleet.json")["address"], str(HOME / ".polyfleet" / "tls")
    greet = [sys.executable, "-I", "-c", GREET, head, folder]
    assert whole.m1.run([*greet, "own"]).stdout == "9\n"
    refused = whole.m1.run([*greet, "none"], check=False)
    assert refused.stdout != "9\n", refused.stderr


def test_a_second_up_changes_nothing_and_restarts_what_is_missing(whole: Fleet):
    before = {machine.name: whole.raylet(machine) for machine in (whole.m2, whole.m3)}
    told = whole.user("up", "--file", str(HOME / "fleet.yaml"))
    assert "pool far has 2 separate storages (m2; m3)" in " ".join((told.stdout + told.stderr).split())
    [found] = [f for f in whole.user.doctor() if f["subject"] == "storage"]
    assert found["level"] == "info" and "checkpoint: {replicas: 1}" in found["remedy"]
    assert {machine.name: whole.raylet(machine) for machine in (whole.m2, whole.m3)} == before


def test_a_watchdog_starts_a_node_again_that_has_ended(whole: Fleet):
    before = whole.raylet(whole.m2)
    whole.m2.run(["kill", "-9", before])
    wait(lambda: whole.raylet(whole.m2) not in ("", before))
    wait(whole.all_ready)
    assert whole.user.ran("hostname", "--pool", "far")


def test_a_host_that_was_cut_off_is_back_once_the_cut_heals(whole: Fleet):
    job = whole.submitted("hostname; sleep 300", node="far-m2")
    whole.bed.cut("m2")
    wait(lambda: "lost" in whole.user.states()["far-m2"])
    wait(lambda: whole.user.job(job)["state"] == "PENDING" or whole.user.job(job)["interruptions"] == 1)
    whole.bed.heal()
    wait(whole.all_ready)
    wait(lambda: whole.user.job(job)["state"] == "RUNNING")
    assert whole.m2.run(["pgrep", "-fc", "sleep 300"], check=False).stdout.strip() in ("1", "2")  # the shell, and it
    whole.user("cancel", job)
    assert whole.user.ended(job)["state"] == "CANCELLED"


def test_a_job_goes_on_elsewhere_when_its_host_is_switched_off_which_is_joined_again_when_it_is_back(whole: Fleet):
    job = whole.submitted("hostname; sleep 1000", pool="far")
    name = wait(lambda: whole.user("logs", job).stdout.strip())
    machine = whole.bed.machines[name]
    machine.power_off()
    (other,) = {"m2", "m3"} - {name}
    wait(lambda: other in whole.user("logs", job, check=False).stdout)
    machine.boot()
    wait(whole.all_ready)
    assert any("was joined again" in found["message"] for found in whole.user.doctor())
    whole.user("cancel", job)


def _node_of(whole: Fleet, job: str) -> str:
    """Of its newest attempt."""
    first, *_ = whole.user.job(job)["attempts"][-1]["allocations"]
    return str(first["devices"]).partition("/")[0]


def _training(whole: Fleet, **more: Any) -> str:
    """The id of one in pool far that saves every 50 steps."""
    spec = {"entry": "train.py", "working_dir": str(ROOT / "examples" / "sine"), "arguments": {"steps": 1_000_000}}
    (whole.m1.disk / "train.yaml").write_text(json.dumps(spec | {"resources": {"pool": "far"}} | more))
    return str(whole.user.told("submit", str(HOME / "train.yaml"))["id"])


def test_a_training_that_moves_to_another_host_takes_its_checkpoint_along(whole: Fleet):
    job = _training(whole)
    saved = wait(lambda: (whole.user.job(job)["checkpoint"] or {}).get("step"))
    node = _node_of(whole, job)
    whole.user("node", "drain", "--now", node)
    wait(lambda: (whole.user.job(job)["resumed_step"] or 0) >= saved)
    assert _node_of(whole, job) != node and whole.user.job(job)["missed_checkpoint"] == ""
    whole.user("cancel", job)
    whole.user("node", "resume", node)


def test_a_training_goes_on_from_a_copy_of_its_checkpoint_when_its_host_is_switched_off(whole: Fleet):
    job = _training(whole, checkpoint={"replicas": 1, "keep": 2})
    wait(lambda: whole.user.job(job)["replicas"])
    node = _node_of(whole, job)
    (other,) = {"far-m2", "far-m3"} - {node}
    [copy] = whole.user.job(job)["replicas"]
    assert copy["node"] == other
    assert f"on {other} (far:{job}/" in " ".join(whole.user("show", job).stdout.split())
    whole.bed.machines[node.removeprefix("far-")].power_off()
    view = wait(lambda: (now := whole.user.job(job))["resumed_step"] and now)
    assert view["resumed_step"] >= copy["step"] and _node_of(whole, job) == other
    listed = json.loads(whole.user("checkpoint", "list", "-o", "json", f"far:{job}").stdout)
    assert {tuple(row["nodes"]) for row in listed} == {(other,)}
    whole.user("cancel", job)


def test_the_last_checkpoint_of_a_training_that_has_ended_is_on_two_hosts(whole: Fleet):
    wait(whole.all_ready)
    job = _training(whole, arguments={"steps": 60}, checkpoint={"replicas": 1})
    ended = whole.user.ended(job)
    assert ended["state"] == "SUCCEEDED"
    wait(lambda: ended["checkpoint"]["step"] in [copy["step"] for copy in whole.user.job(job)["replicas"]])
    shown = json.loads(whole.user("checkpoint", "show", "-o", "json", f"far:{job}").stdout)
    listed = json.loads(whole.user("checkpoint", "list", "-o", "json", f"far:{job}").stdout)
    assert [row["nodes"] for row in listed if row["path"] == shown["path"]] == [["far-m2", "far-m3"]]


def test_hosts_are_removed_and_added_while_the_fleet_is_up(whole: Fleet):
    job = whole.submitted("hostname; sleep 1000", pool="far")
    name = wait(lambda: whole.user("logs", job).stdout.strip())
    whole.user("hosts", "remove", name)
    assert whole.raylet(whole.bed.machines[name]) == ""
    assert {row["host"] for row in whole.listed()} == {"m2", "m3"} - {name}
    assert whole.user.states().keys() == {"near-0", "far-m2", "far-m3"} - {f"far-{name}"}
    wait(lambda: whole.user.job(job)["state"] == "RUNNING")
    whole.user("cancel", job)
    whole.user("hosts", "add", "far", name, "--address", whole.bed.machines[name].address)
    assert whole.user.states()[f"far-{name}"] == "ready"


REFUSED: dict[str, tuple[Callable[[Fleet], Any], str]] = {
    "an unknown host": (lambda lab: lab.write({"host": "nowhere", "address": "10.1.1.1"}, name="x"), "is unknown"),
    "an address of another machine": (
        lambda lab: lab.write({"host": "m2", "address": lab.m3.address}, name="x"),
        "is not an address of this host",
    ),
    "a key that is not accepted": (lambda lab: lab.write_ssh(key=lab.bed.stranger.file), "refuses our key"),
    "a host key that is not known": (lambda lab: lab.write_ssh(known=False), "is not in any known_hosts file"),
    "a host key that has changed": (lambda lab: lab.m2.change_host_key(), "is not the one in known_hosts"),
    "two names of one machine": (
        lambda lab: lab.write(lab.host(lab.m2), {"host": lab.m2.address, "address": lab.m2.address}, name="x"),
        "are the same machine, m2",
    ),
    "no Python": (lambda lab: lab.m2.hide_python(), "has no Python 3."),
    "a disk that is full": (lambda lab: lab.m2.fill_disk(), "GB are free"),
    "an interpreter that is not there": (
        lambda lab: lab.write(lab.host(lab.m2), name="x", python="/nowhere/python"),
        "no Python interpreter at /nowhere/python",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_host_that_cannot_be_used_is_told_before_anything_starts(lab: Fleet, bed: Bed, case: str):
    lab.write_ssh()
    lab.write(lab.host(lab.m2), name="x")
    spoil, said = REFUSED[case]
    try:
        spoil(lab)
        told = lab.user("up", "--file", str(HOME / "x"), "--dry-run", check=False)
    finally:
        lab.write_ssh()
    assert told.returncode == 2, told.stdout + told.stderr
    assert said in " ".join(told.stdout.split())


def test_hosts_that_do_not_share_a_storage_which_they_should_are_refused_before_anything_starts(whole: Fleet):
    hosts = whole.host(whole.m2), whole.host(whole.m3)
    refused = whole.user("up", "--file", whole.write(*hosts, name="x", shared_storage=True), check=False)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "pools.far.shared_storage: pool far has 2 separate storages (m2; m3)" in " ".join(refused.stderr.split())


def test_down_stops_all_and_remembers_a_host_that_is_away(whole: Fleet):
    whole.bed.cut("m3")
    told = whole.user("down", check=False)
    assert told.returncode == 3
    assert "far-m2" in told.stdout + told.stderr
    assert whole.raylet(whole.m1) == whole.raylet(whole.m2) == ""
    [row] = whole.listed()
    assert row["host"] == "m3" and "the next `up` or `down`" in row["nodes"]["far-m3"]
    told = whole.user("down", check=False)
    assert told.returncode == 3
    assert "nothing was stopped" in told.stdout + told.stderr
    whole.bed.heal()
    told = whole.user("down")
    assert "stopped: far-m3" in told.stdout + told.stderr
    assert whole.raylet(whole.m3) == ""
    assert whole.listed() == []


def test_a_fleet_comes_up_with_the_hosts_it_needs_and_not_with_fewer(lab: Fleet, bed: Bed):
    lab.user("down")
    lab.m3.power_off()
    hosts = (lab.host(lab.m2), lab.host(lab.m3))
    refused = lab.user("up", "--file", lab.write(*hosts), check=False)
    assert refused.returncode == 3 and "host m3 cannot be reached" in refused.stderr
    assert not (lab.m1.disk / ".polyfleet/fleet.json").exists()
    lab.user("up", "--file", lab.write(*hosts, min_hosts=1))
    assert lab.user.states() == {"near-0": "ready", "far-m2": "ready"}
    lab.m3.boot()
    lab.user("down")


def test_hosts_with_one_home_have_nodes_of_their_own(lab: Fleet, bed: Bed):
    """As on a network file system: records, logs and attempts of one host are not those of another."""
    lab.user("down", check=False)
    own = lab.m3.disk
    try:
        lab.m3.power_off()
        lab.m3.disk = lab.m2.disk
        lab.m3.boot()
        lab.user("up", "--file", lab.write(lab.host(lab.m2), lab.host(lab.m3)))
        assert lab.user.states() == {"near-0": "ready", "far-m2": "ready", "far-m3": "ready"}
        job = lab.user.ended(lab.submitted("hostname; sleep 1", pool="far", nodes=2))
        assert set(lab.user("logs", job["id"]).stdout.split()) >= {"m2", "m3"}
        lab.user("down")
        assert lab.raylet(lab.m2) == lab.raylet(lab.m3) == ""
    finally:
        lab.m3.power_off()
        lab.m3.disk = own
        lab.m3.boot()


def test_ranks_run_from_their_pool_s_python_without_ray_on_a_node_that_runs_from_another(lab: Fleet, bed: Bed):
    lab.user("down", check=False)
    python = bare_python(bed.shared / "rayless", ("ray",))
    file = lab.m1.disk / "fleet.yaml"
    lab.write(lab.host(lab.m2))
    fleet = json.loads(file.read_text())
    fleet["pools"]["image"] = fleet["pools"]["far"] | {"environment": {"interpreter": str(python)}}
    file.write_text(json.dumps(fleet))
    lab.user("up", "--file", str(HOME / "fleet.yaml"))
    assert lab.user.states() == {"near-0": "ready", "far-m2": "ready", "image-m2": "ready"}
    script = "import importlib.util as util, sys; print(sys.prefix, util.find_spec('ray'))"
    assert lab.user.ran(f'python -c "{script}"', "--pool", "image") == f"{python.parent.parent} None"
    lab.user("down")
