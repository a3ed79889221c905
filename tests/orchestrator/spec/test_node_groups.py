"""Pools that an autoscaler may grow, from a fleet file, and what its launches are told to have failed of."""

from pathlib import Path

import pytest
from ray.autoscaler.v2.schema import LaunchRequest

from cluster.errors import SpecError
from cluster.fleet.fleet_spec import check_attachable, load_fleet, parse_fleet
from cluster.nodes import embedded
from orchestrator.core.controller.scaling import NodeGroup
from orchestrator.runtime.agents import autoscaler
from orchestrator.spec import node_groups

ENGINES = Path(__file__).parents[3] / "examples" / "fleets" / "engines.yaml"
GiB = 2**30


def group(**pool) -> NodeGroup:
    [found] = node_groups.groups_of_fleet(parse_fleet({"pools": {"p": {"min_nodes": 0, "max_nodes": 8, **pool}}}))
    return found


def test_the_pools_of_the_example_that_grow_are_groups_and_the_others_are_not():
    h100, trn1 = node_groups.groups_of_fleet(load_fleet(ENGINES))
    assert h100 == NodeGroup(
        pool="h100",
        environment=h100.environment,
        backend="nvidia",
        kind="nvidia:H100-80GB",
        devices=8,
        resources={"CPU": 192.0, "GPU": 8.0},
        max_nodes=4,
        memory_bytes=h100.memory_bytes,
        price_per_hour=2.5,
    )
    assert h100.environment.startswith("image-")
    assert 74 * GiB < h100.memory_bytes <= 80 * GiB, "80 GB as the catalogue has it"
    assert (trn1.pool, trn1.kind, trn1.resources) == ("trn1", "neuron:trn1", {"CPU": 128.0, "neuron_cores": 32.0})


def test_a_slice_comes_whole_and_a_pool_says_how_long_it_is_waited_for():
    slices = group(
        backend="tpu", accelerators="tpu:v5e:4", topology="4x4", cpus=112, start_timeout_s=1800, keep_idle_s=60
    )
    assert (slices.hosts, slices.start_timeout_s, slices.keep_idle_s) == (4, 1800.0, 60.0)


def test_cpus_and_what_is_emulated_on_them_are_called_as_discovery_calls_them():
    cpu = group(backend="cpu", cpus=8, memory="64GiB", devices=4)
    assert (cpu.kind, cpu.devices, cpu.memory_bytes) == ("cpu", 4, 16 * GiB)
    assert group(backend="cpu", cpus=8, env={"POLYFLEET_CPU_ENGINE": "ipex"}).kind == "cpu:ipex"
    emulated = group(backend="tpu", cpus=8, env={"PJRT_DEVICE": "CPU"})
    assert (emulated.kind, emulated.emulated) == ("tpu:emulated", True)


def test_a_record_tells_the_same_groups_as_its_file():
    fleet = load_fleet(ENGINES)
    assert node_groups.groups_of_pools(embedded.plain_pools(fleet)) == node_groups.groups_of_fleet(fleet)
    assert node_groups.NodeGroupCache().groups({"p": {"max_nodes": 3}}) == (), (
        "of another version, say: then nothing grows"
    )


def test_a_pool_that_grows_has_to_say_what_a_node_has():
    with pytest.raises(SpecError, match=r"pools\.p\.cpus: is required"):
        group(backend="cpu")


def test_a_cluster_that_others_run_has_no_hosts_of_ours():
    pools = {"p": {"backend": "cpu", "hosts": ["gpu-a"]}}
    with pytest.raises(SpecError, match=r"pools\.p\.hosts: `polyfleet up --address` uses the nodes"):
        check_attachable(parse_fleet({"pools": pools, "head": {"address": "10.0.0.1"}}))


def test_of_the_launches_that_failed_lately_the_newest_of_each_pool_is_told():
    def launch(pool: str, failed_s: int, why: str) -> LaunchRequest:
        return LaunchRequest("x", pool, 1, LaunchRequest.Status.FAILED, 0, failed_s, why)

    rays = "launch failed with Failed to launch 1 nodes of type c with request id 0f-1a: "
    launches = [launch("a", 950, "no\ncapacity"), launch("a", 900, "quota"), launch("b", 100, "long ago")]
    told = autoscaler.failed_launches([*launches, launch("c", 990, rays)], 1000.0)
    assert told == {"a": "no capacity", "c": "launch failed with Failed to launch 1 nodes of type c"}
