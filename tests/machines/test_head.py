"""A fleet whose head is on a host, brought up from m1, which has no node of it but the server's own."""

import json
import sys
from collections.abc import Iterator

import pytest
from bed import Bed
from bed_machine import HOME
from test_hosts import Fleet
from their_ray import wait

pytestmark = pytest.mark.full
ORDERED = True  # the last tests end the fleet
COUNT = "for i in $(seq 1000); do echo tick $i; sleep 0.5; done"


@pytest.fixture(scope="module")
def led(shared_bed: Bed) -> Iterator[Fleet]:
    """The head and a node on m2, a node on m3."""
    fleet = Fleet(shared_bed)
    pool = {"backend": "cpu", "environment": {"interpreter": sys.executable}}
    pool["hosts"] = [fleet.host(fleet.m2), fleet.host(fleet.m3)]
    told = {"name": "led", "head": fleet.host(fleet.m2), "pools": {"far": pool}}
    (fleet.m1.disk / "led.yaml").write_text(json.dumps(told))
    fleet.user("up", "--file", str(HOME / "led.yaml"))
    yield fleet
    for machine in shared_bed.machines.values():
        machine.power_off()
        machine.boot()


def ticks(fleet: Fleet, job: str) -> int:
    lines = fleet.user("logs", "--tail", "1", job).stdout.split()
    return int(lines[-1]) if lines else 0


def test_a_host_is_removed_and_added_where_another_has_the_head(led: Fleet):
    led.user("hosts", "remove", "m3")
    assert [row["host"] for row in led.listed()] == ["m2"]
    led.user("hosts", "add", "far", "m3", "--address", led.m3.address)
    wait(led.all_ready)
    assert led.user.states().keys() == {"far-m2", "far-m3"}


def test_a_host_has_the_head_which_comes_back_with_its_cluster_and_down_leaves_nothing(led: Fleet, bed: Bed):
    address = led.user.told("status")["fleet"]["address"]
    assert address.startswith(f"{led.m2.address}:") and led.user.states().keys() == {"far-m2", "far-m3"}
    assert {row["host"]: row["nodes"] for row in led.listed()} == {
        "m2": {"head": "ready", "far-m2": "ready"},
        "m3": {"far-m3": "ready"},
    }
    refused = led.user("hosts", "remove", "m2", check=False)
    assert refused.returncode == 2 and "has the fleet's head" in refused.stderr
    led.user("node", "drain", "far-m2")
    job = led.submitted(COUNT)
    assert led.user.job(job)["attempts"][-1]["allocations"][0]["devices"].startswith("far-m3/")

    led.m2.run(["pkill", "-9", "-x", "gcs_server"])
    seen = ticks(led, job)
    wait(lambda: ticks(led, job) > seen)
    led.user("node", "resume", "far-m2")
    assert led.user.ran("hostname") == "m2", "its watchdog has started the head again"

    led.m2.power_off()
    seen = ticks(led, job)
    wait(lambda: ticks(led, job) > seen)
    late = led.waiting("hostname")
    led.m2.boot()
    assert led.user.ended(late)["state"] == "SUCCEEDED"
    wait(led.all_ready)
    view = led.user.job(job)
    assert view["state"] == "RUNNING" and view["attempt"] == 1, (
        "the host of the head was away for less than its nodes wait"
    )
    assert led.user.told("status")["fleet"]["address"] == address

    led.user("cancel", job)  # the next fleet with this home would start it again
    led.user("down")
    assert not any(led.raylet(machine) for machine in bed.machines.values())
    assert led.m2.run(["pgrep", "-x", "gcs_server"], check=False).stdout == ""


def test_what_cannot_have_the_head_is_told_before_anything_starts(led: Fleet):
    led.user("down", check=False)
    file = led.m1.disk / "led.yaml"
    good = json.loads(file.read_text())
    for head, said in (
        ({"host": "m2"}, "head.address: is required beside head.host"),
        ({"host": "m4", "address": "10.0.0.4"}, "host m4"),
        ({"host": "m2", "address": led.m3.address}, f"host m2 has the head at {led.m3.address}"),
    ):
        file.write_text(json.dumps(good | {"head": head}))
        refused = led.user("up", "--file", str(HOME / "led.yaml"), check=False)
        assert refused.returncode in (2, 3) and said in " ".join(refused.stderr.split()), refused.stderr
    assert not (led.m1.disk / ".polyfleet/fleet.json").exists()
