"""Polyfleet joins a Ray cluster that somebody else has started on other machines."""

import sys
from collections.abc import Iterator

import pytest
from bed import Bed
from their_ray import TOKEN, TheirRay, User, bare_python, wait

pytestmark = pytest.mark.full

ORDERED = True  # nodes come one after the other, and the last tests end the fleet
LABEL = "--labels=polyfleet.io/node={}"


@pytest.fixture(scope="module")
def theirs(shared_bed: Bed) -> Iterator[TheirRay]:
    """Two nodes with one CPU each, fewer than their machine has; none on m3."""
    m1, m2, _ = shared_bed.machines.values()
    made = TheirRay(shared_bed, m1, "--num-cpus=1", LABEL.format("m1"))
    made.node(m2, "--num-cpus=1", LABEL.format("m2"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def outside(theirs: TheirRay, shared_bed: Bed) -> Iterator[User]:
    """A user on m3, which has no node of the cluster."""
    user = User(shared_bed.machines["m3"])
    user("up", "--address", theirs.address)
    yield user
    user("down")


def test_a_server_where_no_node_of_ray_is_starts_one_for_itself_which_gets_no_work(outside: User):
    assert outside.states() == {"m1": "ready", "m2": "ready"}
    server = outside.file("server.json")["pid"]
    jobs = [outside.submit("hostname; sleep 1") for _ in range(2)]
    assert {outside.ended(job)["state"] for job in jobs} == {"SUCCEEDED"}
    assert {outside("logs", job).stdout.strip() for job in jobs} <= {"m1", "m2"}
    assert outside.processes().keys() == {"server"} and outside.file("server.json")["pid"] == server


def test_a_node_with_fewer_cpus_than_its_machine_gives_out_those(outside: User):
    assert outside.ran("echo $OMP_NUM_THREADS") == "1"
    assert {node["cpu_count"] for node in outside.told("inventory")} == {1}


def test_a_server_whose_node_of_ray_has_ended_starts_it_again(outside: User):
    before, server = outside.processes()["server"], outside.file("server.json")["pid"]
    outside.machine.run(["kill", "-9", str(before)])
    wait(lambda: outside.processes()["server"] != before)
    assert outside.ran("echo $((6 * 7))") == "42"
    assert outside.file("server.json")["pid"] == server


def test_our_code_travels_to_a_node_whose_python_has_not_got_it(outside: User, theirs: TheirRay, shared_bed: Bed):
    python = bare_python(shared_bed.shared / "bare", ())
    theirs.node(outside.machine, "--num-cpus=1", LABEL.format("bare"), python=python, env={})
    wait(lambda: outside.states().get("bare") == "ready")
    for node in ("m1", "m2"):
        outside("node", "drain", node)
    assert outside.ran("hostname") == "m3"
    for node in ("m1", "m2"):
        outside("node", "resume", node)


def test_a_node_that_cannot_run_our_code_says_what_it_lacks(outside: User, theirs: TheirRay, shared_bed: Bed):
    python = bare_python(shared_bed.shared / "barer", ("psutil",))
    theirs.node(outside.machine, "--num-cpus=1", LABEL.format("barer"), python=python, env={})
    wait(lambda: "No module named 'psutil'" in outside.reasons().get("barer", ""))
    [found] = [f for f in outside.doctor() if (f["node"], f["level"]) == ("barer", "error")]
    assert "install polyfleet" in found["remedy"]


def test_a_server_beside_two_nodes_of_ray_starts_none_and_what_is_taken_down_leaves_theirs(
    outside: User, theirs: TheirRay, shared_bed: Bed
):
    outside("down")
    assert outside.machine.run(["pgrep", "-f", "polyfleet.io/role=server"], check=False).stdout == ""
    m1 = User(shared_bed.machines["m1"])
    theirs.node(m1.machine, "--num-cpus=1", LABEL.format("second"))
    m1("up", "--address", theirs.address)
    assert m1.processes() == {} and {"m1", "m2", "second"} <= m1.states().keys()
    assert m1.ran("echo $((6 * 7))") == "42"
    m1("down")
    assert len(m1.machine.run(["pgrep", "-x", "raylet"]).stdout.split()) == 2


METADATA = """
import json, sys
from ray._common.usage import usage_constants
from ray._raylet import GcsClient
gcs, key = GcsClient(address=sys.argv[1]), usage_constants.CLUSTER_METADATA_KEY
told = json.loads(gcs.internal_kv_get(key, namespace=b"cluster"))
print(told["ray_version"])
gcs.internal_kv_put(key, json.dumps(told | {"ray_version": sys.argv[2]}).encode(), True, namespace=b"cluster")
"""
"""Has a cluster say that it runs another Ray; prints which it said before."""


def test_a_cluster_of_another_ray_is_told_in_both_versions_and_nothing_starts(outside: User, theirs: TheirRay):
    outside("down", check=False)
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(TOKEN)}
    say = [sys.executable, "-c", METADATA, theirs.address]
    real = theirs.bed.machines["m1"].run([*say, "2.59.9"], environment).stdout.strip()
    try:
        refused = outside("up", "--address", theirs.address, check=False)
    finally:
        theirs.bed.machines["m1"].run([*say, real], environment)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    said = " ".join(refused.stderr.split())
    assert "runs Ray 2.59.9 and Python" in said and f"this Polyfleet Ray {real} and" in said
    assert not (outside.machine.disk / ".polyfleet/fleet.json").exists()
