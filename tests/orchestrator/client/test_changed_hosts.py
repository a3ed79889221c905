"""A fleet whose hosts change while it is up stays the same fleet in all else."""

from typing import Any

from cluster.fleet.fleet_record import FleetRecord
from cluster.fleet.fleet_spec import FleetSpec, parse_fleet
from cluster.nodes import embedded
from orchestrator.client import hosts

M2, M3 = ({"host": name, "address": address} for name, address in (("m2", "10.0.0.2"), ("m3", "10.0.0.3")))


def spec_of(*listed: dict[str, Any], **settings: Any) -> FleetSpec:
    pools = {"far": {"backend": "cpu", "price_per_hour": 2.0, "hosts": list(listed)}}
    projects = {"vision": {"quota": {"cpu": 4}}}
    return parse_fleet(
        {"name": "lab", "head": M2, "ssh": {"user": "a"}, "pools": pools, "projects": projects} | settings
    )


def record_of(spec: FleetSpec) -> FleetRecord:
    settings = {"head_spec": spec.head.model_dump(mode="json"), "ssh_spec": spec.ssh.model_dump(mode="json")}
    settings["projects"] = embedded.plain_projects(spec)
    return embedded.with_spec(FleetRecord(spec.name, "up", "10.0.0.2:1", "0", 1.0, "/token", **settings), spec)


def test_a_host_that_is_added_changes_neither_the_policy_nor_projects_nor_prices():
    scheduler = {"policy": "max_min_fairness", "every_s": 30, "ageing_s": 600}
    before = spec_of(M2, scheduler=scheduler)
    assert hosts.with_hosts(record_of(before), "far", [M2, M3]) == spec_of(M2, M3, scheduler=scheduler)


def test_the_record_of_a_fleet_that_is_up_takes_over_its_hosts_and_its_policy():
    """Else a host that is added later is not of any pool, and the next change undoes this one."""
    now = embedded.with_spec(record_of(spec_of(M2)), spec_of(M2, M3, scheduler={"policy": "fifo"}))
    assert [host.host for host in embedded.spec_of(now).pools["far"].hosts] == ["m2", "m3"]
    assert embedded.spec_of(now).on_host("m3").pools.keys() == {"far"}
    assert now.policy_spec["name"] == "fifo"
